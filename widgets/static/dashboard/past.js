// What was before: the last changes of an engine core's blocks and requests, from which an earlier state is made.

import { Ring } from "./ring.js";

const BLOCK_CHANGES = 1 << 18;
const REQUEST_CHANGES = 1 << 17;
const BLOCK_COLUMNS = { time: Float64Array, block: Uint32Array, before: Uint32Array };
const REQUEST_COLUMNS = {
  time: Float64Array,
  number: Int32Array,
  computed: Int32Array,
  output: Int32Array,
  text: Array, // the newest output
  isWhole: Uint8Array,
};

// A change has the time of the frame that has told it, so that a moment shows what the frame before it has told.
export class Past {
  constructor() {
    this.beginBlocks(null);
    this.requests = new Ring(REQUEST_COLUMNS, REQUEST_CHANGES);
    this.wholes = new Map(); // id of a change → the request before it, null if there was none
    this.requestsSince = null;
  }

  // From this time on the blocks are known.
  beginBlocks(time) {
    this.blocks = new Ring(BLOCK_COLUMNS, BLOCK_CHANGES);
    this.blocksSince = time;
  }

  noteBlock(time, block, before) {
    const { blocks } = this;
    const slot = blocks.slot(blocks.push());
    blocks.time[slot] = time;
    blocks.block[slot] = block;
    blocks.before[slot] = before;
  }

  // Note a request as it was before a change; undefined: it was not there.
  noteRequest(time, number, before, isWhole) {
    const { requests, wholes } = this;
    if (requests.end - requests.begin === REQUEST_CHANGES) wholes.delete(requests.begin);
    const id = requests.push();
    const slot = requests.slot(id);
    requests.time[slot] = time;
    requests.number[slot] = number;
    requests.isWhole[slot] = Number(isWhole);
    if (isWhole) wholes.set(id, before ?? null);
    else {
      requests.computed[slot] = before.num_computed_tokens;
      requests.output[slot] = before.num_output_tokens;
      requests.text[slot] = before.text;
    }
  }

  knowsBlocks(time) {
    return isKnown(this.blocks, this.blocksSince, time);
  }

  knowsRequests(time) {
    return isKnown(this.requests, this.requestsSince, time);
  }

  // Return the blocks at a time, made from those of now; null where they are not known.
  blocksAt(time, now) {
    const { blocks } = this;
    if (!this.knowsBlocks(time)) return null;
    const result = now.slice();
    for (let id = blocks.end - 1; id >= blocks.begin; id -= 1) {
      const slot = blocks.slot(id);
      if (blocks.time[slot] <= time) break;
      result[blocks.block[slot]] = blocks.before[slot];
    }
    return result;
  }

  // Return the requests at a time by number, made from those of now; null where they are not known.
  requestsAt(time, now) {
    const { requests, wholes } = this;
    if (!this.knowsRequests(time)) return null;
    const result = new Map(now);
    for (let id = requests.end - 1; id >= requests.begin; id -= 1) {
      const slot = requests.slot(id);
      if (requests.time[slot] <= time) break;
      const number = requests.number[slot];
      if (requests.isWhole[slot]) {
        const before = wholes.get(id);
        if (before) result.set(number, before);
        else result.delete(number);
        continue;
      }
      const known = result.get(number);
      const { computed, output, text } = requests;
      if (known) result.set(number, { ...known, num_computed_tokens: computed[slot], num_output_tokens: output[slot], text: text[slot] });
    }
    return result;
  }
}

// Changes that were dropped cannot be undone.
function isKnown(ring, since, time) {
  if (since === null || time < since) return false;
  return ring.begin === 0 || time >= ring.time[ring.slot(ring.begin)];
}
