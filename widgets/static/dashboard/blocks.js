// The KV block map shows which request holds which block of an engine core's cache.

import { BlockColors, Layout, countBlocks, paintCell } from "./block_cells.js";
import { element, legend, panel, setText } from "./dom.js";
import { count, integer } from "./format.js";
import { REFERENCES, holderNumber, isCached, references } from "./store.js";
import { Surface } from "./surface.js";
import { clamp } from "./view.js";

const ASK_MS = 90;

export class BlockMap {
  constructor(app) {
    this.app = app;
    this.layout = null;
    this.painted = null; // the rank that is painted
    this.at = null; // the block under the pointer or the keyboard's cursor
    this.place = [0, 0];
    this.askTimer = 0;
    this.surface = new Surface(
      {
        tabindex: "0",
        role: "application",
        "aria-roledescription": "block map",
        "aria-label": "KV block map. Arrow keys move from block to block.",
      },
      () => app.loop.invalidate(this),
    );
    this.mark = element("div", { class: "nbe-cell-mark" });
    this.mark.hidden = true;
    this.surface.stage.append(this.mark);
    this.counts = element("span", { class: "nbe-now" });
    const { node, body } = panel("blocks", "KV blocks", this.counts);
    this.scale = element("span", { class: "nbe-muted" });
    const marks = legend(["held", "held, by request"], ["shared", "shared"], ["cached", "cached, free"], ["free", "free"]);
    marks.append(this.scale);
    body.append(marks, this.surface.stage);
    this.node = node;
    this.listen();
  }

