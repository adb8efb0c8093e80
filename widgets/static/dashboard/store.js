// The state that a dashboard has built from the kernel's frames (the protocol is in widgets/dashboard/frames.py).

import { History } from "./history.js";
import { Past } from "./past.js";
import { Ring } from "./ring.js";
import { Samples, Uses } from "./samples.js";
import { NUMBERS } from "./words.js";

const SPANS = 8192;
const SPAN_COLUMNS = {
  since: Float64Array,
  until: Float64Array,
  isRunning: Uint8Array,
  steps: Float32Array,
  prefillSteps: Float32Array,
  recomputeSteps: Float32Array,
  dummySteps: Float32Array,
  wave: Int32Array,
  requests: Int32Array,
};

const STATUS = [
  "state",
  "num_cached_tokens",
  "num_preemptions",
  "first_token_at",
  "ended_at",
  "finish_reason",
  "own",
  "foreground",
];

export class Rank {
  constructor() {
    this.info = null;
    this.history = new History();
    this.blocks = new Uint32Array(0);
    this.changedBlocks = []; // since the map was painted
    this.areAllBlocksChanged = true;
    this.spans = new Ring(SPAN_COLUMNS, SPANS);
    this.open = []; // spans of the last second, which may still change
    this.requests = new Map(); // by number; what changes is put into a new object
    this.past = new Past();
    this.uses = new Uses();
  }

  // `time` is that of the frame.
  take(info, buffers, time) {
    const { steps, requests, blocks, history_lost: isCut, ...rest } = info;
    this.info = rest;
    if (isCut) this.history.cut();
    for (const step of steps) this.history.take(step);
    if (requests) this.takeRequests(requests, time);
    this.past.requestsSince ??= time;
    if (blocks) this.takeBlocks(words(buffers[blocks.buffer]), blocks.full, time);
    if (this.blocks.length) this.uses.take(time, this.blocks, isCut);
  }

  takeRequests({ gone, new: added, status, progress, texts = [] }, time) {
    const { requests, past } = this;
    const whole = new Set([...gone, ...added.map((request) => request.number), ...status.map(([number]) => number)]);
    const partly = new Set([...progress.filter((_, at) => at % 3 === 0), ...texts.map(([number]) => number)]);
    if (past.requestsSince !== null) {
      for (const number of whole) past.noteRequest(time, number, requests.get(number), true);
      for (const number of partly) if (!whole.has(number)) past.noteRequest(time, number, requests.get(number), false);
    }
    for (const number of gone) requests.delete(number);
    for (const request of added) requests.set(request.number, { text: "", ...request, rank: this.info.rank });
    for (const [number, ...values] of status) {
      const changes = Object.fromEntries(STATUS.map((name, at) => [name, values[at]]));
      requests.set(number, { ...requests.get(number), ...changes });
    }
    for (let at = 0; at < progress.length; at += 3) {
      const [number, computed, output] = progress.slice(at, at + 3);
      requests.set(number, { ...requests.get(number), num_computed_tokens: computed, num_output_tokens: output });
    }
    for (const [number, text] of texts) requests.set(number, { ...requests.get(number), text });
  }

  takeBlocks(buffer, isFull, time) {
    const { past } = this;
    if (isFull) {
      if (past.blocksSince === null || buffer.length !== this.blocks.length) past.beginBlocks(time);
      else buffer.forEach((word, block) => word !== this.blocks[block] && past.noteBlock(time, block, this.blocks[block]));
      this.areAllBlocksChanged = true;
      this.changedBlocks = [];
      this.blocks = buffer;
      return;
    }
    for (let at = 0; at + 1 < buffer.length; at += 2) {
      past.noteBlock(time, buffer[at], this.blocks[buffer[at]]);
      this.blocks[buffer[at]] = buffer[at + 1];
      if (!this.areAllBlocksChanged) this.changedBlocks.push(buffer[at]);
    }
    if (this.changedBlocks.length > this.blocks.length) {
      this.areAllBlocksChanged = true;
      this.changedBlocks = [];
    }
  }

  // Call `visit(span)` for each stretch of the engine core's time that reaches into [from, to], oldest first.
  visitSpans(from, to, visit) {
    const { spans } = this;
    for (let id = spans.search("until", from); id < spans.end; id += 1) {
      const slot = spans.slot(id);
      if (spans.since[slot] > to) return;
      visit(Object.fromEntries(Object.keys(SPAN_COLUMNS).map((name) => [name, spans[name][slot]])));
    }
    for (const span of this.open) if (span.until >= from && span.since <= to) visit(span);
  }

  // Find the stretch at a time.
  spanAt(time) {
    let found = null;
    this.visitSpans(time, time, (span) => (found ??= span.since <= time ? span : null));
    return found;
  }

  takeSpan(span) {
    const { spans } = this;
    const isIdle = !span.steps && !span.dummySteps;
    if (spans.end > spans.begin && isIdle) {
      const slot = spans.slot(spans.end - 1);
      const wasIdle = !spans.steps[slot] && !spans.dummySteps[slot];
      const isSame = ["isRunning", "wave", "requests"].every((name) => spans[name][slot] === span[name]);
      if (wasIdle && isSame && span.since - spans.until[slot] < 1e-3) {
        spans.until[slot] = span.until;
        return;
      }
    }
    const slot = spans.slot(spans.push());
    for (const name of Object.keys(SPAN_COLUMNS)) spans[name][slot] = span[name];
  }
}

