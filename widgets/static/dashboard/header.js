// The header: the engine's names, its state, and its figures with their course.

import { button, element, setAttribute, setText } from "./dom.js";
import { NOTHING, bytes, clock, duration, integer, perSecond, share } from "./format.js";
import { Surface } from "./surface.js";

// The names of the button that lets a suspended engine go on, by its state.
const HELD = { asleep: "Wake", paused: "Resume" };
const TREND_SECONDS = 300; // seconds of a tile's course
const RANGES = [
  ["now", "Steps, requests and blocks as they are"],
  ["hour", "The last hour, which the engine's host has kept, also when nobody watched"],
  ["day", "The last day, which the engine's host has kept, also when nobody watched"],
];

const KEPT_TITLE = "As the engine's host has kept them: means of rates, and the highest of percentiles and of the cache's use";

const kvUse = (figures) => (figures.num_blocks ? figures.used_blocks / figures.num_blocks : null);

// [label, title, value of the figures, its unit, the number whose course is drawn, the line below]
// Figures that the engine's host has kept are of some `seconds`.
const TILES = [
  [
    "tokens in",
    "Prompt tokens computed in a second, without those found in the prefix cache",
    (f) => perSecond(f.tokens_in_per_second),
    () => "/s",
    (f) => f.tokens_in_per_second,
    (f) => (f.seconds ? "cached ones, too" : ""),
  ],
  ["tokens out", "Tokens generated in a second", (f) => perSecond(f.tokens_out_per_second), () => "/s", (f) => f.tokens_out_per_second],
  [
    "first token",
    "Median time to the first token, inside the engine, and its 95th and 99th percentile",
    (f) => duration(f.time_to_first_token),
    () => "",
    (f) => f.time_to_first_token,
    (f) => tail(f.first_token_p95, f.first_token_p99),
  ],
  [
    "between tokens",
    "Median time between tokens, inside the engine, and its 95th and 99th percentile",
    (f) => duration(f.inter_token_latency),
    () => "",
    (f) => f.inter_token_latency,
    (f) => tail(f.inter_token_p95, f.inter_token_p99),
  ],
  [
    "memory",
    "Memory of all workers together",
    (f) => bytes(f.memory_bytes),
    () => "",
    (f) => f.memory_bytes,
    (f) => (f.seconds ? "not kept" : ""),
  ],
  [
    "KV blocks in use",
    "Share of the blocks that requests hold",
    (f) => share(f.used_blocks, f.num_blocks),
    (f) => ` of ${integer(f.num_blocks)}`,
    kvUse,
    (f) => (f.seconds ? "at most" : ""),
  ],
  [
    "prefix hits",
    "Share of the looked-up prompt tokens that were in the prefix cache, since the start",
    (f) => share(f.hits, f.queries),
    () => "",
    (f) => (f.queries ? f.hits / f.queries : null),
    (f) => (f.seconds ? `in ${duration(f.seconds)}` : ""),
  ],
];

function tail(p95, p99) {
  return p95 === null || p95 === undefined ? "" : `p95 ${duration(p95)} · p99 ${duration(p99)}`;
}

class Tile {
  constructor(app, header, [label, title, value, unit, number, below]) {
    Object.assign(this, { app, read: { value, unit, number, below } });
    this.value = element("div", { class: "nbe-value" }, NOTHING);
    this.below = element("div", { class: "nbe-tail" });
    this.course = new Surface(app.page, { role: "presentation" }, () => app.loop.invalidate(header));
    this.course.stage.classList.add("nbe-trend");
    const name = element("div", { class: "nbe-label" }, label);
    this.node = element("div", { class: "nbe-tile", role: "listitem", title }, name, this.value, this.below, this.course.stage);
  }

  // `course` lists [time, whether nothing is known before it, figures] up to the time.
  draw(figures, course, time) {
    const { value, unit, below } = this.read;
    this.set(value(figures), unit(figures));
    const tails = below ? below(figures) : "";
    setText(this.below, tails);
    // A narrow tile cuts it off.
    setAttribute(this.below, "title", tails);
    this.drawCourse(course, time);
  }

  set(value, unit) {
    const node = this.value;
    if (node.dataset.value === value + unit) return;
    node.dataset.value = value + unit;
    node.replaceChildren(value);
    if (unit && value !== NOTHING) node.append(element("small", {}, unit));
  }

  drawCourse(course, time) {
    this.course.fit();
    const context = this.course.clear();
    const { width, height } = this.course;
    if (!width || course.length < 2) return;
    const values = course.map(([, , figures]) => this.read.number(figures) ?? NaN);
    const most = Math.max(...values.filter(Number.isFinite), 1e-12);
    const begin = course[0][0];
    context.strokeStyle = this.app.theme.accent;
    context.lineWidth = 1.2;
    context.beginPath();
    let isDrawn = false;
    course.forEach(([at, isGap], index) => {
      if (!Number.isFinite(values[index])) {
        isDrawn = false;
        return;
      }
      const x = ((at - begin) / Math.max(1e-9, time - begin)) * (width - 2) + 1;
      const y = height - 1.5 - (values[index] / most) * (height - 3);
      if (isDrawn && !isGap) context.lineTo(x, y);
      else context.moveTo(x, y);
      isDrawn = true;
    });
    context.stroke();
  }
}

