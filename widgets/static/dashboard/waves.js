// The timelines of the engine cores: steps, dummy steps or nothing, the waves, and the requests that arrived.

import { element, legend, panel, setText } from "./dom.js";
import { clock, count, duration, integer, share } from "./format.js";
import { Surface } from "./surface.js";
import { AXIS, clockTicks } from "./axis.js";
import { Pointer } from "./pointer.js";
import { GUTTER } from "./timeline_rows.js";
import { clamp } from "./view.js";

const RANK_HEIGHT = 30;
const SECONDS = [1, 3600];
const WAVE_SECONDS = [2, 30];

// What steps do, from the top of a span to its bottom, as in `%engine waves`: role, words, and the steps of a span.
const PHASES = [
  ["decode", "decode steps", (span) => span.steps - span.prefillSteps - span.recomputeSteps],
  ["prefill", "with prefill", (span) => span.prefillSteps],
  ["recompute", "with recomputation", (span) => span.recomputeSteps],
  ["dummy", "dummy steps", (span) => span.dummySteps],
];

// The figures of each engine core, as they are now.
const FIGURE_NAMES = ["rank", "running", "waiting", "KV in use", "preemptions", "steps", "slowest worker's step"];
const LAGGING = 1.25; // a step that takes so many times as long as that of the fastest engine core stands out

function figuresOf(number, { info }) {
  const seconds = Math.max(...info.workers.filter((worker) => worker.num_steps).map((worker) => worker.step_seconds), 0);
  return {
    seconds: seconds || null,
    texts: [
      String(number),
      integer(info.num_running),
      integer(info.num_waiting),
      share(info.num_blocks - info.num_free_blocks, info.num_blocks),
      integer(info.num_preemptions),
      integer(info.step),
    ],
  };
}

