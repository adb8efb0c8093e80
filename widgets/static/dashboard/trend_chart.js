// A chart of figures over the time that an engine's host has kept.

import { AXIS, clockTicks } from "./axis.js";
import { element, legend } from "./dom.js";
import { clock, duration } from "./format.js";
import { KeyCursor, Pointer } from "./pointer.js";
import { Surface } from "./surface.js";
import { clamp } from "./view.js";

const TREND_LEFT = 52;
const TREND_TOP = 6;
const TREND_KEYS = "Arrow keys move the cursor, Enter goes to its time.";
const MARKS = { p95: "p95", p50: "p50", generated: "decode", waiting: "waiting", running: "running", most: "running", preempted: "preempted" };

export class TrendChart {
  constructor(trends, [title, curves, write, isStacked = false]) {
    Object.assign(this, { app: trends.app, trends, title, curves, write, isStacked });
    this.painted = null; // the engine core whose figures are painted
    const attributes = { tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": `${title}. ${TREND_KEYS}` };
    this.surface = new Surface(trends.app.page, attributes, () => trends.app.loop.invalidate(trends));
    this.pointer = new Pointer(trends.app, this.surface, (x) => this.pointed(x));
    this.cursor = new KeyCursor(this.pointer, () => this.places(), { pressed: (x) => this.goTo(x) });
    this.listen();
    const marks = curves.length > 1 ? [legend(...[...curves].reverse().map(([, , name]) => [MARKS[name], name]))] : [];
    this.node = element("div", { class: "nbe-trend-chart" }, element("h4", {}, title), ...marks, this.surface.stage);
  }

  // A press goes to the time that is there, and so does the pointer as long as it is down. A finger may be about to scroll
  // the page: it goes there once it moves sideways, or is lifted.
  listen() {
    const { canvas } = this.surface;
    let isDown = false;
    let touched = null; // where a finger has come down that may scroll the page
    const follow = (event) => {
      touched = null;
      this.goTo(this.surface.place(event)[0]);
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || this.surface.place(event)[0] < TREND_LEFT) return;
      isDown = true;
      canvas.setPointerCapture(event.pointerId);
      if (event.pointerType === "touch") touched = [event.clientX, event.clientY];
      else follow(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (isDown && (!touched || Math.abs(event.clientX - touched[0]) > Math.abs(event.clientY - touched[1]))) follow(event);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (touched) follow(event);
      isDown = false;
    });
    canvas.addEventListener("pointercancel", () => {
      isDown = false;
      touched = null;
    });
  }

  goTo(x) {
    if (!this.trends.shown) return;
    this.trends.goTo(clamp(this.timeAt(x), ...this.window));
  }

  get window() {
    const { begin, end } = this.trends.answer;
    return [begin, end];
  }

  get columns() {
    return Math.max(1, this.surface.width - TREND_LEFT - 2);
  }

  x(time) {
    const [begin, end] = this.window;
    return TREND_LEFT + ((time - begin) / (end - begin)) * this.columns;
  }

  timeAt(x) {
    const [begin, end] = this.window;
    return begin + ((x - TREND_LEFT) / this.columns) * (end - begin);
  }

  // Return the middle of each slice.
  places() {
    const rank = this.trends.shown;
    return rank ? rank.gap.map((_, at) => this.x(this.window[0] + (at + 0.5) * rank.seconds)) : [];
  }

  pointed(x) {
    const rank = this.trends.shown;
    if (!rank || x < TREND_LEFT) return { time: null, lines: null };
    const time = this.timeAt(x);
    const at = Math.floor((time - this.window[0]) / rank.seconds);
    if (at < 0 || at >= rank.gap.length) return { time: null, lines: null };
    const from = this.window[0] + at * rank.seconds;
    const lines = [`${clock(from, 0)}, ${duration(rank.seconds)}`];
    const told = this.curves.filter(([column]) => rank[column][at] !== null);
    for (const [column, , name] of told) lines.push(`${this.title} ${name}: ${this.write(rank[column][at])}`);
    if (!told.length) lines.push(rank.gap[at] ? "nothing is known" : "no request");
    else if (rank.gap[at]) lines.push("of a part nothing is known");
    return { time, lines };
  }

