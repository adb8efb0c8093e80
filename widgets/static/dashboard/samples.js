// The figures of the tiles over the last hour, as the frames have told them, and who held the blocks.

import { Ring } from "./ring.js";
import { holderNumber, references } from "./words.js";

const SAMPLES = 7200;
const SAMPLE_SECONDS = 0.5; // the least seconds between two samples
const USES = 3600;
const USE_SECONDS = 1;
const MOST_HOLDERS = 12;

export const FIGURES = [
  "tokens_in_per_second",
  "tokens_out_per_second",
  "time_to_first_token",
  "first_token_p95",
  "first_token_p99",
  "inter_token_latency",
  "inter_token_p95",
  "inter_token_p99",
  "memory_bytes",
  "num_blocks",
  "used_blocks",
  "queries",
  "hits",
];

export class Samples {
  constructor() {
    const columns = Object.fromEntries(FIGURES.map((name) => [name, Float64Array]));
    this.ring = new Ring({ time: Float64Array, gap: Uint8Array, ...columns }, SAMPLES);
  }

  // Take in the figures of a frame; what comes soon after the last ones replaces them. `isCut`: nothing is known of the time
  // between.
  take(time, figures, isCut) {
    const { ring } = this;
    const newest = ring.end > ring.begin ? ring.time[ring.slot(ring.end - 1)] : -Infinity;
    const before = ring.end - 1 > ring.begin ? ring.time[ring.slot(ring.end - 2)] : -Infinity;
    if (time < newest) return;
    const isSoon = !isCut && newest - before < SAMPLE_SECONDS && ring.end > ring.begin;
    const slot = ring.slot(isSoon ? ring.end - 1 : ring.push());
    if (!isSoon) ring.gap[slot] = Number(isCut);
    ring.time[slot] = time;
    for (const name of FIGURES) ring[name][slot] = figures[name] ?? NaN;
  }

  // Return the figures at a time; null where none are known.
  at(time) {
    const { ring } = this;
    const id = this.before(time);
    if (id === null) return null;
    const isUnknown = id + 1 < ring.end && ring.gap[ring.slot(id + 1)] && time > ring.time[ring.slot(id)];
    if (isUnknown) return null;
    const slot = ring.slot(id);
    return Object.fromEntries(FIGURES.map((name) => [name, Number.isNaN(ring[name][slot]) ? null : ring[name][slot]]));
  }

  // List [time, whether nothing is known before it, figures] between two times; what is not known of a figure is NaN.
  course(from, to) {
    const { ring } = this;
    const last = this.before(to);
    const points = [];
    if (last === null) return points;
    for (let id = Math.max(ring.begin, ring.search("time", from)); id <= last; id += 1) {
      const slot = ring.slot(id);
      points.push([ring.time[slot], Boolean(ring.gap[slot]), new Proxy(ring, { get: (columns, name) => columns[name]?.[slot] })]);
    }
    return points;
  }

  before(time) {
    const { ring } = this;
    let id = ring.search("time", time);
    if (id === ring.end || ring.time[ring.slot(id)] > time) id -= 1;
    return id < ring.begin ? null : id;
  }
}

// Who held how many blocks of an engine core, a second at a time.
export class Uses {
  constructor() {
    this.list = []; // { time, until, held, cached, parts: [[number, blocks], …] }, oldest first
  }

  // Where nothing is known of the time since the last frame (`isCut`), nobody is known to have held blocks in it.
  take(time, blocks, isCut) {
    const last = this.list[this.list.length - 1];
    if (last && !isCut) last.until = time;
    if (last && !isCut && time - last.time < USE_SECONDS) return;
    this.list.push({ time, until: time, ...countHolders(blocks) });
    if (this.list.length > USES + USES / 10) this.list.splice(0, this.list.length - USES);
  }

  // Call `visit(use, since, until)` for those between two times; `use` is null where nothing was seen.
  visit(from, to, visit) {
    let low = 0;
    let high = this.list.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.list[middle].time <= from) low = middle + 1;
      else high = middle;
    }
    for (let at = Math.max(0, low - 1); at < this.list.length && this.list[at].time < to; at += 1) {
      const { time, until } = this.list[at];
      const next = Math.min(this.list[at + 1]?.time ?? until, to);
      visit(this.list[at], time, Math.min(until, to));
      if (next > until) visit(null, until, next);
    }
  }
}

// Count the blocks that are held, those free but cached, and who holds the most, those together with one colour last.
export function countHolders(blocks) {
  const counts = new Map();
  let held = 0;
  let cached = 0;
  for (const word of blocks) {
    if (!references(word)) {
      if (word & 0x1000) cached += 1;
      continue;
    }
    held += 1;
    const number = holderNumber(word);
    counts.set(number, (counts.get(number) ?? 0) + 1);
  }
  const parts = [...counts].sort((first, second) => second[1] - first[1] || first[0] - second[0]);
  return { held, cached, numHolders: parts.length, parts: parts.slice(0, MOST_HOLDERS).sort((a, b) => a[0] - b[0]) };
}
