// The last hour or day of an engine, which its host has kept: charts of each figure over time.

import { button, element, panel, setAttribute, setText } from "./dom.js";
import { clock, duration, integer, perSecond, share } from "./format.js";
import { Kept } from "./kept.js";
import { TrendChart } from "./trend_chart.js";
import { clamp } from "./view.js";

const LASTS = { hour: "1h", day: "1d" };
const AGAIN_MS = { hour: 15_000, day: 120_000 };
const SCRUB_HINT = "Press or drag on a chart, or move the slider: everything goes to that time.";

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
      this.kept = new Kept(answer, (rank) => this.numBlocksOf(rank));
      this.app.view.reachBackTo(answer.begin);
    }
    this.app.loop.invalidate(this, this.app.header);
  }

  // Return the blocks of an engine core, none where it is not known any more: its part counts neither as used nor as there.
  // A model whose layers all keep a state has slots in place of blocks.
  numBlocksOf(rank) {
    const info = this.app.store.ranks.get(rank)?.info;
    return info ? info.num_blocks || info.num_state_slots : 0;
  }

  // Let everything show a time, as far as it is kept, and say what is not.
  goTo(time) {
    this.app.view.moveToTime(time);
    this.app.announcer.say(this.words());
  }

  slide() {
    const value = Number(this.slider.value);
    if (value >= Number(this.slider.max)) this.app.view.goLive();
    else this.app.view.moveToTime(this.answer.begin + (value + 0.5) * this.shown.seconds);
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
    const { time } = this.app.view;
    // The slider counts slices, and goes to the middle of one: a key leads to the next figures, also in a day.
    const { seconds, gap } = this.shown;
    const slice = Math.floor(((time ?? Infinity) - this.answer.begin) / seconds);
    const value = String(clamp(slice, 0, gap.length));
    setAttribute(this.slider, "max", gap.length);
    if (this.slider.value !== value) this.slider.value = value;
    const words = this.words();
    setAttribute(this.slider, "aria-valuetext", time === null ? "now" : words);
    setText(this.moment, words);
    setAttribute(this.nowButton, "aria-disabled", time === null);
  }
}
