// The last hour or day of an engine, which its host has kept: charts of each figure over time.

import { clockTicks, AXIS } from "./axis.js";
import { button, element, legend, panel, setAttribute, setText } from "./dom.js";
import { clock, duration, integer, perSecond, share } from "./format.js";
import { Kept } from "./kept.js";
import { KeyCursor, Pointer } from "./pointer.js";
import { Surface } from "./surface.js";
import { clamp } from "./view.js";

const LASTS = { hour: "1h", day: "1d" };
const AGAIN_MS = { hour: 15_000, day: 120_000 };
const TREND_LEFT = 52;
const TREND_TOP = 6;

// [title, [[column, role, name], …], how a value is written, whether the curves are stacked, the last one lowest]: else the
// last one is in front.
const TREND_CHARTS = [
  ["tokens/s", [["tokens_per_second", "decode", "generated"]], perSecond],
  [
    "requests",
    [
      ["waiting", "waiting", "waiting"],
      ["running", "running", "running"],
    ],
    integer,
    true,
  ],
  [
    "first token",
    [
      ["ttft_p95", "cached", "p95"],
      ["ttft_p50", "prefill", "p50"],
    ],
    duration,
  ],
  [
    "between tokens",
    [
      ["itl_p95", "cached", "p95"],
      ["itl_p50", "decode", "p50"],
    ],
    duration,
  ],
  ["KV cache in use", [["kv_usage", "running", "most"]], (value) => share(value, 1)],
  ["preemptions", [["preemptions", "preempted", "preempted"]], integer],
];
const TREND_KEYS = "Arrow keys move the cursor, Enter goes to its time.";
const SCRUB_HINT = "Press or drag on a chart, or move the slider: everything goes to that time.";
const MARKS = { p95: "p95", p50: "p50", generated: "decode", waiting: "waiting", running: "running", most: "running", preempted: "preempted" };

class TrendChart {
  constructor(trends, [title, curves, write, isStacked = false]) {
    Object.assign(this, { app: trends.app, trends, title, curves, write, isStacked });
    this.painted = null; // the engine core whose figures are painted
    const attributes = { tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": `${title}. ${TREND_KEYS}` };
    this.surface = new Surface(trends.app.page, attributes, () => trends.app.loop.invalidate(trends));
    this.pointer = new Pointer(trends.app, this.surface, (x) => this.pointed(x));
    this.cursor = new KeyCursor(this.pointer, () => this.places(), (x) => this.goTo(x));
    this.listen();
    const marks = curves.length > 1 ? [legend(...[...curves].reverse().map(([, , name]) => [MARKS[name], name]))] : [];
    this.node = element("div", { class: "nbe-trend-chart" }, element("h4", {}, title), ...marks, this.surface.stage);
  }

  // A press goes to the time that is there, and so does the pointer as long as it is down.
  listen() {
    const { canvas } = this.surface;
    let isDown = false;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      isDown = true;
      canvas.setPointerCapture(event.pointerId);
      this.goTo(this.surface.place(event)[0]);
    });
    canvas.addEventListener("pointermove", (event) => isDown && this.goTo(this.surface.place(event)[0]));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (isDown = false));
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

export class Trends {
  constructor(app) {
    this.app = app;
    this.range = "now";
    this.answer = null; // the newest of the chosen time
    this.kept = null; // its figures, as the tiles show them
    this.error = null; // why there is no newer answer
    this.stopTimer = null; // while it is going to ask again
    this.said = element("p", { class: "nbe-muted nbe-empty", role: "status" });
    this.live = element("span", { class: "nbe-now" });
    this.nowButton = button("Show what is now", "▶ Now", () => app.view.goLive());
    const names = { type: "range", min: "0", max: "1", step: "1", class: "nbe-scrubber", "aria-label": "Time of the history" };
    this.slider = element("input", names);
    this.slider.addEventListener("input", () => this.slide());
    this.moment = element("p", { class: "nbe-muted nbe-shown" });
    this.tools = element("div", {}, element("div", { class: "nbe-tools" }, this.nowButton, this.slider), this.moment);
    const { node, body } = panel("trends", "History", this.live);
    this.charts = TREND_CHARTS.map((chart) => new TrendChart(this, chart));
    this.grid = element("div", { class: "nbe-trend-grid" }, ...this.charts.map((chart) => chart.node));
    body.append(this.said, this.tools, this.grid);
    this.node = node;
    this.node.hidden = true;
  }

