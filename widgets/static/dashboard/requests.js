// The table of requests: each row has the progress of one, and a button that ends it.

import { Aborts } from "./aborts.js";
import { element, panel, setAttribute, setText } from "./dom.js";
import { count, duration, integer, nameOf } from "./format.js";
import { REQUESTS } from "./palette.js";

const COLUMNS = ["request", "rank", "state", "prompt", "output", "time", "newest output", ""];
const CLASSES = ["request", "rank", "state", "prompt", "output", "time", "text", "action"];

// A bar with up to two parts, and the numbers over it.
class Bar {
  constructor(label) {
    this.label = label;
    this.parts = ["nbe-bar-first", "nbe-bar-second"].map((name) => element("i", { class: name }));
    this.text = element("span", {});
    const track = element("div", { class: "nbe-track" }, ...this.parts);
    this.node = element("div", { class: "nbe-bar", role: "progressbar", "aria-label": label }, track, this.text);
  }

  set(first, second, most, text) {
    [first, second].forEach((value, index) => {
      const width = `${most > 0 ? Math.min(100, (100 * value) / most) : 0}%`;
      if (this.parts[index].style.width !== width) this.parts[index].style.width = width;
    });
    setText(this.text, text);
    // A narrow column cuts it off.
    setAttribute(this.node, "title", text);
    setAttribute(this.node, "aria-valuemin", 0);
    setAttribute(this.node, "aria-valuemax", most);
    setAttribute(this.node, "aria-valuenow", Math.min(most, first + second));
    setAttribute(this.node, "aria-valuetext", text);
  }
}

class Row {
  constructor(table, request) {
    this.isSeen = true;
    this.wasLive = false;
    this.swatch = element("i", { class: "nbe-swatch" });
    this.number = element("b", {});
    this.name = element("span", { class: "nbe-id" });
    this.rank = element("span", {});
    this.state = element("span", { class: "nbe-request-state" });
    this.prompt = new Bar("prompt computed");
    this.output = new Bar("output");
    this.time = element("span", {});
    this.text = element("span", { class: "nbe-preview" });
    this.status = element("span", { class: "nbe-status" });
    this.abort = element("button", { type: "button", class: "nbe-button nbe-abort" }, "Abort");
    this.abort.addEventListener("click", () => {
      if (this.abort.getAttribute("aria-disabled") !== "true") table.aborts.start(this.request);
    });
    const cells = [
      ["request", this.swatch, this.number, this.name],
      ["rank", this.rank],
      ["state", this.state],
      ["prompt", this.prompt.node],
      ["output", this.output.node],
      ["time", this.time],
      ["text", this.text],
      ["action", this.abort, this.status],
    ];
    this.node = element(
      "tr",
      {},
      ...cells.map(([name, ...parts]) => element("td", { class: `nbe-cell-${name}` }, ...parts)),
    );
    const color = request.number % REQUESTS.length;
    this.swatch.style.background = `var(--nbe-request-${color}, ${REQUESTS[color]})`;
    this.isGone = false;
  }

  // The request has left the table, and its row stays where it is until the pointer has left.
  leave(table) {
    if (this.isGone) return;
    this.isGone = true;
    table.keepFocus(this.abort);
    this.abort.hidden = true;
    setAttribute(this.node, "data-finished", true);
    setText(this.status, "gone");
  }

  // A row that is not in sight is not touched as long as only its numbers change.
  update(request, table) {
    const before = this.request;
    this.request = request;
    const isSame = !this.isGone && before?.state === request.state && before.own === request.own && this.wasLive === table.isLive;
    if (isSame && !this.isSeen && !table.aborts.status(request)) return;
    this.wasLive = table.isLive;
    this.isGone = false;
    const isFinished = request.state === "finished";
    setText(this.number, `#${request.number}`);
    setText(this.name, request.preview || request.id);
    setText(this.rank, String(request.rank));
    setAttribute(this.name, "title", request.preview ? `${request.id}: ${request.preview}` : request.id);
    const state = isFinished ? (request.finish_reason ?? "finished") : request.state;
    setText(this.state, state);
    setAttribute(this.state, "data-state", request.state);
    setAttribute(this.state, "data-phase", phaseOf(request));
    this.updateBars(request);
    this.updateTime(request, table.time);
    setText(this.text, request.text || "–");
    setAttribute(this.text, "title", request.text ?? "");
    this.updateAction(request, table, isFinished);
    setAttribute(this.node, "data-own", request.own);
    setAttribute(this.node, "data-finished", isFinished);
  }

  updateBars(request) {
    const { num_prompt_tokens: prompt, num_cached_tokens: hit, num_output_tokens: output } = request;
    const cached = Math.max(0, Math.min(hit, prompt));
    const computed = Math.min(prompt, request.num_computed_tokens);
    const found = cached ? `, ${integer(cached)} hit` : "";
    this.prompt.set(Math.min(cached, computed), Math.max(0, computed - cached), prompt, `${integer(computed)} / ${integer(prompt)}${found}`);
    const most = Math.max(0, request.max_total_tokens - prompt);
    this.output.set(output, 0, most, `${integer(output)} / ${integer(most)}`);
  }

  updateTime(request, now) {
    const lasted = (request.ended_at ?? now) - request.added_at;
    const first = request.first_token_at === null ? null : request.first_token_at - request.added_at;
    setText(this.time, duration(Math.max(0, lasted)));
    const lost = request.num_preemptions ? `, ${count(request.num_preemptions, "preemption")}` : "";
    setAttribute(this.time, "title", `first token after ${duration(first)}${lost}`);
  }

