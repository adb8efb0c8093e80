// The KV block map shows which request holds which block of an engine core's cache.

import { BlockColors, Layout, countBlocks, paintCell } from "./block_cells.js";
import { button, element, legend, panel, setAttribute, setText } from "./dom.js";
import { count, integer, nameOf } from "./format.js";
import { REFERENCES, holderNumber, isCached, references } from "./words.js";
import { Occupancy } from "./occupancy.js";
import { Surface } from "./surface.js";
import { clamp } from "./view.js";

const ASK_MS = 90;
const LEAST_SHOWN = 64;

export class BlockMap {
  constructor(app) {
    this.app = app;
    this.layout = null;
    this.painted = null; // the rank that is painted
    this.at = null; // the block under the pointer or the keyboard's cursor
    this.place = [0, 0]; // where it is told of, in the window
    this.pointer = null; // the pointer's place in the window; null while it is elsewhere or the keyboard has moved the cursor
    this.isWhole = false; // every block is shown, not only the part of the cache that is in use
    this.blocks = new Uint32Array(0); // those that are shown: of now, or of an earlier moment
    this.shownTime = null; // that moment
    this.stopTimer = null; // while it is going to ask the kernel
    this.surface = new Surface(
      app.page,
      {
        tabindex: "0",
        role: "application",
        "aria-roledescription": "block map",
        "aria-label": "KV block map. Arrow keys move from block to block.",
      },
      () => app.loop.invalidate(this),
    );
    this.surface.stage.classList.add("nbe-map");
    this.mark = element("div", { class: "nbe-cell-mark" });
    this.mark.hidden = true;
    this.surface.stage.append(this.mark);
    this.counts = element("span", { class: "nbe-now" });
    this.live = element("span", { class: "nbe-live" }, "live");
    this.live.hidden = true;
    const { node, body } = panel("blocks", "KV blocks", this.live, this.counts);
    this.occupancy = new Occupancy(app);
    this.wholeButton = button("Show every block", "Every block", () => this.toggle());
    this.scale = element("span", { class: "nbe-muted" });
    const marks = legend(["held", "held, by request"], ["shared", "shared"], ["cached", "cached, free"], ["free", "free"]);
    marks.append(this.scale, this.wholeButton);
    body.append(...this.occupancy.nodes, marks, this.surface.stage);
    this.node = node;
    this.listen();
  }

  toggle() {
    this.isWhole = !this.isWhole;
    this.painted = null;
    this.app.loop.invalidate(this);
  }

  drawCross() {
    this.occupancy.drawCross();
  }

