// The widget that shows the tokens of answers; widgets/tokens/widget.py describes the messages.
import { send } from "../common/send.js";
import { element, inNextLine, keepKeys } from "./dom.js";
import { makeLegend, nextUncertain } from "./legend.js";
import { Popover } from "./popover.js";
import { Tree } from "./tree.js";

const EAGER_ALTERNATIVES = 5;
const HOVER_MS = 120;
const LEAVE_MS = 200;
const REST_MS = 1000;

let widgets = 0;

class View {
  constructor(model, el) {
    this.model = model;
    this.tree = new Tree();
    this.prefix = `nbt${++widgets}`;
    this.drawn = { id: null, count: 0 };
    this.isAsking = false;
    this.focused = 0;
    this.pinned = false;
    this.build(el);
    this.popover = new Popover(
      this.root,
      this.prefix,
      (token) => this.branch(token),
      (anchor, hadFocus) => {
        this.pinned = false;
        anchor.classList.remove("nbt-open");
        if (hadFocus) anchor.focus();
      },
    );
    this.listen();
  }

  build(el) {
    this.root = element("div", "nbt");
    keepKeys(this.root);
    this.fold = element("button", "nbt-fold", { type: "button" });
    this.body = element("div", "nbt-body");
    this.tabs = element("div", "nbt-tabs", { role: "tablist", "aria-label": "Answers and branches" });
    this.panel = element("div", "nbt-panel", { role: "tabpanel", id: `${this.prefix}-panel` });
    this.text = element("div", "nbt-text", { role: "group", "aria-label": "Tokens" });
    this.foot = element("div", "nbt-foot");
    this.footer = element("span", "nbt-footer");
    this.stop = element("button", "nbt-stop", { type: "button" });
    this.stop.textContent = "■ Stop";
    this.notice = element("div", "nbt-notice", { role: "alert" });
    this.foot.append(this.footer, this.stop);
    this.panel.append(this.text, this.foot, makeLegend(() => this.toNextUncertain()), this.notice);
    this.body.append(this.tabs, this.panel);
    this.root.append(this.fold, this.body);
    el.append(this.root);
  }

  listen() {
    this.onMessage = (message) => this.receive(message);
    this.onActive = () => this.draw();
    this.onFolded = () => this.draw();
    this.onScroll = (event) => {
      if (!this.popover.box.contains(event.target)) this.popover.close();
    };
    this.onPress = (event) => {
      if (!this.popover.box.contains(event.target) && event.target !== this.popover.anchor) this.popover.close();
    };
    this.model.on("msg:custom", this.onMessage);
    this.model.on("change:active", this.onActive);
    this.model.on("change:folded", this.onFolded);
    document.addEventListener("scroll", this.onScroll, true);
    document.addEventListener("pointerdown", this.onPress, true);
    this.tabs.addEventListener("click", (event) => this.onTabClick(event));
    this.tabs.addEventListener("keydown", (event) => this.onTabKey(event));
    this.stop.addEventListener("click", () => this.ask({ kind: "stop", node: this.active }));
    this.fold.addEventListener("click", () => {
      this.model.set("folded", !this.model.get("folded"));
      this.model.save_changes();
    });
    this.text.addEventListener("click", (event) => this.onToken(event, (span) => this.open(span, true)));
    this.text.addEventListener("keydown", (event) => this.onTextKey(event));
    this.text.addEventListener("pointerover", (event) => this.onToken(event, (span) => this.soon(span)));
    this.text.addEventListener("pointerout", () => this.leave());
    this.popover.box.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.popover.box.addEventListener("pointerleave", () => this.leave());
  }

  start() {
    this.reset(this.model.get("snapshot") ?? {});
    this.hello();
    this.frame = requestAnimationFrame(() => this.watch());
  }

  // JupyterLab replaces an output by taking the old view away, without a word to it: until the new one is there, its place
  // stays as high as it was, so that nothing below jumps.
  watch() {
    const host = this.root.closest(".jp-OutputArea-output");
    if (!host) return;
    host.style.minHeight = "";
    let height = 0;
    this.sizes = new ResizeObserver(() => (height = this.root.isConnected ? host.offsetHeight : height));
    this.sizes.observe(this.root);
    this.changes = new MutationObserver(() => {
      if (this.root.isConnected) return;
      host.style.minHeight = `${height}px`;
      setTimeout(() => (host.style.minHeight = ""), REST_MS);
      this.end();
    });
    this.changes.observe(host, { childList: true });
  }

  // The kernel may replace the saved output, and with it this view, but not while somebody uses it.
  restSoon() {
    clearTimeout(this.resting);
    this.resting = setTimeout(() => {
      const isInUse = this.root.matches(":hover") || this.root.contains(document.activeElement);
      if (isInUse) this.restSoon();
      else this.send({ kind: "rest" });
    }, REST_MS);
  }

