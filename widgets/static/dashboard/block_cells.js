// The places and looks of the block map's cells: a cell has one block, or several with mixed colours.

import { CACHED_OPACITY, FREE_OPACITY, REQUESTS } from "./palette.js";
import { holderNumber, isCached, references } from "./words.js";
import { css, isLight } from "./theme.js";
import { clamp } from "./view.js";

const LARGEST = 26;
const MAP_HEIGHTS = [78, 224]; // heights of the map, unless the user has chosen that of the whole
const SMALLEST = 4; // the least size of a cell with one block
const BIN = 9;
const COUNTED = 12; // cells from this size on have the number of references written into them

export class Layout {
  constructor(numBlocks, width, height) {
    this.numBlocks = numBlocks;
    this.perCell = 1;
    this.size = LARGEST;
    this.place(width);
    while (this.size > SMALLEST && this.rows * this.size > height) {
      this.size -= 1;
      this.place(width);
    }
    if (this.rows * this.size <= height) return;
    this.size = BIN;
    const room = Math.max(1, Math.floor(width / BIN)) * Math.max(1, Math.floor(height / BIN));
    this.perCell = Math.ceil(numBlocks / room);
    this.place(width);
  }

  place(width) {
    this.numCells = Math.ceil(this.numBlocks / this.perCell);
    this.columns = clamp(Math.floor(width / this.size), 1, Math.max(1, this.numCells));
    this.rows = Math.ceil(this.numCells / this.columns);
  }

  // Return the height of cells of the largest size, within bounds.
  static wantedHeight(numBlocks, width) {
    const rows = Math.ceil(numBlocks / Math.max(1, Math.floor(width / LARGEST)));
    return clamp(rows * LARGEST, ...MAP_HEIGHTS);
  }

  // Return the upper left corner of a cell.
  corner(cell) {
    return [(cell % this.columns) * this.size, Math.floor(cell / this.columns) * this.size];
  }

  cellAt(x, y) {
    const column = Math.floor(x / this.size);
    const cell = Math.floor(y / this.size) * this.columns + column;
    return column >= 0 && column < this.columns && y >= 0 && cell < this.numCells ? cell : null;
  }

  // Return the [first, after the last] block of a cell.
  blocksOf(cell) {
    return [cell * this.perCell, Math.min(this.numBlocks, (cell + 1) * this.perCell)];
  }
}

// The colours of blocks on the page's ground, as numbers: those of requests, then cached and free ones.
export class BlockColors {
  constructor(theme) {
    this.free = REQUESTS.length + 1;
    this.cached = REQUESTS.length;
    this.solid = theme.requests.map((color) => theme.over(color, 1));
    this.solid.push(theme.over(theme.roles.cached, theme.hasMoreContrast ? 1 : CACHED_OPACITY), theme.over(theme.roles.free, FREE_OPACITY));
    this.names = this.solid.map(css);
    this.outline = theme.hasMoreContrast ? theme.muted : null; // of free blocks
    this.marks = this.solid.map((color) => (isLight(color) ? "#000000" : "#ffffff"));
  }

  of(word) {
    if (references(word) === 0) return isCached(word) ? this.cached : this.free;
    return (holderNumber(word) ?? 0) % REQUESTS.length;
  }
}

export function countBlocks(blocks, from = 0, to = blocks.length) {
  const counts = { held: 0, shared: 0, cached: 0, free: 0 };
  for (let block = from; block < to; block += 1) {
    const word = blocks[block];
    const number = references(word);
    if (number > 1) counts.shared += 1;
    if (number > 0) counts.held += 1;
    else if (isCached(word)) counts.cached += 1;
    else counts.free += 1;
  }
  return counts;
}

export function paintCell(context, layout, cell, blocks, colors, font) {
  const [x, y] = layout.corner(cell);
  const inner = layout.size - 1;
  context.clearRect(x, y, layout.size, layout.size);
  if (layout.perCell > 1) paintBin(context, layout, cell, blocks, colors, x, y, inner);
  else paintBlock(context, blocks[cell], colors, x, y, inner, font);
}

function paintBlock(context, word, colors, x, y, inner, font) {
  const color = colors.of(word);
  context.fillStyle = colors.names[color];
  context.fillRect(x, y, inner, inner);
  if (color === colors.free && colors.outline) {
    context.strokeStyle = colors.outline;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
  }
  const number = references(word);
  if (number < 2) return;
  context.fillStyle = colors.marks[color];
  if (inner + 1 < COUNTED) {
    const size = Math.max(1, Math.round(inner / 3));
    const inset = Math.floor((inner - size) / 2);
    context.fillRect(x + inset, y + inset, size, size);
    return;
  }
  context.font = `bold ${Math.min(11, inner - 2)}px ${font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(number > 99 ? "99+" : String(number), x + inner / 2, y + inner / 2 + 0.5, inner - 1);
}

const counts = new Uint32Array(REQUESTS.length + 2);

// Paint, column by column, each colour by its share of the bin's blocks, and below it the share of shared blocks.
function paintBin(context, layout, cell, blocks, colors, x, y, inner) {
  const [from, to] = layout.blocksOf(cell);
  counts.fill(0);
  let shared = 0;
  for (let block = from; block < to; block += 1) {
    counts[colors.of(blocks[block])] += 1;
    if (references(blocks[block]) > 1) shared += 1;
  }
  const area = inner * inner;
  let seen = 0;
  let at = 0;
  for (let color = 0; color < counts.length; color += 1) {
    if (!counts[color]) continue;
    seen += counts[color];
    const end = Math.max(at + 1, Math.round((area * seen) / (to - from)));
    context.fillStyle = colors.names[color];
    fillPart(context, x, y, inner, at, Math.min(end, area));
    at = Math.min(end, area);
  }
  if (!shared) return;
  context.fillStyle = colors.marks[colors.free];
  context.fillRect(x, y + inner - 2, Math.max(1, Math.round((inner * shared) / (to - from))), 2);
}

// Fill the pixels [at, end) of a square, counted down its columns.
function fillPart(context, x, y, inner, at, end) {
  while (at < end) {
    const column = Math.floor(at / inner);
    const row = at % inner;
    const whole = row ? 0 : Math.floor((end - at) / inner);
    if (whole) context.fillRect(x + column, y, whole, inner);
    else context.fillRect(x + column, y + row, 1, Math.min(inner - row, end - at));
    at += whole ? whole * inner : Math.min(inner - row, end - at);
  }
}
