// This module paints the timeline: each step is a column, each request a row.

import { integer, niceStep } from "./format.js";
import { DECODE, PREEMPTED, PREFILL, RECOMPUTE } from "./history.js";
import { REQUESTS, ROLES } from "./palette.js";
import { clamp } from "./view.js";

export const GUTTER = 56;
export const AXIS = 20;
const ROW_HEIGHTS = [4, 18];
const STAGE_HEIGHTS = [128, 300]; // heights of the timeline, unless the user has chosen that of the whole

// The requests that have a row in a window of steps, and the places of the rows.
export class Rows {
  constructor() {
    this.numbers = [];
    this.index = new Map();
    this.height = ROW_HEIGHTS[1];
    this.offset = 0; // pixels that are scrolled away above
    this.isAtEnd = true;
  }

  fill(history, from, to, space) {
    const seen = new Set();
    const { number } = history.segments;
    history.visitSegments(from, to, (slot) => seen.add(number[slot]));
    history.visitEvents(from, to, (ordinal, request) => seen.add(request));
    this.numbers = [...seen].sort((first, second) => first - second);
    this.index.clear();
    this.numbers.forEach((request, row) => this.index.set(request, row));
    this.height = clamp(Math.floor(space / Math.max(1, this.numbers.length)), ...ROW_HEIGHTS);
    this.space = space;
    this.scroll(this.isAtEnd ? Infinity : this.offset);
  }

  // Return the height of rows of the greatest height, within bounds.
  get wantedHeight() {
    return clamp(AXIS + this.numbers.length * ROW_HEIGHTS[1], ...STAGE_HEIGHTS);
  }

  get most() {
    return Math.max(0, this.numbers.length * this.height - this.space);
  }

  scroll(offset) {
    this.offset = clamp(offset, 0, this.most);
    this.isAtEnd = this.offset >= this.most;
  }

  y(row) {
    return AXIS + row * this.height - this.offset;
  }

  // Find the request at a height; undefined where there is none.
  at(y) {
    return y < AXIS ? undefined : this.numbers[Math.floor((y - AXIS + this.offset) / this.height)];
  }

  // Bring a request's row into sight.
  show(number) {
    const row = this.index.get(number);
    if (row === undefined) return;
    const top = row * this.height;
    if (top < this.offset) this.scroll(top);
    else if (top + this.height > this.offset + this.space) this.scroll(top + this.height - this.space);
  }
}

export class Painter {
  constructor(context, history, rows, from, scale, size, theme) {
    Object.assign(this, { context, history, rows, from, scale, theme });
    this.width = size.width;
    this.height = size.height;
    this.to = from + (size.width - GUTTER) / scale;
    this.first = Math.max(history.begin, Math.floor(from));
    this.end = Math.min(history.end, Math.ceil(this.to));
  }

  x(ordinal) {
    return GUTTER + (ordinal - this.from) * this.scale;
  }

