// This module paints the timeline: each step is a column, each request a row.

import { AXIS, clockTicks, stepTicks } from "./axis.js";
import { DECODE, PREEMPTED, PREFILL, RECOMPUTE } from "./history.js";
import { clamp } from "./view.js";

export const GUTTER = 56;
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
  constructor(context, view, rows, size, theme) {
    const { history } = view;
    Object.assign(this, { context, view, history, rows, theme });
    this.width = size.width;
    this.height = size.height;
    [this.first, this.end] = view.range;
    this.from = view.window[0];
    this.scale = view.scale;
    this.measure();
  }

  // Find the places of all steps in sight once: a long window has ten thousand of them.
  measure() {
    const count = Math.max(0, this.end - this.first);
    this.left = new Float64Array(count);
    this.right = new Float64Array(count);
    this.numBreaks = new Int32Array(count + 1); // before each step: how often nothing ran for longer than a pixel or two
    for (let index = 0; index < count; index += 1) {
      this.left[index] = this.place(this.view.placeOf(this.first + index));
      this.right[index] = this.place(this.view.endOf(this.first + index));
      const isBreak = index > 0 && this.left[index] - this.right[index - 1] > 2;
      this.numBreaks[index + 1] = this.numBreaks[index] + Number(isBreak);
    }
    this.isNarrow = count > 0 && (this.right[count - 1] - this.left[0]) / count < 3;
  }

  place(at) {
    return GUTTER + (at - this.from) * this.scale;
  }

  x(ordinal) {
    return this.left[ordinal - this.first] ?? this.place(this.view.placeOf(ordinal));
  }

  xEnd(ordinal) {
    return this.right[ordinal - this.first] ?? this.place(this.view.endOf(ordinal));
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
    context.fillStyle = theme.faint;
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
      context.fillRect(left, Math.round(middle), Math.max(1, this.xEnd(Math.min(end, this.end - 1)) - left), 1);
    }
    context.globalAlpha = 1;
  }

  segments(slots, kind) {
    const { context, history, rows } = this;
    const { roles } = this.theme;
    const { number, first, last } = history.segments;
    const tall = Math.max(2, rows.height - (rows.height > 6 ? 3 : 1));
    const height = kind === DECODE ? Math.max(2, Math.round(tall * 0.55)) : tall;
    const inset = Math.floor((rows.height - height) / 2);
    const painted = new Map();
    context.fillStyle = [roles.decode, roles.prefill, roles.recompute][kind];
    for (const slot of slots) {
      if (history.segments.kind[slot] !== kind) continue;
      const y = rows.y(rows.index.get(number[slot])) + inset;
      if (y + height < AXIS || y > this.height) continue;
      const begin = Math.max(first[slot], this.first);
      const end = Math.min(last[slot] + 1, this.end);
      for (let ordinal = begin; ordinal < end; ) {
        const next = this.runEnd(ordinal, end, kind);
        const left = this.isNarrow ? Math.round(this.x(ordinal)) : this.x(ordinal);
        const right = Math.max(left + 1, this.isNarrow ? Math.round(this.xEnd(next - 1)) : this.xEnd(next - 1));
        const isSplit = kind !== DECODE && right - left >= 4;
        if (!(painted.get(number[slot]) >= right)) {
          painted.set(number[slot], right);
          context.fillRect(left, y, right - left - (isSplit ? 1 : 0), height);
        }
        ordinal = next;
      }
      if (kind !== DECODE && rows.height >= 13) this.tokens(slot, begin, end, y, height);
    }
  }

  // Return the step after the last one that is painted together with this one.
  runEnd(ordinal, end, kind) {
    const { numBreaks, first } = this;
    if (!this.isNarrow && kind !== DECODE) return ordinal + 1;
    if (numBreaks[end - first] === numBreaks[ordinal - first + 1]) return end;
    let next = ordinal + 1;
    while (next < end && numBreaks[next - first + 1] === numBreaks[ordinal - first + 1]) next += 1;
    return next;
  }

  tokens(slot, begin, end, y, height) {
    const { context } = this;
    const color = context.fillStyle;
    context.fillStyle = this.theme.inkOn(color);
    context.font = `10px ${this.theme.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const text = String(this.history.segments.tokens[slot]);
    for (let ordinal = begin; ordinal < end; ordinal += 1) {
      const width = this.xEnd(ordinal) - this.x(ordinal);
      if (width >= 26) context.fillText(text, this.x(ordinal) + width / 2 - 0.5, y + height / 2 + 0.5, width - 3);
    }
    context.fillStyle = color;
  }

  // Draw a prefix hit: a yellow edge before the first part, wider the more was found.
  hits(slots) {
    const { context, history, rows } = this;
    const { number, first, hit } = history.segments;
    context.fillStyle = this.theme.roles.hit;
    const height = Math.max(2, rows.height - 1);
    const width = this.view.isTime ? 4 : clamp(this.scale * 0.6, 2, 6);
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
    context.strokeStyle = this.theme.roles.preempted;
    context.lineWidth = 2;
    context.beginPath();
    history.visitEvents(this.first, this.end, (ordinal, number, kind) => {
      if (kind !== PREEMPTED) return;
      const x = this.x(ordinal) + (this.view.isTime ? 0 : Math.min(this.scale / 2, half));
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

  shade(left, right) {
    const { context } = this;
    context.globalAlpha = 0.14;
    context.fillStyle = this.theme.text;
    context.fillRect(left, AXIS, right - left, this.height - AXIS);
    context.globalAlpha = 1;
  }

  // Draw a dashed line where steps were lost, and shade the time whose steps are not known.
  gaps() {
    const { context, history, view } = this;
    if (view.first < view.begin) this.shade(this.place(view.first), this.place(view.begin));
    context.strokeStyle = this.theme.text;
    context.setLineDash([2, 3]);
    for (let ordinal = this.first; ordinal < this.end; ordinal += 1) {
      if (!history.at("gap", ordinal)) continue;
      const x = Math.round(this.x(ordinal)) + 0.5;
      if (view.isTime && ordinal > history.begin) this.shade(this.xEnd(ordinal - 1), x);
      else if (view.isTime && view.first === view.begin) this.shade(GUTTER, x);
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
      context.fillStyle = theme.request(number);
      const inset = rows.height > 6 ? 2 : 0;
      context.fillRect(GUTTER - 9, top + inset, 4, Math.max(1, bottom - top - 2 * inset));
      if (row % every || y < AXIS || y + Math.max(rows.height, 11) > this.height) return;
      context.fillStyle = theme.text;
      context.fillText(`#${number}`, GUTTER - 14, y + Math.max(rows.height, every > 1 ? 8 : 0) / 2 + 0.5);
    });
  }

  ticks() {
    const { context, theme, view } = this;
    const size = { width: this.width, height: this.height };
    if (view.isTime) clockTicks(context, theme, size, view.window, (time) => this.place(time), GUTTER);
    else stepTicks(context, theme, size, this.history, view.range, (ordinal) => this.x(ordinal), this.scale, GUTTER);
  }
}