  get shown() {
    const ranks = this.answer?.ranks ?? [];
    return ranks.find((rank) => rank.rank === this.app.view.rank) ?? ranks[0];
  }

  choose(range) {
    if (range === this.range) return;
    this.range = range;
    this.answer = null;
    this.kept = null;
    this.error = null;
    this.stopTimer?.();
    if (range === "now") this.app.view.reachBackTo(null);
    else this.ask();
    this.app.announcer.say(range === "now" ? "now" : `the last ${range}`);
    this.app.loop.invalidate(...this.app.parts);
  }

  ask() {
    this.stopTimer?.();
    const isSent = this.app.link.askHistory(LASTS[this.range], (answer) => this.take(answer));
    if (!isSent) this.error = "The kernel does not answer.";
    this.stopTimer = this.app.page.after(AGAIN_MS[this.range], () => this.app.loop.isVisible && this.range !== "now" && this.ask());
  }

  // The dashboard can be seen again: what is shown may be old.
  seen() {
    if (this.range !== "now") this.ask();
  }

  take(answer) {
    if (answer.last !== LASTS[this.range]) return;
    this.error = answer.error;
    // An engine that has ended keeps no history: what came before stays.
    if (answer.error === null || this.answer === null) this.answer = answer;
    if (answer.error === null) {
      this.kept = new Kept(answer, (rank) => this.app.store.ranks.get(rank)?.info.num_blocks ?? NaN);
      this.app.view.reachBackTo(answer.begin);
    }
    this.app.loop.invalidate(this, this.app.header);
  }

  // Let everything show a time, as far as it is kept, and say what is not.
  goTo(time) {
    this.app.view.moveToTime(time);
    this.app.announcer.say(this.words());
  }

  slide() {
    const value = Number(this.slider.value);
    if (value >= Number(this.slider.max)) this.app.view.goLive();
    else this.app.view.moveToTime(this.answer.begin + value);
  }

  // Return what is not kept of the moment that is shown.
  get missing() {
    const { store, view } = this.app;
    const { time } = view;
    const ranks = [...store.ranks.values()];
    const missing = [];
    if (!this.app.header.pastAt(time)) missing.push("figures");
    if (!view.hasSteps(time)) missing.push("steps");
    if (view.current?.blocks.length && !view.current.past.knowsBlocks(time)) missing.push("blocks");
    if (!ranks.every((rank) => rank.past.knowsRequests(time))) missing.push("requests");
    return missing;
  }

  // Say which moment is shown.
  words() {
    const { time } = this.app.view;
    if (time === null) return SCRUB_HINT;
    const { missing } = this;
    const last = missing.pop();
    const all = missing.length ? `${missing.join(", ")} and ${last}` : last;
    return last ? `The ${all} of ${clock(time, 0)} are not kept.` : clock(time, 1);
  }

  // The painted charts are out of date: they have other colours.
  repaint() {
    for (const chart of this.charts) chart.painted = null;
  }

  drawCross() {
    if (!this.node.hidden) for (const chart of this.charts) chart.drawCross();
  }

  draw() {
    this.node.hidden = this.range === "now";
    if (this.node.hidden) return;
    setText(this.node.querySelector("h3"), `The last ${this.range}`);
    setAttribute(this.node, "aria-label", `The last ${this.range}`);
    const hasRows = Boolean(this.shown);
    this.grid.hidden = !hasRows;
    this.tools.hidden = !hasRows;
    setText(this.said, this.answer ? this.error ?? "" : this.error ?? "asking the engine's host …");
    this.said.hidden = !this.said.textContent;
    const rank = this.shown;
    const isOne = !rank || this.answer.ranks.length < 2;
    setText(this.live, isOne ? "" : `engine core ${rank.rank}, the others as lines`);
    if (hasRows) this.drawTools();
    for (const chart of this.charts) chart.draw();
  }

  drawTools() {
    const { begin, end } = this.answer;
    const { time } = this.app.view;
    const seconds = Math.max(1, Math.floor(end - begin));
    const value = String(time === null ? seconds : Math.round(clamp(time - begin, 0, seconds)));
    setAttribute(this.slider, "max", seconds);
    if (this.slider.value !== value) this.slider.value = value;
    const words = this.words();
    setAttribute(this.slider, "aria-valuetext", time === null ? "now" : words);
    setText(this.moment, words);
    setAttribute(this.nowButton, "aria-disabled", time === null);
  }
}
