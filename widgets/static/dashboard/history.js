// The last steps of one engine core. Steps are called by *ordinals*, which count up from 0 in the order in which they came.

import { Ring } from "./ring.js";

export const HISTORY_STEPS = 10_000;
export const DECODE = 0;
export const PREFILL = 1;
export const RECOMPUTE = 2;
export const PREEMPTED = 0;
export const FINISHED = 1;

// A segment is a stretch of successive steps in which a request did the same; it is no longer than this, so that the
// segments that reach into a window begin shortly before it.
const SEGMENT_STEPS = 256;
const SEGMENTS = 1 << 18;
const EVENTS = 1 << 16;

const STEP_COLUMNS = {
  step: Float64Array,
  time: Float64Array,
  seconds: Float32Array,
  running: Int32Array,
  waiting: Int32Array,
  free: Int32Array,
  cached: Int32Array,
  prefill: Int32Array,
  decode: Int32Array,
  preempted: Uint16Array,
  gap: Uint8Array,
};
const SEGMENT_COLUMNS = {
  number: Int32Array,
  kind: Uint8Array,
  tokens: Int32Array,
  hit: Int32Array,
  first: Int32Array,
  last: Int32Array,
};
const EVENT_COLUMNS = { ordinal: Int32Array, number: Int32Array, kind: Uint8Array };

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = new Ring(STEP_COLUMNS, HISTORY_STEPS);
    this.segments = new Ring(SEGMENT_COLUMNS, SEGMENTS);
    this.events = new Ring(EVENT_COLUMNS, EVENTS);
    this.open = new Map(); // number → its latest segment
    this.current = []; // numbers of the latest step
    this.isCut = false;
    this.floor = 0; // steps before it have lost segments
  }

  get end() {
    return this.steps.end;
  }

  get begin() {
    return Math.min(this.end, Math.max(this.steps.begin, this.floor));
  }

  // Note that the next step does not follow the known ones.
  cut() {
    this.isCut = true;
    this.current = [];
    this.open.clear();
  }

  // Take in a STEP of the protocol.
  take(item) {
    if (item[1] === null) this.complete(item);
    else this.append(item);
  }

  append([step, time, seconds, running, waiting, free, cached, entries, preempted, finished]) {
    const { steps } = this;
    const ordinal = steps.push();
    const slot = steps.slot(ordinal);
    steps.step[slot] = step;
    steps.time[slot] = time;
    steps.seconds[slot] = seconds ?? NaN;
    steps.running[slot] = running;
    steps.waiting[slot] = waiting;
    steps.free[slot] = free;
    steps.cached[slot] = cached;
    steps.prefill[slot] = 0;
    steps.decode[slot] = 0;
    steps.preempted[slot] = preempted ? preempted.length : 0;
    steps.gap[slot] = this.isCut ? 1 : 0;
    this.isCut = false;
    if (entries) this.takeEntries(ordinal, slot, entries);
    else {
      for (const number of this.current) this.extend(ordinal, number, 1, DECODE, -1);
      steps.decode[slot] = this.current.length;
    }
    for (const number of preempted ?? []) this.note(ordinal, number, PREEMPTED);
    for (const number of finished ?? []) this.note(ordinal, number, FINISHED);
  }

  takeEntries(ordinal, slot, entries) {
    const { steps } = this;
    this.current = [];
    for (let at = 0; at < entries.length; at += 4) {
      const number = entries[at];
      const tokens = entries[at + 1];
      const kind = entries[at + 2];
      this.current.push(number);
      this.extend(ordinal, number, tokens, kind, entries[at + 3]);
      if (kind === DECODE) steps.decode[slot] += tokens;
      else steps.prefill[slot] += tokens;
    }
    if (this.open.size > 1024 + 4 * this.current.length) {
      this.open = new Map(this.current.map((number) => [number, this.open.get(number)]));
    }
  }

  extend(ordinal, number, tokens, kind, hit) {
    const { segments } = this;
    const id = this.open.get(number);
    if (id !== undefined && id >= segments.begin && hit < 0) {
      const slot = segments.slot(id);
      const isNext = segments.last[slot] === ordinal - 1 && ordinal - segments.first[slot] < SEGMENT_STEPS;
      if (isNext && segments.kind[slot] === kind && segments.tokens[slot] === tokens) {
        segments.last[slot] = ordinal;
        return;
      }
    }
    const oldest = segments.begin;
    const lastOfOldest = segments.last[segments.slot(oldest)];
    const added = segments.push();
    if (segments.begin > oldest) this.floor = Math.max(this.floor, lastOfOldest + 1);
    const slot = segments.slot(added);
    segments.number[slot] = number;
    segments.kind[slot] = kind;
    segments.tokens[slot] = tokens;
    segments.hit[slot] = hit;
    segments.first[slot] = ordinal;
    segments.last[slot] = ordinal;
    this.open.set(number, added);
  }

  // Events are kept in the order of their steps; a late one moves a few others.
  note(ordinal, number, kind) {
    const { events } = this;
    let slot = events.slot(events.push());
    for (let id = events.end - 2; id >= events.begin; id -= 1) {
      const before = events.slot(id);
      if (events.ordinal[before] <= ordinal) break;
      for (const column of Object.keys(EVENT_COLUMNS)) events[column][slot] = events[column][before];
      slot = before;
    }
    events.ordinal[slot] = ordinal;
    events.number[slot] = number;
    events.kind[slot] = kind;
    this.open.delete(number);
  }

  // Take in later news of a step: its duration, and the requests that have ended since.
  complete([step, , seconds, finished]) {
    const { steps } = this;
    let ordinal = steps.end - 1;
    while (ordinal >= steps.begin && this.at("step", ordinal) !== step) ordinal -= 1;
    if (ordinal < steps.begin) return;
    if (seconds !== null) steps.seconds[steps.slot(ordinal)] = seconds;
    const known = new Set();
    this.visitEvents(ordinal, ordinal + 1, (_, number, kind) => kind === FINISHED && known.add(number));
    for (const number of finished ?? []) if (!known.has(number)) this.note(ordinal, number, FINISHED);
  }

  at(column, ordinal) {
    return this.steps[column][this.steps.slot(ordinal)];
  }

  // Return the time at which a step was done; one that has no outcome yet lasts until the next one, as far as is known.
  // The next step may be planned before that: where steps overlap, each reaches to the beginning of the next.
  until(ordinal) {
    const start = this.at("time", ordinal);
    const next = ordinal + 1 < this.end ? this.at("time", ordinal + 1) : Infinity;
    const seconds = this.at("seconds", ordinal);
    const done = Number.isFinite(seconds) ? start + seconds : Number.isFinite(next) ? next : start;
    return Math.max(start, Math.min(done, next));
  }

  // Call `visit(slot)` for each segment that has a part in [from, to), in the order in which they began.
  visitSegments(from, to, visit) {
    const { segments } = this;
    for (let id = segments.search("first", from - SEGMENT_STEPS + 1); id < segments.end; id += 1) {
      const slot = segments.slot(id);
      if (segments.first[slot] >= to) return;
      if (segments.last[slot] >= from) visit(slot);
    }
  }

  // Call `visit(ordinal, number, kind)` for each event in [from, to).
  visitEvents(from, to, visit) {
    const { events } = this;
    for (let id = events.search("ordinal", from); id < events.end; id += 1) {
      const slot = events.slot(id);
      if (events.ordinal[slot] >= to) return;
      visit(events.ordinal[slot], events.number[slot], events.kind[slot]);
    }
  }

  // Return the ordinal of the step that was planned at a time, or of the first one after it.
  ordinalAt(time) {
    return Math.min(this.end, Math.max(this.begin, this.steps.search("time", time)));
  }

  // Return each request's part in a step: [{ number, kind, tokens, hit }].
  entriesAt(ordinal) {
    const { segments } = this;
    const entries = [];
    this.visitSegments(ordinal, ordinal + 1, (slot) => {
      const isFirst = segments.first[slot] === ordinal;
      entries.push({
        number: segments.number[slot],
        kind: segments.kind[slot],
        tokens: segments.tokens[slot],
        hit: isFirst ? segments.hit[slot] : -1,
      });
    });
    return entries;
  }
}