  listen() {
    const { canvas } = this.surface;
    canvas.addEventListener("pointermove", (event) => {
      const cell = this.layout?.cellAt(...this.surface.place(event)) ?? null;
      this.goTo(cell === null ? null : this.firstHeld(cell), [event.clientX, event.clientY]);
    });
    canvas.addEventListener("pointerleave", () => this.goTo(null));
    canvas.addEventListener("blur", () => this.goTo(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // Find the block that represents a cell: the first one in use.
  firstHeld(cell) {
    const [from, to] = this.layout.blocksOf(cell);
    const { blocks } = this.app.view.current;
    for (let block = from; block < to; block += 1) if (references(blocks[block])) return block;
    return from;
  }

  key(event) {
    const { layout } = this;
    if (!layout?.numCells || event.altKey || event.ctrlKey || event.metaKey) return;
    const cell = this.at === null ? -1 : Math.floor(this.at / layout.perCell);
    const far = layout.columns * Math.max(1, Math.floor(layout.rows / 4));
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -layout.columns,
      ArrowDown: layout.columns,
      PageUp: -far,
      PageDown: far,
      Home: -Infinity,
      End: Infinity,
    };
    if (event.key === "Escape") this.goTo(null);
    else if (Object.hasOwn(steps, event.key)) {
      const next = cell < 0 ? 0 : clamp(cell + steps[event.key], 0, layout.numCells - 1);
      const [x, y] = layout.corner(next);
      this.goTo(this.firstHeld(next), this.surface.inWindow(x + layout.size / 2, y + layout.size / 2));
      this.app.announcer.say(this.lines().join(", "));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Show a block's description beside a place in the window.
  goTo(block, place = this.place) {
    this.at = block;
    this.place = place;
    this.stopAsking();
    this.mark.hidden = block === null;
    if (block === null) {
      this.app.tooltip.hide(this);
      return;
    }
    const { layout } = this;
    const [x, y] = layout.corner(Math.floor(block / layout.perCell));
    Object.assign(this.mark.style, {
      left: `${x - 1}px`,
      top: `${y - 1}px`,
      width: `${layout.size + 1}px`,
      height: `${layout.size + 1}px`,
    });
    this.tell();
    this.ask();
  }

  // The kernel has answered, or the block is another one's now.
  tell() {
    if (this.at !== null) this.app.tooltip.show(this, ...this.place, this.lines());
  }

  // Ask the kernel for the block's contents, unless it was asked since the block last changed.
  ask() {
    if (this.at === null || this.askTimer || this.isAsked()) return;
    this.askTimer = setTimeout(() => {
      this.askTimer = 0;
      const { link, view } = this.app;
      if (!this.isAsked()) link.askBlock(view.rank, this.at, view.current.blocks[this.at]);
    }, ASK_MS);
  }

  isAsked() {
    const { link, view } = this.app;
    return link.isAsked(view.rank, this.at, view.current.blocks[this.at]);
  }

  stopAsking() {
    clearTimeout(this.askTimer);
    this.askTimer = 0;
  }

  lines() {
    const { view, link } = this.app;
    const { blocks } = view.current;
    const word = blocks[this.at];
    const lines = [];
    const cell = Math.floor(this.at / this.layout.perCell);
    if (this.layout.perCell > 1) {
      const [from, to] = this.layout.blocksOf(cell);
      const { held, shared, cached, free } = countBlocks(blocks, from, to);
      lines.push(`blocks ${integer(from)} to ${integer(to - 1)}`);
      lines.push(`${integer(held)} held (${integer(shared)} shared), ${integer(cached)} cached, ${integer(free)} free`);
    }
    lines.push(`block ${integer(this.at)}: ${this.describe(word)}`);
    const answer = link.linesOf(view.rank, this.at, word);
    const holder = this.holderText(word);
    if (holder) lines.push(holder);
    return answer ? [...lines, ...answer] : lines;
  }

  describe(word) {
    const number = references(word);
    const times = number === REFERENCES ? `${integer(number)} or more references` : count(number, "reference");
    if (number) return isCached(word) ? `${times}, cached` : times;
    return isCached(word) ? "free, cached" : "free";
  }

  holderText(word) {
    const number = holderNumber(word);
    if (number === null) return null;
    const request = this.app.store.holder(this.app.view.rank, number);
    const name = request ? `#${request.number} ${request.id}` : `#${number}`;
    return `${references(word) ? "held by" : "last taken by"} ${name}`;
  }

  // The painted map is out of date: it has other colours, or is of another rank.
  repaint() {
    this.painted = null;
    this.colors = null;
  }

  draw() {
    const rank = this.app.view.current;
    const hasChanged = this.surface.fit();
    if (!rank || !this.surface.width) return;
    const { blocks } = rank;
    this.ask();
    this.colors ??= new BlockColors(this.app.theme);
    const isNew = hasChanged || this.painted !== rank || this.layout?.numBlocks !== blocks.length;
    if (isNew || rank.areAllBlocksChanged) {
      if (isNew) this.surface.need(Layout.wantedHeight(blocks.length, this.surface.width));
      if (isNew) this.layout = new Layout(blocks.length, this.surface.width, this.surface.height);
      this.surface.clear();
      for (let cell = 0; cell < this.layout.numCells; cell += 1) this.paint(cell, blocks);
    } else {
      const cells = new Set(rank.changedBlocks.map((block) => Math.floor(block / this.layout.perCell)));
      if (!cells.size) return;
      for (const cell of cells) this.paint(cell, blocks);
    }
    rank.areAllBlocksChanged = false;
    rank.changedBlocks = [];
    this.painted = rank;
    if (this.at !== null && this.at >= blocks.length) this.goTo(null);
    this.tell();
    this.drawCounts(rank);
  }

  paint(cell, blocks) {
    paintCell(this.surface.context, this.layout, cell, blocks, this.colors, this.app.theme.font);
  }

  drawCounts(rank) {
    const { held, shared, cached, free } = countBlocks(rank.blocks);
    const parts = [`${integer(held)} held`, `${integer(shared)} shared`, `${integer(cached)} cached`, `${integer(free)} free`];
    setText(this.counts, rank.blocks.length ? parts.join(" · ") : "no blocks");
    const { perCell } = this.layout;
    setText(this.scale, perCell > 1 ? `a cell: ${integer(perCell)} blocks` : "");
  }

  destroy() {
    this.stopAsking();
    this.surface.destroy();
  }
}
