// The grid of a comparison: rows are asked for as they come into sight, and drawn while they are in sight.
// widgets/grid/cells_widget.py describes the messages. Texts go into text nodes and attributes only; the notebook's own
// renderer makes elements of Markdown.
import { send } from "../common/send.js";
import { control, element } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const ROWS_AT_ONCE = 40;
const LATE_MS = 2000;
const NO_KERNEL = "No kernel answers: run the cell again.";
const THUMBS = [
  [1, "good", "a thumb up for this answer"],
  [-1, "bad", "a thumb down for this answer"],
];

class Grid {
  constructor(model, el) {
    this.model = model;
    this.order = [...Array(model.get("num_rows")).keys()];
    this.rows = new Map(model.get("first_rows").map((row) => [row.row, row]));
    this.cells = new Map();
    this.asked = new Set();
    this.isAlone = false; // no kernel has answered: what the page has is all there is
    this.drawn = 0;
    this.chosen = null;
    this.root = element("div", "nbc mathjax_ignore tex2jax_ignore");
    this.table = element("table", "nbc-table", { id: model.get("grid") });
    this.table.nbArrange = (order) => this.arrange(order);
    this.head();
    this.body = this.table.createTBody();
    this.end = control("button", "nbc-button", { type: "button", title: "draw the next rows" });
    this.end.addEventListener("click", () => this.more());
    this.status = element("div", "nbc-note", { role: "status" });
    this.diff = element("div", "nbc-diff", { hidden: "" });
    this.root.append(this.table, this.end, this.diff, this.status);
    for (const line of model.get("foot")) this.root.append(element("div", "nbc-note", {}, line));
    el.append(this.root);
    this.observer = new IntersectionObserver((seen) => this.reach(seen.some((each) => each.isIntersecting)), {
      rootMargin: "600px",
    });
    this.observer.observe(this.end);
    this.onMessage = (message) => this.receive(message);
    model.on("msg:custom", this.onMessage);
    this.more();
  }

  close() {
    clearTimeout(this.late);
    this.observer.disconnect();
    this.model.off("msg:custom", this.onMessage);
    this.root.remove();
  }

  head() {
    const columns = this.model.get("columns");
    if (columns.length < 2) return;
    const row = element("tr");
    row.append(element("th", "nbc-corner", { scope: "col" }));
    for (const labels of columns) row.append(this.labels("th", labels, { scope: "col" }));
    this.table.createTHead().append(row);
  }

  labels(tag, labels, attributes = {}) {
    const made = element(tag, "nbc-labels", attributes);
    for (const [name, value] of labels) {
      const line = element("div");
      line.append(element("span", "nbc-note", {}, `${name} `), element("b", "", {}, value));
      made.append(line);
    }
    return made;
  }

  // Show other rows, or the same in another order: the table of scores sorts and filters.
  arrange(order) {
    this.order = order;
    this.drawn = 0;
    this.cells.clear();
    this.body.replaceChildren();
    this.more();
  }

  // Draw the next rows where the end comes into sight. A page that stays at the end, since the reader is at the next
  // cell, would come to all rows: there the reader asks for them.
  reach(isInSight) {
    const stays = this.isFresh && this.table.clientHeight > window.innerHeight;
    this.isFresh = false;
    if (isInSight && !stays) this.more();
  }

  // Draw the next rows, and ask for those that are not known; where no kernel answers, draw those that are.
  more() {
    const isKnown = (number) => this.rows.has(number);
    const rows = this.isAlone ? this.order.filter(isKnown) : this.order;
    const wanted = rows.slice(this.drawn, this.drawn + ROWS_AT_ONCE);
    const missing = (this.isAlone ? this.order : wanted).filter((number) => !isKnown(number) && !this.asked.has(number));
    if (missing.length) this.ask(missing.slice(0, ROWS_AT_ONCE));
    let number = wanted.shift();
    while (number !== undefined && this.rows.has(number)) {
      this.draw(this.rows.get(number));
      this.drawn += 1;
      number = wanted.shift();
    }
    const left = rows.length - this.drawn;
    this.end.textContent = `${left.toLocaleString("en")} more rows`;
    this.end.hidden = left === 0;
    // What is still in sight has room for more: the observer tells it once only.
    this.isFresh = true;
    this.observer.unobserve(this.end);
    if (left) this.observer.observe(this.end);
  }

  ask(rows) {
    const isSent = send(this.model, { kind: "rows", rows });
    if (this.isAlone) return;
    for (const number of rows) this.asked.add(number);
    clearTimeout(this.late);
    this.late = setTimeout(() => this.unanswered(), isSent ? LATE_MS : 0);
  }

  unanswered() {
    this.isAlone = true;
    this.asked.clear();
    const missing = this.order.filter((number) => !this.rows.has(number)).length;
    this.say(`No kernel answers, and ${missing.toLocaleString("en")} rows are not in this page: run the cell again.`);
    this.more();
  }

  take(rows) {
    for (const row of rows) {
      this.rows.set(row.row, row);
      this.asked.delete(row.row);
    }
    if (!this.asked.size) clearTimeout(this.late);
    if (!this.isAlone) {
      this.more();
      return;
    }
    this.isAlone = false;
    this.say("");
    this.arrange(this.order);
  }