  updateAction(request, table, isFinished) {
    const { aborts, isLive } = table;
    const canAbort = request.own && !isFinished && isLive;
    if (!canAbort) table.keepFocus(this.abort);
    if (this.abort.hidden === canAbort) this.abort.hidden = !canAbort;
    setAttribute(this.abort, "aria-label", `Abort request ${nameOf(request)}`);
    setAttribute(this.abort, "aria-disabled", aborts.isPending(request));
    const who = request.own ? "" : isFinished ? "" : "another client's";
    setText(this.status, (isFinished ? null : aborts.status(request)) ?? who);
  }
}

// Return what steps compute of a request: its prompt, what it has lost in a preemption, or its answer.
function phaseOf({ state, num_prompt_tokens: prompt, num_computed_tokens: computed, num_output_tokens: output }) {
  if (state !== "running") return state;
  if (computed < prompt) return output ? "recompute" : "prefill";
  return "decode";
}

export class Requests {
  constructor(app) {
    this.app = app;
    this.aborts = new Aborts(app, () => app.loop.invalidate(this));
    this.rows = new Map();
    this.now = element("span", { class: "nbe-now" });
    this.body = element("tbody", {});
    const heads = COLUMNS.map((name, at) => element("th", { scope: "col", class: `nbe-cell-${CLASSES[at]}` }, name));
    this.table = element(
      "table",
      { class: "nbe-table", "aria-label": "Requests" },
      element("thead", {}, element("tr", {}, ...heads)),
      this.body,
    );
    this.empty = element("p", { class: "nbe-muted nbe-empty" }, "no requests yet");
    this.scroller = element("div", { class: "nbe-scroller", tabindex: "0", role: "region", "aria-label": "Requests" }, this.table);
    this.live = element("span", { class: "nbe-live" }, "live");
    this.live.hidden = true;
    // While the pointer is on a row, or something is pressed, no row moves: a click is for the row that it was meant for.
    this.isHeld = false;
    this.body.addEventListener("pointerenter", () => this.hold());
    this.body.addEventListener("pointerleave", () => this.release());
    const { node, body } = panel("requests", "Requests", this.live, this.now);
    body.append(this.scroller, this.empty);
    this.node = node;
    this.byNode = new WeakMap();
    app.page.attach((window) => {
      this.observer = new window.IntersectionObserver((entries) => this.seen(entries), { root: this.scroller, rootMargin: "60px" });
      for (const row of this.rows.values()) this.observer.observe(row.node);
      return () => {
        this.observer.disconnect();
        this.release();
      };
    });
  }

  seen(entries) {
    for (const entry of entries) {
      const row = this.byNode.get(entry.target);
      row.isSeen = entry.isIntersecting;
    }
    this.app.loop.invalidate(this);
  }

  add(request) {
    const row = new Row(this, request);
    this.rows.set(this.aborts.key(request), row);
    this.byNode.set(row.node, row);
    this.observer.observe(row.node);
  }

  // What is above the rows keeps its height, too.
  hold() {
    this.isHeld = true;
    this.app.header.hold(true);
  }

  release() {
    this.isHeld = false;
    this.app.header.hold(false);
    this.app.loop.invalidate(...this.app.parts);
  }

  get isLive() {
    if (this.isPast || this.app.store.engine?.state === "ended") return false;
    return this.app.link.state === "live" || this.app.link.state === "silent";
  }

  draw() {
    const { store, view } = this.app;
    const past = view.time === null ? null : store.tableAt(view.time);
    const requests = past ?? store.requests;
    this.isPast = past !== null;
    this.live.hidden = view.time === null || this.isPast;
    this.time = (past ? view.time : store.time) ?? 0;
    this.aborts.keepOnly(store.requests);
    this.table.classList.toggle("nbe-has-ranks", store.ranks.size > 1);
    const wanted = new Set(requests.map((request) => this.aborts.key(request)));
    if (!this.isHeld) this.removeAllBut(wanted);
    let before = null;
    for (const request of requests) {
      const key = this.aborts.key(request);
      const isNew = !this.rows.has(key);
      if (isNew) this.add(request);
      const row = this.rows.get(key);
      row.update(request, this);
      if (!this.isHeld) this.put(row.node, before);
      else if (isNew) this.body.append(row.node);
      before = row.node;
    }
    if (this.isHeld) for (const [key, row] of this.rows) if (!wanted.has(key)) row.leave(this);
    this.empty.hidden = requests.length > 0;
    setText(this.empty, this.isPast ? "no requests at this time" : "no requests yet");
    const counted = (state) => requests.filter((request) => request.state === state).length;
    setText(this.now, ["running", "waiting", "preempted"].map((state) => `${integer(counted(state))} ${state}`).join(" · "));
  }

  removeAllBut(wanted) {
    for (const [key, row] of this.rows) {
      if (wanted.has(key) && !row.isGone) continue;
      this.keepFocus(row.node);
      this.observer.unobserve(row.node);
      row.node.remove();
      this.rows.delete(key);
    }
  }

  // Put a row behind another one. Where the row that is there belongs further down, that is the one that moves.
  put(node, before) {
    const next = before ? before.nextSibling : this.body.firstChild;
    if (next === node) return;
    if (next && next.nextSibling === node) this.move(next, null);
    else this.move(node, next);
  }

  // A button in a row keeps the focus.
  move(node, next) {
    const { activeElement } = this.app.page.document;
    const focused = node.contains(activeElement) ? activeElement : null;
    this.body.insertBefore(node, next);
    focused?.focus({ preventScroll: true });
  }

  // A row that is about to be removed gives the focus to the table.
  keepFocus(node) {
    if (node.contains(this.app.page.document.activeElement)) this.scroller.focus({ preventScroll: true });
  }
}