  // The crosshair is where the pointer is, or else at the moment that everything shows.
  drawCross() {
    const time = this.app.cross ?? this.app.view.time;
    this.surface.cross(time === null || !this.trends.shown ? null : this.x(time), TREND_LEFT);
  }

  // Only the crosshair moves while somebody scrubs.
  draw() {
    const isResized = this.surface.fit();
    const rank = this.trends.shown;
    if (isResized || this.painted !== rank) this.paint(rank);
    this.painted = rank;
    if (!rank) return;
    this.drawCross();
    this.pointer.tell();
    this.cursor.tell();
  }

  paint(rank) {
    const context = this.surface.clear();
    const { width, height } = this.surface;
    if (!rank || width < TREND_LEFT + 20) return;
    const { theme } = this.app;
    clockTicks(context, theme, { width, height }, this.window, (time) => this.x(time), TREND_LEFT);
    const others = this.trends.answer.ranks.filter((other) => other !== rank);
    const most = Math.max(...[rank, ...others].flatMap((each) => this.curves.flatMap((_, at) => this.tops(each, at))), 0) || 1;
    const bottom = height - 2;
    const y = (value) => bottom - (value / most) * (bottom - AXIS - TREND_TOP);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = theme.muted;
    context.fillText(this.write(most), TREND_LEFT - 6, y(most), TREND_LEFT - 8);
    context.fillStyle = theme.faint;
    context.fillRect(TREND_LEFT, Math.round(y(most)), width - TREND_LEFT, 1);
    context.fillRect(TREND_LEFT, bottom, width - TREND_LEFT, 1);
    this.gaps(context, rank);
    this.curves.forEach(([, role], at) => this.bars(context, this.tops(rank, at), theme.roles[role], y, bottom));
    for (const other of others) this.line(context, other, this.curves[this.curves.length - 1][0], y);
  }

  // Shade what nothing is known of.
  gaps(context, rank) {
    const { theme } = this.app;
    context.fillStyle = theme.text;
    context.globalAlpha = 0.14;
    const begin = this.window[0];
    for (let at = 0; at < rank.gap.length; ) {
      let end = at + 1;
      while (end < rank.gap.length && rank.gap[end] === rank.gap[at]) end += 1;
      const left = this.x(begin + at * rank.seconds);
      if (rank.gap[at]) context.fillRect(left, AXIS, this.x(begin + end * rank.seconds) - left, this.surface.height - AXIS);
      at = end;
    }
    context.globalAlpha = 1;
  }

  // Return where the bars of a curve end: those of a stacked one stand upon the curves below.
  tops(rank, at) {
    const values = rank[this.curves[at][0]];
    if (!this.isStacked || at + 1 === this.curves.length) return values;
    const below = this.tops(rank, at + 1);
    return values.map((value, slice) => (value ? value + below[slice] : value));
  }

  bars(context, values, fill, y, bottom) {
    context.fillStyle = fill;
    const width = this.columns / values.length;
    values.forEach((value, at) => {
      if (!value) return;
      const top = Math.min(y(value), bottom - 1);
      context.fillRect(TREND_LEFT + at * width, top, Math.max(1, width - (width > 3 ? 1 : 0)), bottom - top);
    });
  }

  // Draw another engine core beside the chosen one, so that it can be seen which one lags.
  line(context, rank, column, y) {
    context.strokeStyle = this.app.theme.text;
    context.globalAlpha = 0.55;
    context.beginPath();
    let isDrawn = false;
    rank[column].forEach((value, at) => {
      if (value === null) {
        isDrawn = false;
        return;
      }
      const x = this.x(this.window[0] + (at + 0.5) * rank.seconds);
      if (isDrawn) context.lineTo(x, y(value));
      else context.moveTo(x, y(value));
      isDrawn = true;
    });
    context.stroke();
    context.globalAlpha = 1;
  }
}
