// Who holds how much of an engine core's cache: a bar of the moment, and its course over time.

import { setAttribute } from "./dom.js";
import { clock, count, integer, nameOf, share } from "./format.js";
import { CACHED_OPACITY } from "./palette.js";
import { KeyCursor, Pointer } from "./pointer.js";
import { countHolders } from "./samples.js";
import { Surface } from "./surface.js";

const BAR_KEYS = "Arrow keys move from part to part.";
const COURSE_LEFT = 40;
const COURSE_TOP = 4;

export class Occupancy {
  constructor(app) {
    this.app = app;
    const resized = () => app.loop.invalidate(app.blocks);
    const attributes = { tabindex: "0", role: "application", "aria-roledescription": "bar", "aria-label": `KV cache. ${BAR_KEYS}` };
    this.bar = new Surface(app.page, attributes, resized);
    this.course = new Surface(app.page, { role: "img", "aria-label": "KV cache in use over time" }, resized);
    this.bar.stage.classList.add("nbe-occupancy");
    this.course.stage.classList.add("nbe-course");
    this.pieces = []; // [from, to, lines] in pixels, of the bar
    this.barPointer = new Pointer(app, this.bar, (x) => this.pieceAt(x));
    this.barCursor = new KeyCursor(this.barPointer, () => this.places(), { mark: (x) => this.bar.cross(x) });
    this.pointer = new Pointer(app, this.course, (x) => this.pointed(x));
    this.nodes = [this.bar.stage, this.course.stage];
  }

  holderColor(number) {
    const { theme } = this.app;
    return number === null ? theme.roles.cached : theme.request(number);
  }

  draw(blocks) {
    this.drawBar(blocks);
    this.drawCourse(blocks.length);
  }

  drawBar(blocks) {
    this.bar.fit();
    const context = this.bar.clear();
    const { width, height } = this.bar;
    const { theme, view, store } = this.app;
    if (!width || !blocks.length) return;
    const { held, cached, numHolders, parts } = countHolders(blocks);
    const pixels = width / blocks.length;
    context.fillStyle = theme.faint;
    context.fillRect(0, 0, width, height);
    this.pieces = [];
    let x = 0;
    const piece = (blocksOf, fill, opacity, lines) => {
      if (!blocksOf) return;
      const end = x + blocksOf * pixels;
      context.globalAlpha = opacity;
      context.fillStyle = fill;
      context.fillRect(x, 0, Math.max(end - x, 0.5), height);
      if (end - x > 3) {
        context.globalAlpha = 1;
        context.fillStyle = theme.groundColor;
        context.fillRect(end - 1, 0, 1, height);
      }
      this.pieces.push([x, end, lines]);
      x = end;
    };
    const amount = (number) => `${count(number, "block")}, ${share(number, blocks.length)}`;
    for (const [number, blocksOf] of parts) {
      const request = number === null ? null : store.holder(view.rank, number);
      const name = request ? nameOf(request) : number === null ? "nobody known" : `#${number}`;
      piece(blocksOf, this.holderColor(number), 1, [name, `taken by it last: ${amount(blocksOf)}`]);
    }
    const others = held - parts.reduce((sum, [, blocksOf]) => sum + blocksOf, 0);
    piece(others, theme.muted, 1, [count(numHolders - parts.length, "other request"), amount(others)]);
    piece(cached, theme.roles.cached, theme.hasMoreContrast ? 1 : CACHED_OPACITY * 0.6, ["cached, free", amount(cached)]);
    const free = blocks.length - held - cached;
    this.pieces.push([x, width, ["free", amount(free)]]);
    const label = `KV cache: ${share(held, blocks.length)} held, ${share(cached, blocks.length)} cached and free. ${BAR_KEYS}`;
    setAttribute(this.bar.canvas, "aria-label", label);
    context.globalAlpha = 1;
    this.barPointer.tell();
    this.barCursor.tell();
  }

  // Return the middle of each piece that can be seen.
  places() {
    return this.pieces.filter(([from, to]) => to > from).map(([from, to]) => (from + to) / 2);
  }

  pieceAt(x) {
    const found = this.pieces.find(([from, to]) => x >= from && x < to);
    return { time: null, lines: found ? found[2] : null };
  }

  get columns() {
    return Math.max(1, this.course.width - COURSE_LEFT - 2);
  }

  x(place) {
    const [from, to] = this.app.view.window;
    return COURSE_LEFT + ((place - from) / (to - from)) * this.columns;
  }