  listen() {
    const { canvas } = this.surface;
    canvas.addEventListener("pointermove", (event) => {
      this.pointer = [event.clientX, event.clientY];
      this.point();
    });
    canvas.addEventListener("pointerleave", () => this.leave());
    this.app.page.attach(() => () => this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  leave() {
    this.pointer = null;
    this.goTo(null);
  }

  // Go to the block under the pointer.
  point() {
    const [clientX, clientY] = this.pointer;
    const cell = this.layout?.cellAt(...this.surface.place({ clientX, clientY })) ?? null;
    this.goTo(cell === null ? null : this.firstHeld(cell), this.pointer);
  }

  // Go to a block by the keyboard.
  step(block) {
    this.pointer = null;
    const { layout } = this;
    const [x, y] = layout.corner(Math.floor(block / layout.perCell));
    this.goTo(block, this.surface.inWindow(x + layout.size / 2, y + layout.size / 2));
  }

  // The cells have moved: the pointer is on another block, and the keyboard's is at another place, or is not shown.
  follow() {
    if (this.pointer) this.point();
    else if (this.at !== null && this.at < this.layout.numBlocks) this.step(this.at);
    else this.goTo(null);
  }

  // Find the block that represents a cell: the first one in use.
  firstHeld(cell) {
    const [from, to] = this.layout.blocksOf(cell);
    const { blocks } = this;
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
    if (event.key === "Escape") this.leave();
    else if (Object.hasOwn(steps, event.key)) {
      const next = cell < 0 ? 0 : clamp(cell + steps[event.key], 0, layout.numCells - 1);
      this.step(this.firstHeld(next));
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
    if (this.at === null || this.stopTimer || this.shownTime !== null || this.isAsked()) return;
    this.stopTimer = this.app.page.after(ASK_MS, () => {
      this.stopTimer = null;
      const { link, view } = this.app;
      if (this.shownTime === null && !this.isAsked()) link.askBlock(view.rank, this.at, view.current.blocks[this.at]);
    });
  }

  isAsked() {
    const { link, view } = this.app;
    return link.isAsked(view.rank, this.at, view.current.blocks[this.at]);
  }

  stopAsking() {
    this.stopTimer?.();
    this.stopTimer = null;
  }

  lines() {
    const { view, link } = this.app;
    const { blocks } = this;
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
    const answer = this.shownTime === null ? link.linesOf(view.rank, this.at, word) : null;
    // The kernel's answer begins with what is known here, and names the holders.
    if (answer) return [...lines.slice(0, -1), ...answer];
    const holder = this.holderText(word);
    return holder ? [...lines, holder] : lines;
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
    return `${references(word) ? "held by" : "last taken by"} ${request ? nameOf(request) : `#${number}`}`;
  }

  // The painted map is out of date: it has other colours, or is of another rank.
  repaint() {
    this.painted = null;
    this.colors = null;
  }

  draw() {
    const rank = this.app.view.current;
    const hasChanged = this.surface.fit();
    if (!rank) return;
    this.occupancy.draw(this.take(rank));
    if (!this.surface.width) return;
    this.ask();
    this.colors ??= new BlockColors(this.app.theme);
    const { blocks } = this;
    const shown = this.isWhole ? blocks.length : inUse(blocks);
    const isNew = hasChanged || this.painted !== rank || this.layout?.numBlocks !== shown;
    // While the pointer is on the table below, it would move away from the pointer.
    if (!this.app.requests.isHeld) this.surface.need(Layout.wantedHeight(shown, this.surface.width));
    if (isNew || rank.areAllBlocksChanged || this.isMoved) {
      if (isNew) this.layout = new Layout(shown, this.surface.width, this.surface.height);
      this.surface.clear();
      for (let cell = 0; cell < this.layout.numCells; cell += 1) this.paint(cell, blocks);
    } else {
      const changed = rank.changedBlocks.filter((block) => block < shown);
      const cells = new Set(changed.map((block) => Math.floor(block / this.layout.perCell)));
      for (const cell of cells) this.paint(cell, blocks);
    }
    if (this.shownTime === null) {
      rank.areAllBlocksChanged = false;
      rank.changedBlocks = [];
    }
    this.painted = rank;
    this.drawCounts(rank, shown);
    if (isNew) this.follow();
    else this.tell();
  }

  // Take the blocks of the moment that is shown, or those of now, which is said, where the moment is not known.
  take(rank) {
    const { time } = this.app.view;
    const past = time === null ? null : rank.past.blocksAt(time, rank.blocks);
    this.isMoved = this.shownTime !== (past ? time : null);
    this.shownTime = past ? time : null;
    this.blocks = past ?? rank.blocks;
    this.live.hidden = time === null || past !== null;
    return this.blocks;
  }

  paint(cell, blocks) {
    paintCell(this.surface.context, this.layout, cell, blocks, this.colors, this.app.theme.font);
  }

  drawCounts(rank, shown) {
    const { blocks } = this;
    const { held, shared, cached, free } = countBlocks(blocks);
    const parts = [`${integer(held)} held`, `${integer(shared)} shared`, `${integer(cached)} cached`, `${integer(free)} free`];
    setText(this.counts, [...(blocks.length ? parts : ["no blocks"]), ...this.states(rank.info)].join(" · "));
    const { perCell } = this.layout;
    const part = shown < blocks.length ? [`blocks 0 to ${integer(shown - 1)} of ${integer(blocks.length)}`] : [];
    setText(this.scale, [...part, ...(perCell > 1 ? [`a cell: ${integer(perCell)} blocks`] : [])].join(" · "));
    this.wholeButton.hidden = inUse(blocks) === blocks.length;
    setText(this.wholeButton, this.isWhole ? "In use" : "Every block");
    const label = this.isWhole ? "Show the part of the cache that is in use" : "Show every block";
    setAttribute(this.wholeButton, "aria-label", label);
    setAttribute(this.wholeButton, "title", label);
  }

  // Tell the slots for the states of recurrent layers, of which nothing is known but now.
  states({ num_state_slots: slots, num_free_state_slots: free, num_checkpoints: kept }) {
    if (!slots || this.shownTime !== null) return [];
    return [`${integer(slots - free)} of ${count(slots, "state slot")} held`, count(kept, "checkpoint")];
  }
}

// Return how many blocks, from the first on, have all that are held or cached, in steps in which the map does not change
// its scale all the time; all blocks where that is most of them.
function inUse(blocks) {
  let last = blocks.length - 1;
  while (last >= 0 && !references(blocks[last]) && !isCached(blocks[last])) last -= 1;
  let shown = LEAST_SHOWN;
  while (shown < last + 1) shown *= 2;
  return shown * 1.5 >= blocks.length ? blocks.length : shown;
}