export class Waves {
  constructor(app) {
    this.app = app;
    this.chosen = null; // seconds that are shown; null: all that are known, within WAVE_SECONDS
    this.cursor = null; // { row, time }
    this.surface = new Surface(
      app.page,
      {
        tabindex: "0",
        role: "application",
        "aria-roledescription": "timeline of engine cores",
        "aria-label": "Engine cores over time. Arrow keys move the cursor, plus and minus zoom.",
      },
      () => app.loop.invalidate(this),
    );
    this.now = element("span", { class: "nbe-now" });
    this.live = element("span", { class: "nbe-live" }, "figures: live");
    this.live.hidden = true;
    const { node, body } = panel("waves", "Engine cores", this.live, this.now);
    this.marks = legend(...PHASES.map(([role, text]) => [role, text]), ["idle", "idle"], ["arrival", "request arrived"]);
    this.figures = element("tbody", {});
    const heads = FIGURE_NAMES.map((name) => element("th", { scope: "col" }, name));
    const table = element("table", { class: "nbe-skew", "aria-label": "Engine cores" }, element("thead", {}, element("tr", {}, ...heads)));
    table.append(this.figures);
    body.append(this.marks, this.surface.stage, table);
    this.node = node;
    this.node.hidden = true;
    const { canvas } = this.surface;
    this.pointer = new Pointer(app, this.surface, (x, y) => this.pointed(x, y));
    canvas.addEventListener("blur", () => this.forget());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get seconds() {
    if (this.chosen !== null) return this.chosen;
    if (this.app.view.isTime) return this.app.view.seconds;
    let begin = Infinity;
    for (const { spans } of this.app.store.ranks.values()) {
      if (spans.end > spans.begin) begin = Math.min(begin, spans.since[spans.slot(spans.begin)]);
    }
    return clamp((this.app.store.time ?? 0) - begin, ...WAVE_SECONDS);
  }

  get window() {
    const { view, store } = this.app;
    const end = view.isTime ? view.window[1] : (view.time ?? store.time ?? 0);
    return [end - this.seconds, end];
  }

  x(time) {
    const [start, end] = this.window;
    return GUTTER + ((time - start) / (end - start)) * (this.surface.width - GUTTER - 1);
  }

  timeAt(x) {
    const [start, end] = this.window;
    return start + ((x - GUTTER) / (this.surface.width - GUTTER - 1)) * (end - start);
  }

  pointed(x, y) {
    if (x < GUTTER) return { time: null, lines: null };
    const time = this.timeAt(x);
    return { time, lines: this.lines(Math.floor((y - AXIS) / RANK_HEIGHT), time) };
  }

  drawCross() {
    const { cross } = this.app;
    if (!this.node.hidden) this.surface.cross(cross === null ? null : this.x(cross), GUTTER);
  }

  lines(row, time) {
    const number = this.app.store.rankNumbers[row];
    const rank = this.app.store.ranks.get(number);
    if (!rank) return null;
    const lines = [`rank ${number} · ${clock(time, 1)}`];
    const span = rank.spanAt(time);
    if (!span) return [...lines, "nothing is known"];
    const { lock_step: inLockStep } = this.app.store.engine;
    if (inLockStep) lines.push(span.isRunning ? `wave ${integer(span.wave)} runs` : "between waves");
    else lines.push(span.isRunning ? "running" : "idle");
    lines.push(`in ${duration(span.until - span.since)}: ${count(Math.round(span.steps), "step")}`);
    for (const [, words, stepsOf] of PHASES.slice(1, 3)) {
      const some = Math.round(stepsOf(span));
      if (some) lines.push(`${integer(some)} ${words}`);
    }
    if (inLockStep) lines.push(`${count(Math.round(span.dummySteps), "dummy step")}`);
    lines.push(count(span.requests, "request"));
    return lines;
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const rows = this.app.store.rankNumbers.length;
    const [start, end] = this.window;
    const cursor = this.cursor ?? { row: 0, time: end };
    const step = this.seconds / 100;
    const actions = {
      ArrowLeft: () => (cursor.time -= step),
      ArrowRight: () => (cursor.time += step),
      ArrowUp: () => (cursor.row -= 1),
      ArrowDown: () => (cursor.row += 1),
      Home: () => (cursor.time = start),
      End: () => (cursor.time = end),
      "+": () => this.zoom(1 / 1.5),
      "=": () => this.zoom(1 / 1.5),
      "-": () => this.zoom(1.5),
    };
    if (event.key === "Escape") this.forget();
    else if (!Object.hasOwn(actions, event.key)) return;
    else {
      this.pointer.hush();
      actions[event.key]();
      const [from, to] = this.window;
      this.cursor = { row: clamp(cursor.row, 0, rows - 1), time: clamp(cursor.time, from, to) };
      const lines = this.tell();
      if (lines) this.app.announcer.say(lines.join(", "));
      this.app.loop.invalidate(this);
    }
    event.preventDefault();
    event.stopPropagation();
  }

  // Show what is at the keyboard's cursor, and return it.
  tell() {
    const { row, time } = this.cursor;
    const lines = this.lines(row, time);
    const place = this.surface.inWindow(this.x(time), AXIS + (row + 1) * RANK_HEIGHT);
    if (lines) this.app.tooltip.show(this, ...place, lines);
    else this.app.tooltip.hide(this);
    return lines;
  }

  zoom(factor) {
    this.chosen = clamp(this.seconds * factor, ...SECONDS);
  }

  forget() {
    this.cursor = null;
    this.app.tooltip.hide(this);
    this.app.loop.invalidate(this);
  }

  draw() {
    const { store, theme } = this.app;
    const numbers = store.rankNumbers;
    const inLockStep = Boolean(store.engine?.lock_step);
    this.node.hidden = !(numbers.length > 1 || inLockStep);
    if (this.node.hidden) return;
    setText(this.node.querySelector("h3"), inLockStep ? "Data-parallel waves" : "Data-parallel ranks");
    this.marks.classList.toggle("nbe-without-dummy", !inLockStep);
    const wave = Math.max(0, ...[...store.ranks.values()].map((rank) => rank.info.wave));
    setText(this.now, inLockStep ? `wave ${integer(wave)}` : count(numbers.length, "rank"));
    this.live.hidden = this.app.view.time === null;
    this.drawFigures(numbers);
    const height = `${AXIS + RANK_HEIGHT * numbers.length}px`;
    if (this.surface.stage.style.height !== height) {
      this.surface.stage.style.height = height;
      this.surface.isStale = true;
    }
    this.surface.fit();
    const context = this.surface.clear();
    if (this.surface.width < GUTTER + 20) return;
    clockTicks(context, theme, this.surface, this.window, (time) => this.x(time), GUTTER);
    numbers.forEach((number, row) => this.drawRank(context, number, AXIS + row * RANK_HEIGHT, inLockStep));
    if (this.cursor) this.drawCursor(context);
    this.drawCross();
    this.pointer.tell();
  }

  // The window moves on: the cursor stays at its time, and goes with it.
  drawCursor(context) {
    const { row, time } = this.cursor;
    const [from, to] = this.window;
    if (time < from || time > to) {
      this.forget();
      return;
    }
    context.fillStyle = this.app.theme.accent;
    context.fillRect(Math.round(this.x(time)), AXIS + row * RANK_HEIGHT, 2, RANK_HEIGHT);
    if (this.app.tooltip.owner === this) this.tell();
  }

  // Write each engine core's figures, and how much longer its steps take than those of the fastest.
  drawFigures(numbers) {
    const rows = numbers.map((number) => figuresOf(number, this.app.store.ranks.get(number)));
    const fastest = Math.min(...rows.map((row) => row.seconds ?? Infinity));
    while (this.figures.rows.length > rows.length) this.figures.lastChild.remove();
    rows.forEach(({ texts, seconds }, at) => {
      if (at >= this.figures.rows.length) this.figures.append(element("tr", {}, ...FIGURE_NAMES.map(() => element("td", {}))));
      const { cells } = this.figures.rows[at];
      const isBehind = seconds !== null && rows.length > 1 && seconds > LAGGING * fastest;
      const times = isBehind ? ` (${(seconds / fastest).toFixed(1)} × the fastest)` : "";
      [...texts, `${duration(seconds)}${times}`].forEach((text, column) => setText(cells[column], text));
      cells[texts.length].classList.toggle("nbe-lagging", isBehind);
    });
  }

  drawRank(context, number, y, inLockStep) {
    const { theme, store, view } = this.app;
    const rank = store.ranks.get(number);
    const [start, end] = this.window;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.font = `${number === view.rank ? "bold " : ""}11px ${theme.font}`;
    context.fillStyle = rank.info.alive ? theme.text : theme.muted;
    context.fillText(rank.info.alive ? `rank ${number}` : `${number} gone`, GUTTER - 8, y + RANK_HEIGHT / 2, GUTTER - 10);
    let wave = null;
    let labelEnd = GUTTER;
    rank.visitSpans(start, end, (span) => {
      const left = Math.round(Math.max(GUTTER, this.x(span.since)));
      this.drawSpan(context, span, left, Math.round(this.x(Math.min(end, span.until))), y);
      if (!inLockStep || !span.isRunning || span.wave === wave) return;
      wave = span.wave;
      labelEnd = this.waveLabel(context, wave, left, y, labelEnd);
    });
    for (const request of store.requests) {
      if (request.rank !== number || request.added_at < start || request.added_at > end) continue;
      this.arrival(context, theme.request(request.number), this.x(request.added_at), y + RANK_HEIGHT - 9);
    }
  }

  // The phases share a span's height.
  drawSpan(context, span, left, right, y) {
    const { theme } = this.app;
    const width = Math.max(1, right - left);
    const top = y + 3;
    const height = RANK_HEIGHT - 13;
    const { isRunning } = span;
    const all = span.steps + span.dummySteps;
    if (isRunning && all > 0) {
      let sum = 0;
      for (const [role, , stepsOf] of PHASES) {
        const from = Math.round((height * sum) / all);
        sum += stepsOf(span);
        context.fillStyle = theme.roles[role];
        context.fillRect(left, top + from, width, Math.round((height * sum) / all) - from);
      }
      return;
    }
    context.fillStyle = isRunning ? theme.roles.running : theme.muted;
    context.globalAlpha = isRunning ? 0.3 : 0.5;
    if (isRunning) context.fillRect(left, top, width, height);
    else context.fillRect(left, top + Math.floor(height / 2), width, 1);
    context.globalAlpha = 1;
  }

  waveLabel(context, wave, left, y, labelEnd) {
    const { theme } = this.app;
    context.fillStyle = theme.text;
    context.fillRect(Math.round(left), y + 1, 1, RANK_HEIGHT - 9);
    context.font = `11px ${theme.font}`;
    context.textAlign = "left";
    const text = String(wave);
    const width = context.measureText(text).width + 8;
    if (left < labelEnd || left + width > this.surface.width) return labelEnd;
    context.fillStyle = theme.groundColor;
    context.globalAlpha = 0.85;
    context.fillRect(left + 2, y + 4, width - 2, 13);
    context.globalAlpha = 1;
    context.fillStyle = theme.text;
    context.fillText(text, left + 5, y + 11);
    return left + width;
  }

  arrival(context, color, x, y) {
    context.fillStyle = color;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + 4.5, y + 8);
    context.lineTo(x - 4.5, y + 8);
    context.fill();
  }
}