  end() {
    clearTimeout(this.timer);
    clearTimeout(this.resting);
    cancelAnimationFrame(this.frame);
    this.sizes?.disconnect();
    this.changes?.disconnect();
    this.model.off("msg:custom", this.onMessage);
    this.model.off("change:active", this.onActive);
    this.model.off("change:folded", this.onFolded);
    document.removeEventListener("scroll", this.onScroll, true);
    document.removeEventListener("pointerdown", this.onPress, true);
    this.root.remove();
  }

  get active() {
    const wanted = this.model.get("active");
    return this.tree.nodes.has(wanted) ? wanted : 0;
  }

  select(id) {
    this.model.set("active", id);
    this.model.save_changes();
    this.draw();
  }

  hello() {
    this.isAsking = true;
    this.send({ kind: "hello" });
  }

  send(content) {
    return send(this.model, content);
  }

  // Send a request, and say so if the kernel does not answer.
  ask(content) {
    this.say(this.send(content) ? "" : "The kernel does not answer.");
  }

  receive(message) {
    if (message.kind === "reset") this.reset(message);
    else if (message.kind === "node") this.update(message);
    else if (message.kind === "alternatives") this.complete(message);
    else if (message.kind === "select") this.select(message.node);
    else if (message.kind === "notice") this.say(message.text);
  }

  reset({ nodes = [], refusal = "" }) {
    this.isAsking = false;
    this.tree.clear();
    this.tree.refusal = refusal;
    for (const node of nodes) this.tree.take({ ...node, tokens: [...node.tokens] });
    this.drawn.count = Infinity;
    this.draw();
  }

  update(node) {
    const isNew = !this.tree.nodes.has(node.id);
    if (!this.tree.take(node)) {
      if (!this.isAsking) this.hello();
      return;
    }
    if (isNew) this.markForks();
    if (node.parent !== null && node.state !== "running") this.restSoon();
    this.draw();
  }

  say(text) {
    this.notice.textContent = text;
  }

  draw() {
    const folded = this.model.get("folded");
    const node = this.tree.nodes.get(this.active);
    this.fold.textContent = `${folded ? "▸" : "▾"} Tokens and their probabilities`;
    this.fold.setAttribute("aria-expanded", String(!folded));
    this.fold.hidden = !folded && !this.wasFolded;
    this.wasFolded ||= folded;
    this.body.hidden = folded;
    if (folded || !node) return;
    this.drawTabs();
    this.drawText(node);
    this.footer.textContent = node.footer;
    const isRunning = node.state === "running";
    if (!isRunning && this.stop.matches(":focus-visible")) this.focusToken(this.focused);
    this.stop.hidden = !isRunning;
    this.foot.hidden = this.stop.hidden && !node.footer;
    this.panel.setAttribute("aria-busy", String(isRunning));
    this.panel.classList.toggle("nbt-failed", node.state === "failed");
    if (node.error && !node.footer) this.say(node.error);
  }

  drawTabs() {
    const nodes = [...this.tree.nodes.values()];
    this.tabs.hidden = nodes.length < 2;
    while (this.tabs.children.length > nodes.length) this.tabs.lastChild.remove();
    nodes.forEach((node, index) => {
      const tab = this.tabs.children[index] ?? this.tabs.appendChild(element("button", "nbt-tab", { role: "tab", type: "button" }));
      const isActive = node.id === this.active;
      tab.id = `${this.prefix}-tab-${node.id}`;
      tab.dataset.node = node.id;
      tab.dataset.state = node.state;
      tab.tabIndex = isActive ? 0 : -1;
      tab.setAttribute("aria-selected", String(isActive));
      tab.setAttribute("aria-controls", this.panel.id);
      const title = node.parent === null ? node.label : `${node.id + 1} ↳ ${node.label}`;
      if (tab.textContent !== title) tab.textContent = title;
      tab.title = node.parent === null ? `answer ${node.label}` : `${node.label} at ${node.position} of ${node.parent + 1}`;
      if (isActive) this.panel.setAttribute("aria-labelledby", tab.id);
    });
  }

  drawText(node) {
    const tokens = this.tree.whole(node.id);
    let hadFocus = false;
    if (this.drawn.id !== node.id || this.drawn.count > tokens.length) {
      this.popover.close();
      // A user who came by a click has seen it: if the focus stayed here, the view would count as in use.
      hadFocus = this.text.querySelector(":focus-visible") !== null;
      this.text.replaceChildren();
      this.say("");
      this.goneTo = -1;
      if (this.drawn.id !== node.id || this.focused >= tokens.length) this.focused = node.position;
      this.drawn = { id: node.id, count: 0 };
    }
    const added = document.createDocumentFragment();
    for (let index = this.drawn.count; index < tokens.length; index++) {
      added.append(this.span(tokens[index], index, node));
    }
    this.text.append(added);
    if (hadFocus) this.focusToken(this.focused);
    if (this.drawn.count === 0) this.markForks();
    this.drawn.count = tokens.length;
    if (node.in_text !== null) {
      const end = node.position + node.in_text;
      for (let index = end; index < tokens.length; index++) this.text.children[index].classList.add("nbt-outside");
    }
  }

