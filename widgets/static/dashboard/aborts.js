// This module ends requests: through the kernel, or through its server while the kernel is busy.

import { canInterrupt, interrupt } from "../common/interrupt.js";
import { nameOf } from "./format.js";

const ANSWER_MS = 1500;
const NO_ANSWER = "the kernel does not answer";

// The aborts that were asked for, and their outcomes, by "rank:number".
export class Aborts {
  constructor(app, changed) {
    this.app = app;
    this.changed = changed;
    this.said = new Map();
    this.timers = new Map(); // functions that stop them
  }

  // Return the text beside a request, or null where no abort was asked for.
  status(request) {
    return this.said.get(this.key(request)) ?? null;
  }

  isPending(request) {
    return this.timers.has(this.key(request));
  }

  key({ rank, number }) {
    return `${rank}:${number}`;
  }

  start(request) {
    const key = this.key(request);
    if (this.timers.has(key)) return;
    if (!this.app.link.abort(request.rank, request.number, (error) => this.answered(request, error))) {
      this.say(request, NO_ANSWER);
      return;
    }
    this.timers.set(key, this.app.page.after(ANSWER_MS, () => this.unanswered(request)));
    this.say(request, "aborting …");
  }

  answered(request, error) {
    this.forgetTimer(request);
    this.app.link.forgetAbort(request.rank, request.number);
    this.say(request, error === null ? "aborted" : `not aborted: ${error}`);
  }

  // A busy kernel reads no messages: its server can interrupt it, which ends the request that the running cell waits for.
  // It must still be that request: the next cell must not be interrupted for one that has ended since the click.
  unanswered(asked) {
    const { link, store } = this.app;
    this.forgetTimer(asked);
    const request = store.request(asked.rank, asked.number);
    if (request?.id !== asked.id || request.state === "finished") {
      this.forget(asked);
      return;
    }
    if (!link.isFresh) {
      this.say(request, NO_ANSWER);
      return;
    }
    const path = link.model.get("interrupt_path");
    if (!request.foreground || !canInterrupt(path)) {
      this.say(request, "the kernel is busy: the request will be aborted when the cell ends");
      return;
    }
    this.say(request, "interrupting the cell …");
    interrupt(path).then(
      () => this.say(request, "the cell was interrupted"),
      (error) => this.say(request, `not aborted: ${error.message}`),
    );
  }

  forgetTimer(request) {
    this.timers.get(this.key(request))?.();
    this.timers.delete(this.key(request));
  }

  forget(request) {
    this.app.link.forgetAbort(request.rank, request.number);
    this.said.delete(this.key(request));
    this.changed();
  }

  say(request, text) {
    this.said.set(this.key(request), text);
    this.app.announcer.say(`request ${nameOf(request)}: ${text}`);
    this.changed();
  }

  // Forget all but these requests.
  keepOnly(requests) {
    const keys = new Set(requests.map((request) => this.key(request)));
    for (const key of this.said.keys()) if (!keys.has(key)) this.said.delete(key);
  }
}