// Name a span's fields as the columns; a snapshot of an older version does not tell what its steps did.
function spanOf({ start, end, running, steps, wave, ...rest }) {
  return {
    since: start,
    until: end,
    isRunning: Number(running),
    steps,
    prefillSteps: rest.prefill_steps ?? 0,
    recomputeSteps: rest.recompute_steps ?? 0,
    dummySteps: rest.dummy_steps,
    wave,
    requests: rest.num_requests,
  };
}

// Copy a buffer as little-endian words, whatever this machine and the view's offset are.
function words(view) {
  const bytes = new DataView(view.buffer ?? view, view.byteOffset ?? 0, view.byteLength);
  const result = new Uint32Array(bytes.byteLength >> 2);
  for (let index = 0; index < result.length; index += 1) result[index] = bytes.getUint32(4 * index, true);
  return result;
}

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.seq = null;
    this.time = null;
    this.engine = null;
    this.rates = null;
    this.ranks = new Map();
    this.requests = [];
    this.samples ??= new Samples();
  }

  // Take in a frame; false if it does not follow the last one, so that a reset frame is needed.
  take(frame, buffers) {
    if (!frame.reset && (this.seq === null || frame.seq !== this.seq + 1)) {
      this.seq = null;
      return false;
    }
    if (frame.reset) this.clear();
    this.seq = frame.seq;
    this.time = frame.time;
    this.engine = frame.engine;
    this.rates = frame.rates;
    const present = new Set();
    for (const info of frame.ranks) {
      present.add(info.rank);
      if (!this.ranks.has(info.rank)) this.ranks.set(info.rank, new Rank());
      this.ranks.get(info.rank).take(info, buffers, frame.time);
    }
    for (const rank of this.ranks.keys()) if (!present.has(rank)) this.ranks.delete(rank);
    this.requests = this.table();
    this.takeWaves(frame.waves);
    const isCut = frame.reset || frame.ranks.some((info) => info.history_lost);
    if (frame.engine.state !== "ended") this.samples.take(frame.time, this.figures, isCut);
    return true;
  }

  // Return the figures of now, of all engine cores together.
  get figures() {
    const infos = [...this.ranks.values()].map((rank) => rank.info);
    const total = (field) => infos.reduce((sum, info) => sum + info[field], 0);
    // A model whose layers all keep a state has slots in place of blocks.
    const [all, free] = total("num_blocks") ? ["num_blocks", "num_free_blocks"] : ["num_state_slots", "num_free_state_slots"];
    return {
      ...this.rates,
      num_blocks: total(all),
      used_blocks: total(all) - total(free),
      queries: total("prefix_cache_queries"),
      hits: total("prefix_cache_hits"),
    };
  }

  takeWaves(waves) {
    if (!waves) return;
    if (waves.reset) for (const rank of this.ranks.values()) rank.spans = new Ring(SPAN_COLUMNS, SPANS);
    for (const rank of this.ranks.values()) rank.open = [];
    for (const span of waves.open ?? []) this.ranks.get(span.rank)?.open.push(spanOf(span));
    for (const span of waves.spans) this.ranks.get(span.rank)?.takeSpan(spanOf(span));
  }

  // List all requests: the unfinished ones as they came, then the latest that have ended.
  table(requestsOf = (rank) => rank.requests) {
    const rows = this.rankNumbers.flatMap((rank) => [...requestsOf(this.ranks.get(rank)).values()]);
    rows.sort((first, second) => first.rank - second.rank || first.number - second.number);
    const ended = rows.filter((request) => request.state === "finished");
    const unfinished = rows.filter((request) => request.state !== "finished");
    unfinished.sort((first, second) => first.added_at - second.added_at);
    ended.sort((first, second) => second.ended_at - first.ended_at);
    return [...unfinished, ...ended];
  }

  // List the requests at a time; null where they are not known.
  tableAt(time) {
    const past = new Map();
    for (const rank of this.ranks.values()) past.set(rank, rank.past.requestsAt(time, rank.requests));
    return [...past.values()].includes(null) ? null : this.table((rank) => past.get(rank));
  }

  get rankNumbers() {
    return [...this.ranks.keys()].sort((first, second) => first - second);
  }

  request(rank, number) {
    return this.requests.find((request) => request.rank === rank && request.number === number);
  }

  // Find the request that a block's word names: the unfinished one before one that has ended.
  holder(rank, number) {
    const named = this.requests.filter((request) => request.rank === rank && request.number % NUMBERS === number);
    return named.find((request) => request.state !== "finished") ?? named[0];
  }
}

// Read a saved frame, with its buffers.
export function fromSnapshot(snapshot) {
  const { buffers, ...frame } = snapshot;
  return [
    frame,
    buffers.map((text) => {
      const letters = atob(text);
      return Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    }),
  ];
}