  // Draw who held what, second by second as far as it was seen, and the line of all that was held, step by step.
  drawCourse(numBlocks) {
    this.course.fit();
    const context = this.course.clear();
    const { view, theme } = this.app;
    const { width, height } = this.course;
    if (!view.history || width < COURSE_LEFT + 20 || !numBlocks) return;
    const bottom = height - 2;
    const most = this.mostHeld(numBlocks);
    const y = (blocks) => bottom - (blocks / most) * (bottom - COURSE_TOP);
    context.fillStyle = theme.faint;
    context.fillRect(COURSE_LEFT, bottom, width - COURSE_LEFT, 1);
    context.fillRect(COURSE_LEFT, COURSE_TOP, width - COURSE_LEFT, 1);
    context.font = `11px ${theme.font}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = theme.muted;
    context.fillText(share(most, numBlocks), COURSE_LEFT - 6, COURSE_TOP + 4);
    context.fillText("0", COURSE_LEFT - 6, bottom - 4);
    this.drawUses(context, y);
    this.drawHeld(context, y, numBlocks);
    this.drawCross();
    this.pointer.tell();
  }

  // Return the blocks at the top of the chart: the least of some shares of the cache that has room for all.
  mostHeld(numBlocks) {
    const { history, range } = this.app.view;
    let most = 1;
    for (let ordinal = range[0]; ordinal < range[1]; ordinal += 1) most = Math.max(most, numBlocks - history.at("free", ordinal));
    const shares = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
    return numBlocks * (shares.find((part) => part * numBlocks >= most) ?? 1);
  }

  // A time in which nothing was seen is shaded.
  drawUses(context, y) {
    const { view, theme } = this.app;
    const [from, to] = view.window;
    const column = (time) => Math.max(COURSE_LEFT, this.x(view.placeAt(time) ?? from));
    view.current.uses.visit(view.timeAt(from), view.timeAt(to), (use, since, until) => {
      const [left, right] = [Math.floor(column(since)), Math.ceil(column(until))];
      if (!use) {
        this.shade(context, left, right);
        return;
      }
      const { held, parts } = use;
      let below = 0;
      const stack = (blocks, fill) => {
        context.fillStyle = fill;
        context.fillRect(left, y(below + blocks), right - left, y(below) - y(below + blocks));
        below += blocks;
      };
      for (const [number, blocks] of parts) stack(blocks, this.holderColor(number));
      if (held > below) stack(held - below, theme.muted);
    });
  }

  shade(context, left, right) {
    context.fillStyle = this.app.theme.text;
    context.globalAlpha = 0.14;
    context.fillRect(left, COURSE_TOP, right - left, this.course.height - 2 - COURSE_TOP);
    context.globalAlpha = 1;
  }

  drawHeld(context, y, numBlocks) {
    const { view, theme } = this.app;
    const { history, range } = view;
    context.fillStyle = theme.text;
    context.globalAlpha = 0.7;
    let drawn = COURSE_LEFT;
    for (let ordinal = range[0]; ordinal < range[1]; ordinal += 1) {
      const right = this.x(view.endOf(ordinal));
      if (right < drawn) continue;
      const left = Math.max(drawn, this.x(view.placeOf(ordinal)));
      context.fillRect(left, Math.round(y(numBlocks - history.at("free", ordinal))) - 1, Math.max(1, right - left), 1);
      drawn = Math.floor(right);
    }
    context.globalAlpha = 1;
  }

  pointed(x) {
    const { view } = this.app;
    if (!view.history || x < COURSE_LEFT) return { time: null, lines: null };
    const [from, to] = view.window;
    const place = from + ((x - COURSE_LEFT) / this.columns) * (to - from);
    const ordinal = view.ordinalAt(place);
    const time = place >= view.first && place <= view.end ? view.timeAt(place) : null;
    if (ordinal === null) return { time, lines: null };
    const { num_blocks: blocks } = view.current.info;
    const held = blocks - view.history.at("free", ordinal);
    return { time, lines: [clock(view.history.at("time", ordinal)), `${integer(held)} of ${count(blocks, "block")} held`] };
  }

  drawCross() {
    const { view, cross } = this.app;
    const place = cross === null || !view.history ? null : view.placeAt(cross);
    this.course.cross(place === null ? null : this.x(place), COURSE_LEFT);
  }
}
