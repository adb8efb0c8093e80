// The messages between the script and the kernel.

import { download } from "./dom.js";
import { fromSnapshot } from "./store.js";

const ALIVE_MS = 5000;
const SILENT_MS = 15_000;
const FRESH_MS = 3000;
const HELLO_AGAIN_MS = 2000;
const LATE_MS = 2000;
const KEPT_ANSWERS = 256;

// `state` is "waiting" (nothing has come yet), "saved" (the notebook's saved state is shown), "live" or "silent".
export class Link {
  constructor(page, model, store, changed) {
    this.page = page;
    this.model = model;
    this.store = store;
    this.changed = changed;
    this.state = "waiting";
    this.isVisible = false;
    this.isLate = false;
    this.askedAt = -Infinity;
    this.heardAt = performance.now();
    this.aborts = new Map(); // "rank:number" → the function that takes the answer
    this.blockLines = new Map();
    this.exported = null;
    this.receive = (content, buffers) => this.message(content, buffers);
    this.snapshotChanged = () => this.takeSnapshot();
    model.on("msg:custom", this.receive);
    model.on("change:snapshot", this.snapshotChanged);
    page.every(ALIVE_MS, () => this.tick());
    page.after(LATE_MS, () => {
      this.isLate = true;
      if (this.state !== "live") this.changed("state");
    });
  }

  start() {
    this.takeSnapshot();
    this.hello();
  }

  takeSnapshot() {
    if (this.state !== "waiting" && this.state !== "saved") return;
    const snapshot = this.model.get("snapshot");
    if (!snapshot || !snapshot.kind) return;
    this.state = "saved";
    this.store.take(...fromSnapshot({ ...snapshot, reset: true }));
    this.store.seq = null;
    this.changed("reset");
  }

  // Send a message; false if nothing can be sent: a notebook takes a widget's comm away when the kernel is restarted.
  send(content) {
    try {
      this.model.send(content);
      return true;
    } catch {
      this.miss();
      return false;
    }
  }

  // Note that the kernel does not answer.
  miss() {
    this.isLate = true;
    if (this.state === "live") this.state = "silent";
    this.changed("state");
  }

  // Return whether the requests are shown as they are: frames come many times a second while requests run, also while a
  // cell does.
  get isFresh() {
    return this.state === "live" && performance.now() - this.heardAt < FRESH_MS;
  }

  hello() {
    this.askedAt = performance.now();
    this.send({ kind: "hello" });
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible) this.heardAt = performance.now();
    this.send({ kind: "alive", visible: isVisible });
  }

  // Out of sight the kernel is told, too, that there is a script, which misses nothing of what happens meanwhile.
  tick() {
    this.send({ kind: "alive", visible: this.isVisible });
    if (this.isVisible && this.state === "live" && performance.now() - this.heardAt > SILENT_MS) this.miss();
  }

  message(content, buffers) {
    if (content.kind === "frame") this.frame(content, buffers);
    else if (content.kind === "aborted") this.aborts.get(`${content.rank}:${content.number}`)?.(content.error);
    else if (content.kind === "block") this.blockAnswer(content);
    else if (content.kind === "export") this.file(content);
    else if (content.kind === "goes_on") this.wentOn?.(content.error);
    else if (content.kind === "history") this.historyAnswered?.(content);
  }

  // Wake the engine or lift its pause; `answered(error)` is called with the answer. False if the kernel cannot be asked.
  goOn(answered) {
    this.wentOn = answered;
    return this.send({ kind: "go_on" });
  }

  // Ask for what the engine's host has kept of the last time. False if the kernel cannot be asked.
  askHistory(last, answered) {
    this.historyAnswered = answered;
    return this.send({ kind: "history", last });
  }

  frame(content, buffers) {
    const now = performance.now();
    if (!this.store.take(content, buffers)) {
      if (now - this.askedAt > HELLO_AGAIN_MS) this.hello();
      return;
    }
    this.heardAt = now;
    this.state = "live";
    this.changed(content.reset ? "reset" : "frame");
  }

  // `answered(error)` is called with the kernel's answer, each time that one comes. False if the kernel cannot be asked.
  abort(rank, number, answered) {
    const isSent = this.send({ kind: "abort", rank, number });
    if (isSent) this.aborts.set(`${rank}:${number}`, answered);
    return isSent;
  }

  forgetAbort(rank, number) {
    this.aborts.delete(`${rank}:${number}`);
  }

  // Return the kernel's description of a block, null until it has answered. `word` is the block's present state: when
  // that changes, the answer is old.
  linesOf(rank, block, word) {
    return this.isAsked(rank, block, word) ? this.blockLines.get(`${rank}:${block}`).lines : null;
  }

  isAsked(rank, block, word) {
    return this.blockLines.get(`${rank}:${block}`)?.word === word;
  }

  askBlock(rank, block, word) {
    if (this.state !== "live") return;
    const key = `${rank}:${block}`;
    this.blockLines.delete(key);
    this.blockLines.set(key, { word, lines: null });
    if (this.blockLines.size > KEPT_ANSWERS) this.blockLines.delete(this.blockLines.keys().next().value);
    this.send({ kind: "block", rank, block });
  }

  blockAnswer({ rank, block, lines }) {
    const known = this.blockLines.get(`${rank}:${block}`);
    if (!known) return;
    known.lines = lines;
    this.changed("block");
  }

  // Ask for the steps as a file; `done` is called when it has come. False if the kernel cannot be asked.
  export(done) {
    const isSent = this.send({ kind: "export" });
    if (isSent) this.exported = done;
    return isSent;
  }

  // Every view of a widget gets the answer: it is for the one that has asked.
  file({ name, text }) {
    if (!this.exported) return;
    download(this.page, name, text);
    this.exported();
    this.exported = null;
  }

  destroy() {
    this.model.off("msg:custom", this.receive);
    this.model.off("change:snapshot", this.snapshotChanged);
  }
}