export class Header {
  constructor(app) {
    this.app = app;
    this.state = element("span", { class: "nbe-state" });
    this.name = element("span", { class: "nbe-name" });
    this.model = element("span", { class: "nbe-model" });
    this.topology = element("span", { class: "nbe-muted" });
    this.goOn = button("Let it go on", "", () => this.letGoOn());
    this.goOn.hidden = true;
    this.refusal = null; // the reason why the engine does not go on
    this.moment = element("span", { class: "nbe-moment" });
    this.ranges = new Map(RANGES.map(([name, title]) => [name, button(title, name, () => app.trends.choose(name))]));
    const ranges = element("span", { class: "nbe-ranges", role: "group", "aria-label": "Time that is shown" }, ...this.ranges.values());
    const actions = element("span", { class: "nbe-actions" }, ranges, app.popout.button);
    this.banner = element("div", { class: "nbe-banner", role: "note" });
    this.tiles = TILES.map((tile) => new Tile(app, this, tile));
    this.node = element(
      "header",
      { class: "nbe-header" },
      element("div", { class: "nbe-title" }, this.state, this.goOn, this.name, this.model, this.topology, this.moment, actions),
      app.popout.said,
      element("div", { class: "nbe-tiles", role: "list" }, ...this.tiles.map((tile) => tile.node)),
      this.banner,
    );
  }

  // Keep the height, or take that of the content again: what is told meanwhile lies over the panels below.
  hold(isHeld) {
    this.node.style.height = isHeld ? `${this.node.getBoundingClientRect().height}px` : "";
  }

  draw() {
    const { store, view } = this.app;
    const { engine } = store;
    setText(this.state, engine ? engine.state : "…");
    setAttribute(this.state, "data-state", engine ? engine.state : "unknown");
    setText(this.name, engine?.name ?? "");
    setText(this.model, engine?.model ?? "");
    setText(this.topology, engine ? [engine.topology, engine.device, engine.dtype].filter(Boolean).join(" · ") : "");
    this.drawGoOn(engine);
    for (const [name, node] of this.ranges) setAttribute(node, "aria-pressed", this.app.trends.range === name);
    const { time } = view;
    const past = time === null ? null : this.pastAt(time);
    const until = past ? time : store.time;
    const course = past?.seconds ? this.app.trends.kept.course(until) : store.samples.course(until - TREND_SECONDS, until);
    for (const tile of this.tiles) tile.draw(past ?? store.figures, course, until);
    this.drawMoment(time, past);
    this.drawBanner(engine);
  }

  // Return the figures of a time, as they were seen here or else as the engine's host has kept them; null where none are known.
  pastAt(time) {
    return this.app.store.samples.at(time) ?? this.app.trends.kept?.at(time) ?? null;
  }

  // Say which time the figures are of.
  drawMoment(time, past) {
    const known = past?.seconds ? `as of ${clock(past.since, 0)}, over ${duration(past.seconds)}` : `as of ${clock(time, 1)}`;
    setText(this.moment, time === null ? "" : past ? known : "figures: live");
    setAttribute(this.moment, "title", past?.seconds ? KEPT_TITLE : "");
    this.moment.classList.toggle("nbe-live", time !== null && !past);
    this.moment.hidden = time === null;
  }

  drawGoOn(engine) {
    const word = this.app.link.state === "live" ? HELD[engine?.state] : undefined;
    if (!word) this.refusal = null;
    setText(this.goOn, word ?? "");
    setAttribute(this.goOn, "aria-label", `${word} the engine`);
    this.goOn.hidden = !word;
  }

  letGoOn() {
    const isSent = this.app.link.goOn((error) => {
      this.refusal = error;
      this.draw();
    });
    if (!isSent) this.refusal = "the kernel does not answer";
    this.draw();
  }

  drawBanner(engine) {
    const { link, store } = this.app;
    const lines = [];
    const hasEnded = engine?.state === "ended";
    if (link.state === "saved") {
      const saved = `saved state of ${new Date(store.time * 1000).toLocaleDateString()} ${clock(store.time, 0)}`;
      lines.push(`${saved}, ${link.isLate ? "no live engine" : "asking the kernel for more …"}`);
    } else if (link.state === "waiting") {
      lines.push(link.isLate ? "The kernel does not answer: nothing is known of the engine." : "waiting for the kernel …");
    } else if (link.state === "silent" && !hasEnded) {
      lines.push(`The kernel does not answer. This is the state at ${clock(store.time, 0)}.`);
    }
    if (engine?.note) lines.push(engine.note);
    if (hasEnded && link.state !== "saved") lines.push("what was seen of it can be looked through and exported");
    if (this.refusal) lines.push(this.refusal);
    setText(this.banner, lines.join(" — "));
    this.banner.hidden = !lines.length;
  }
}