  paint() {
    const { context } = this;
    this.stripes();
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width - GUTTER, this.height - AXIS);
    context.clip();
    const slots = [];
    this.history.visitSegments(this.first, this.end, (slot) => slots.push(slot));
    this.lives(slots);
    for (const kind of [DECODE, PREFILL, RECOMPUTE]) this.segments(slots, kind);
    this.hits(slots);
    this.preemptions();
    this.gaps();
    context.restore();
    this.labels();
    this.ticks();
  }

  stripes() {
    const { context, rows, theme } = this;
    context.fillStyle = theme.line;
    context.globalAlpha = 0.35;
    if (rows.height >= 9) {
      for (let row = 0; row < rows.numbers.length; row += 2) {
        const y = rows.y(row);
        if (y + rows.height > AXIS && y < this.height) {
          const top = Math.max(AXIS, y);
          context.fillRect(GUTTER, top, this.width - GUTTER, Math.min(y + rows.height, this.height) - top);
        }
      }
    }
    context.globalAlpha = 1;
  }

  // Draw a thin line from a request's first part in sight to its last one.
  lives(slots) {
    const { context, history, rows, theme } = this;
    const { number, first, last } = history.segments;
    const ends = new Map();
    for (const slot of slots) {
      const known = ends.get(number[slot]);
      if (!known) ends.set(number[slot], [first[slot], last[slot]]);
      else known[1] = Math.max(known[1], last[slot]);
    }
    context.fillStyle = theme.muted;
    context.globalAlpha = 0.55;
    for (const [request, [begin, end]] of ends) {
      const left = Math.max(GUTTER, this.x(begin));
      const middle = rows.y(rows.index.get(request)) + rows.height / 2;
      context.fillRect(left, Math.round(middle), this.x(end + 1) - left, 1);
    }
    context.globalAlpha = 1;
  }

  segments(slots, kind) {
    const { context, history, rows } = this;
    const { number, first, last } = history.segments;
    const tall = Math.max(2, rows.height - (rows.height > 6 ? 3 : 1));
    const height = kind === DECODE ? Math.max(2, Math.round(tall * 0.55)) : tall;
    const inset = Math.floor((rows.height - height) / 2);
    const isSplit = kind !== DECODE && this.scale >= 4;
    const painted = new Map();
    context.fillStyle = [ROLES.decode, ROLES.prefill, ROLES.recompute][kind];
    for (const slot of slots) {
      if (history.segments.kind[slot] !== kind) continue;
      const y = rows.y(rows.index.get(number[slot])) + inset;
      if (y + height < AXIS || y > this.height) continue;
      const begin = Math.max(first[slot], this.first);
      const end = Math.min(last[slot] + 1, this.end);
      if (isSplit) {
        for (let ordinal = begin; ordinal < end; ordinal += 1) {
          context.fillRect(this.x(ordinal), y, this.scale - 1, height);
        }
        if (this.scale >= 26 && rows.height >= 13) this.tokens(slot, begin, end, y, height);
        continue;
      }
      const left = Math.round(this.x(begin));
      const right = Math.max(left + 1, Math.round(this.x(end)));
      if (painted.get(number[slot]) >= right) continue;
      painted.set(number[slot], right);
      context.fillRect(left, y, right - left, height);
    }
  }

  tokens(slot, begin, end, y, height) {
    const { context } = this;
    const color = context.fillStyle;
    context.fillStyle = "#ffffff";
    context.font = `10px ${this.theme.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const text = String(this.history.segments.tokens[slot]);
    for (let ordinal = begin; ordinal < end; ordinal += 1) {
      context.fillText(text, this.x(ordinal + 0.5) - 0.5, y + height / 2 + 0.5, this.scale - 3);
    }
    context.fillStyle = color;
  }

  // Draw a prefix hit: a yellow edge before the first part, wider the more was found.
  hits(slots) {
    const { context, history, rows } = this;
    const { number, first, hit } = history.segments;
    context.fillStyle = ROLES.hit;
    const height = Math.max(2, rows.height - 1);
    const width = clamp(this.scale * 0.6, 2, 6);
    for (const slot of slots) {
      if (!(hit[slot] > 0) || first[slot] < this.first) continue;
      const y = rows.y(rows.index.get(number[slot]));
      if (y + height > AXIS && y < this.height) context.fillRect(this.x(first[slot]) - width / 2, y, width, height);
    }
  }

  // Draw a preemption: a red cross, or a red line where rows are low.
  preemptions() {
    const { context, history, rows } = this;
    const half = clamp(rows.height / 2 - 2, 1, 5);
    context.strokeStyle = ROLES.preempted;
    context.lineWidth = 2;
    context.beginPath();
    history.visitEvents(this.first, this.end, (ordinal, number, kind) => {
      if (kind !== PREEMPTED) return;
      const x = this.x(ordinal) + Math.min(this.scale / 2, half);
      const y = rows.y(rows.index.get(number)) + rows.height / 2;
      if (half < 3) {
        context.moveTo(x, y - rows.height / 2);
        context.lineTo(x, y + rows.height / 2);
        return;
      }
      context.moveTo(x - half, y - half);
      context.lineTo(x + half, y + half);
      context.moveTo(x - half, y + half);
      context.lineTo(x + half, y - half);
    });
    context.stroke();
    context.lineWidth = 1;
  }

  // Draw a dashed line where steps were lost.
  gaps() {
    const { context, history } = this;
    context.strokeStyle = this.theme.text;
    context.setLineDash([2, 3]);
    for (let ordinal = this.first; ordinal < this.end; ordinal += 1) {
      if (!history.at("gap", ordinal)) continue;
      const x = Math.round(this.x(ordinal)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS);
      context.lineTo(x, this.height);
      context.stroke();
    }
    context.setLineDash([]);
  }

  labels() {
    const { context, rows, theme } = this;
    context.font = `11px ${theme.font}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.ceil(12 / rows.height);
    rows.numbers.forEach((number, row) => {
      const y = rows.y(row);
      const top = Math.max(AXIS, y);
      const bottom = Math.min(y + rows.height, this.height);
      if (bottom - top < 1) return;
      context.fillStyle = REQUESTS[number % REQUESTS.length];
      const inset = rows.height > 6 ? 2 : 0;
      context.fillRect(GUTTER - 9, top + inset, 4, Math.max(1, bottom - top - 2 * inset));
      if (row % every || y < AXIS || y + Math.max(rows.height, 11) > this.height) return;
      context.fillStyle = theme.text;
      context.fillText(`#${number}`, GUTTER - 14, y + Math.max(rows.height, every > 1 ? 8 : 0) / 2 + 0.5);
    });
  }

  ticks() {
    const { context, history, theme } = this;
    context.font = `11px ${theme.font}`;
    context.textBaseline = "middle";
    context.textAlign = "left";
    const every = Math.max(1, niceStep(84 / this.scale));
    let free = GUTTER;
    for (let ordinal = this.first; ordinal < this.end; ordinal += 1) {
      const step = history.at("step", ordinal);
      const x = Math.round(this.x(ordinal));
      if (step % every || x < free) continue;
      const text = integer(step);
      const end = x + 6 + context.measureText(text).width;
      context.fillStyle = theme.line;
      context.fillRect(x, 4, 1, this.height - 4);
      if (end > this.width) continue;
      context.fillStyle = theme.muted;
      context.fillText(text, x + 4, AXIS / 2);
      free = end + 8;
    }
  }
}