  draw(row) {
    const line = element("tr", "", { "data-row": row.row });
    line.append(this.labels("th", row.labels, { scope: "row" }));
    row.cells.forEach((cell, column) => {
      const place = element("td");
      const position = row.row * row.cells.length + column;
      this.cells.set(position, place);
      this.fill(place, position, cell);
      line.append(place);
    });
    this.body.append(line);
  }

  fill(place, position, cell) {
    place.replaceChildren();
    const columns = this.model.get("columns");
    const own = this.labels("div", columns[position % columns.length]);
    own.classList.add("nbc-own");
    place.append(own);
    const text = element("div", "nbc-text nbc-clamped");
    cell.answers.forEach((answer, number) => this.write(text, cell, answer, number));
    if (cell.error) text.append(element("div", "nbc-error", {}, cell.error));
    const marks = element("div");
    for (const [words, state] of cell.scores) marks.append(element("span", `nbc-mark nbc-${state || "number"}`, {}, words));
    place.append(text, marks, this.bar(position, cell, text), element("div", "nbc-note", {}, cell.foot));
  }

  // Write an answer as text, in whose place Markdown comes later.
  write(text, cell, answer, number) {
    if (cell.answers.length > 1) text.append(element("div", "nbc-note", {}, `${number + 1}.`));
    const place = element(cell.code ? "pre" : "div", "nbc-answer", {}, answer);
    text.append(place);
    if (number in cell.markdown) renderMarkdown(this.model, place, cell.markdown[number]);
  }

  bar(position, cell, text) {
    const bar = element("div", "nbc-bar", { role: "toolbar", "aria-label": "this answer" });
    const add = (words, title, act, pressed) => {
      const attributes = { type: "button", title, "aria-label": title };
      if (pressed !== undefined) attributes["aria-pressed"] = String(pressed);
      const button = control("button", "nbc-button", attributes, words);
      button.addEventListener("click", () => act(button));
      bar.append(button);
      return button;
    };
    for (const [value, sign, title] of THUMBS) {
      const isSet = cell.thumb === value;
      add(sign, title, () => this.send({ kind: "thumb", position, thumb: isSet ? 0 : value }), isSet);
    }
    add("copy", "copy this answer", () => this.copy(cell));
    add("again", "ask this again", () => this.send({ kind: "again", position }));
    add("pin", "keep this run for ever", () => this.send({ kind: "pin", position, pinned: !cell.pinned }), cell.pinned);
    add("diff", "compare with another answer", (button) => this.choose(position, button), this.chosen === position);
    const open = add("open", "show the whole answer", (button) => {
      const isOpen = !text.classList.toggle("nbc-clamped");
      button.textContent = isOpen ? "close" : "open";
      button.setAttribute("aria-expanded", String(isOpen));
    });
    open.setAttribute("aria-expanded", "false");
    open.hidden = !text.children.length;
    const measure = () => {
      const isClamped = text.classList.contains("nbc-clamped");
      if (isClamped) open.hidden = text.scrollHeight <= text.clientHeight + 1;
    };
    // Answers grow when Markdown, formulas and pictures come, and when the page becomes narrow.
    const sizes = new ResizeObserver(() => requestAnimationFrame(measure));
    for (const part of text.children) sizes.observe(part);
    return bar;
  }

  // The first answer of a pair is held until the second one is chosen.
  choose(position, button) {
    if (this.chosen === null) {
      this.chosen = position;
      this.chosenButton = button;
      button.setAttribute("aria-pressed", "true");
      this.say("Choose “diff” at the answer to compare with.");
      return;
    }
    const first = this.chosen;
    this.chosen = null;
    this.chosenButton.setAttribute("aria-pressed", "false");
    this.say("");
    if (first !== position) this.send({ kind: "diff", first, second: position });
    else this.diff.hidden = true;
  }

  async copy(cell) {
    try {
      await navigator.clipboard.writeText(cell.answers.join("\n\n"));
      this.say("copied");
    } catch {
      this.say("The browser does not let this page write to the clipboard.");
    }
  }

  send(message) {
    this.say(send(this.model, message) ? "" : NO_KERNEL);
  }

  say(text) {
    this.status.textContent = text;
  }

  receive(message) {
    if (message.kind === "rows") {
      this.take(message.rows);
    } else if (message.kind === "cell") {
      this.change(message);
    } else if (message.kind === "diff") {
      this.showDiff(message.parts);
    } else if (message.kind === "notice") {
      this.say(message.text);
    }
  }

  change({ position, cell }) {
    for (const row of this.rows.values()) {
      const column = position - row.row * row.cells.length;
      if (column >= 0 && column < row.cells.length) row.cells[column] = cell;
    }
    const place = this.cells.get(position);
    if (place === undefined) return;
    const focused = [...place.querySelectorAll("button")].indexOf(document.activeElement);
    this.fill(place, position, cell);
    if (focused >= 0) place.querySelectorAll("button")[focused]?.focus();
  }

  showDiff(parts) {
    const tags = { same: "span", inserted: "ins", deleted: "del" };
    this.diff.replaceChildren(...parts.map(([kind, text]) => element(tags[kind], "", {}, text)));
    this.diff.hidden = false;
    this.diff.scrollIntoView({ block: "nearest" });
  }
}

export default {
  render({ model, el }) {
    const grid = new Grid(model, el);
    return () => grid.close();
  },
};