  span([, pieces, shade], index, node) {
    const span = element("span", "nbt-token", { role: "button", "aria-haspopup": "dialog" });
    for (const [mark, text] of pieces) span.append(mark ? this.marked(mark, text) : text);
    span.tabIndex = index === this.focused ? 0 : -1;
    if (shade) span.dataset.shade = shade;
    if (node.parent !== null && index === node.position) span.classList.add("nbt-chosen");
    return span;
  }

  // A mark is no text: it is not copied.
  marked(mark, text) {
    const piece = element("span", "nbt-mark", { "data-mark": mark });
    piece.textContent = text;
    return piece;
  }

  markForks() {
    const forks = this.tree.forks(this.active);
    [...this.text.children].forEach((span, index) => span.classList.toggle("nbt-forked", forks.has(index)));
  }

  indexOf(span) {
    return Array.prototype.indexOf.call(this.text.children, span);
  }

  onToken(event, action) {
    const span = event.target.closest(".nbt-token");
    if (span) action(span);
  }

  soon(span) {
    clearTimeout(this.timer);
    if (!this.pinned) this.timer = setTimeout(() => this.open(span, false), HOVER_MS);
  }

  leave() {
    clearTimeout(this.timer);
    if (!this.pinned) this.timer = setTimeout(() => this.popover.close(), LEAVE_MS);
  }

  open(span, pinned) {
    const index = this.indexOf(span);
    const token = this.tree.whole(this.active)[index];
    if (!token) return;
    clearTimeout(this.timer);
    if (this.popover.anchor !== span) this.popover.close();
    this.pinned = pinned;
    if (pinned) this.focusToken(index);
    span.classList.add("nbt-open");
    this.popover.show(span, token, token[5], this.tree.refusal);
    if (token[5].length >= EAGER_ALTERNATIVES) {
      this.send({ kind: "alternatives", node: this.active, position: index });
    }
  }

  complete({ node, position, alternatives }) {
    const anchor = this.popover.anchor;
    const token = this.tree.whole(node)[position];
    if (!anchor || node !== this.active || this.indexOf(anchor) !== position || !token) return;
    if (alternatives.length <= this.popover.box.querySelectorAll(".nbt-row").length) return;
    const { activeElement } = document;
    const hadFocus = this.popover.box.contains(activeElement);
    this.popover.show(anchor, token, alternatives, this.tree.refusal);
    if (hadFocus) this.popover.focus(activeElement.dataset.token);
  }

  branch(token) {
    const position = this.indexOf(this.popover.anchor);
    this.ask({ kind: "branch", node: this.active, position, token });
    this.popover.close();
  }

  focusToken(index) {
    const spans = this.text.children;
    if (!spans[index]) return;
    if (spans[this.focused]) spans[this.focused].tabIndex = -1;
    this.focused = index;
    spans[index].tabIndex = 0;
    spans[index].focus();
  }

  toNextUncertain() {
    const index = nextUncertain(this.tree.whole(this.active), this.goneTo ?? -1);
    this.say(index < 0 ? "No token here had a probability of 50 % or less." : "");
    if (index < 0) return;
    this.goneTo = index;
    // Its alternatives stay closed: they would lie over the button, and the next click would choose one of them.
    this.focusToken(index);
  }

  onTextKey(event) {
    const index = this.indexOf(event.target);
    if (index < 0) return;
    const last = this.text.children.length - 1;
    const targets = {
      ArrowLeft: () => index - 1,
      ArrowRight: () => index + 1,
      ArrowUp: () => inNextLine(this.text.children, index, -1),
      ArrowDown: () => inNextLine(this.text.children, index, 1),
      Home: () => 0,
      End: () => last,
    };
    if (event.key === "Enter" || event.key === " ") {
      this.open(event.target, true);
      this.popover.focus();
    } else if (event.key === "Escape") {
      this.popover.close();
    } else if (event.key in targets) {
      this.popover.close();
      this.focusToken(Math.max(0, Math.min(last, targets[event.key]())));
    } else return;
    event.preventDefault();
  }

  onTabClick(event) {
    const tab = event.target.closest(".nbt-tab");
    if (tab) this.select(Number(tab.dataset.node));
  }

  onTabKey(event) {
    const tabs = [...this.tabs.children];
    const index = tabs.indexOf(document.activeElement);
    const targets = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: tabs.length - 1 };
    if (!(event.key in targets)) return;
    const tab = tabs[(targets[event.key] + tabs.length) % tabs.length];
    this.select(Number(tab.dataset.node));
    tab.focus();
    event.preventDefault();
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    view.start();
    return () => view.end();
  },
};
