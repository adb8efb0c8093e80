// The last hour or day of an engine, which its host has kept: charts of each figure over time.

import { clockTicks, AXIS } from "./axis.js";
import { element, legend, panel, setAttribute, setText } from "./dom.js";
import { clock, duration, integer, perSecond, share } from "./format.js";
import { KeyCursor, Pointer } from "./pointer.js";
import { Surface } from "./surface.js";

const LASTS = { hour: "1h", day: "1d" };
const AGAIN_MS = { hour: 15_000, day: 120_000 };
const TREND_LEFT = 52;
const TREND_TOP = 6;

// [title, [[column, role, name], …] drawn one upon the other, the last in front, how a value is written]
const TREND_CHARTS = [
  ["tokens/s", [["tokens_per_second", "decode", "generated"]], perSecond],
  [
    "requests",
    [
      ["waiting", "waiting", "waiting"],
      ["running", "running", "running"],
    ],
    integer,
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
const TREND_KEYS = "Arrow keys move the cursor, Enter goes to the steps of its time.";
const MARKS = { p95: "p95", p50: "p50", generated: "decode", waiting: "waiting", running: "running", most: "running", preempted: "preempted" };

class TrendChart {
  constructor(trends, [title, curves, write]) {
    Object.assign(this, { app: trends.app, trends, title, curves, write });
    const attributes = { tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": `${title}. ${TREND_KEYS}` };
    this.surface = new Surface(trends.app.page, attributes, () => trends.app.loop.invalidate(trends));
    this.pointer = new Pointer(trends.app, this.surface, (x) => this.pointed(x));
    const goTo = (x) => trends.goTo(this.timeAt(x));
    this.cursor = new KeyCursor(this.pointer, () => this.places(), goTo);
    this.surface.canvas.addEventListener("click", (event) => goTo(this.surface.place(event)[0]));
    const marks = curves.length > 1 ? [legend(...[...curves].reverse().map(([, , name]) => [MARKS[name], name]))] : [];
    this.node = element("div", { class: "nbe-trend-chart" }, element("h4", {}, title), ...marks, this.surface.stage);
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

  drawCross() {
    const { cross } = this.app;
    this.surface.cross(cross === null || !this.trends.shown ? null : this.x(cross), TREND_LEFT);
  }

  draw() {
    this.surface.fit();
    const context = this.surface.clear();
    const rank = this.trends.shown;
    const { width, height } = this.surface;
    if (!rank || width < TREND_LEFT + 20) return;
    const { theme } = this.app;
    clockTicks(context, theme, { width, height }, this.window, (time) => this.x(time), TREND_LEFT);
    const others = this.trends.answer.ranks.filter((other) => other !== rank);
    const most = Math.max(...[rank, ...others].flatMap((each) => this.curves.flatMap(([column]) => each[column])), 0) || 1;
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
    for (const [column, role] of this.curves) this.bars(context, rank, column, theme.roles[role], y, bottom);
    for (const other of others) this.line(context, other, this.curves[this.curves.length - 1][0], y);
    this.drawCross();
    this.pointer.tell();
    this.cursor.tell();
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

  bars(context, rank, column, fill, y, bottom) {
    context.fillStyle = fill;
    const width = this.columns / rank.gap.length;
    rank[column].forEach((value, at) => {
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
    this.missed = ""; // said of a time whose steps are not kept
    this.stopTimer = null; // while it is going to ask again
    this.said = element("p", { class: "nbe-muted nbe-empty", role: "status" });
    this.live = element("span", { class: "nbe-now" });
    const { node, body } = panel("trends", "History", this.live);
    this.charts = TREND_CHARTS.map((chart) => new TrendChart(this, chart));
    this.grid = element("div", { class: "nbe-trend-grid" }, ...this.charts.map((chart) => chart.node));
    body.append(this.said, this.grid);
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
    this.missed = "";
    this.stopTimer?.();
    if (range !== "now") this.ask();
    this.app.announcer.say(range === "now" ? "now" : `the last ${range}`);
    this.app.loop.invalidate(this, this.app.header);
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
    // An engine that has ended keeps no history: what came before stays.
    if (answer.error === null || this.answer === null) this.answer = answer;
    this.error = answer.error;
    this.app.loop.invalidate(this);
  }

  // Show the steps at a time, where they are known; where they are not, say so.
  goTo(time) {
    const { view } = this.app;
    const isKept = view.history?.end > view.history?.begin && time >= view.history.at("time", view.history.begin);
    this.missed = isKept ? "" : `The steps of ${clock(time, 0)} are not kept.`;
    if (isKept) view.moveToStep(Math.max(view.history.begin, view.history.ordinalAt(time) - 1));
    this.app.loop.invalidate(this);
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
    const told = [this.error, this.missed].filter(Boolean).join(" — ");
    setText(this.said, told || this.answer ? told : "asking the engine's host …");
    this.said.hidden = !this.said.textContent;
    const rank = this.shown;
    const isOne = !rank || this.answer.ranks.length < 2;
    setText(this.live, isOne ? "" : `engine core ${rank.rank}, the others as lines`);
    for (const chart of this.charts) chart.draw();
  }
}
