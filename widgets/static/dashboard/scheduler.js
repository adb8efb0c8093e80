// Running and waiting requests, preemptions, and the token budget used, step by step: above the timeline's columns.

import { element, legend, panel, setText } from "./dom.js";
import { clock, count, duration, integer, niceStep } from "./format.js";
import { Surface } from "./surface.js";
import { Pointer } from "./pointer.js";
import { clamp } from "./view.js";

const LEFT = 40;
const TOP = 8;

// Find for each column of pixels the step with the greatest `read`; -1 where there is no step.
function foremost(view, columns, read) {
  const [from, to] = view.window;
  const where = new Int32Array(columns).fill(-1);
  const most = new Float64Array(columns);
  const scale = columns / (to - from);
  const [begin, end] = view.range;
  for (let ordinal = begin; ordinal < end; ordinal += 1) {
    const value = read(ordinal);
    const until = view.endOf(ordinal);
    if (until < from) continue;
    const first = clamp(Math.floor((view.placeOf(ordinal) - from) * scale), 0, columns - 1);
    const last = clamp(Math.ceil((until - from) * scale) - 1, first, columns - 1);
    for (let x = first; x <= last; x += 1) {
      if (where[x] >= 0 && value <= most[x]) continue;
      where[x] = ordinal;
      most[x] = value;
    }
  }
  return where;
}

// Return the columns' values; -1 where there is no step.
function envelope(view, columns, column) {
  const { steps } = view.history;
  const cells = steps[column];
  const read = (ordinal) => cells[steps.slot(ordinal)];
  return Array.from(foremost(view, columns, read), (ordinal) => (ordinal < 0 ? -1 : read(ordinal)));
}

// Call `draw(x, width)` for each stretch of columns with the same value that is known.
function stretches(values, draw) {
  for (let x = 0; x < values.length; ) {
    let end = x + 1;
    while (end < values.length && values[end] === values[x]) end += 1;
    if (values[x] >= 0) draw(x, end - x);
    x = end;
  }
}

class Chart {
  constructor(app, label, resized) {
    this.app = app;
    this.surface = new Surface(app.page, { role: "img", "aria-label": label }, resized);
    this.pointer = new Pointer(app, this.surface, (x) => this.pointed(x));
  }

  pointed(x) {
    const { view } = this.app;
    if (!view.history || x < LEFT) return { time: null, lines: null };
    const [from, to] = view.window;
    const place = from + ((x - LEFT) / this.columns()) * (to - from);
    const ordinal = view.ordinalAt(place);
    const isKnown = place >= view.first && place <= view.end;
    return { time: isKnown ? view.timeAt(place) : null, lines: ordinal === null ? null : stepLines(view.history, ordinal) };
  }

  drawCross() {
    const { view, cross } = this.app;
    const place = cross === null || !view.history ? null : view.placeAt(cross);
    const [from, to] = view.window;
    this.surface.cross(place === null ? null : LEFT + ((place - from) / (to - from)) * this.columns(), LEFT);
  }

  // Draw grid lines with their values, up to `most`.
  axis(context, most) {
    const { width, height } = this.surface;
    const { theme } = this.app;
    const step = Math.max(1, niceStep(most / 3));
    context.font = `11px ${theme.font}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let value = 0; value <= most; value += step) {
      const y = Math.round(this.y(value, most)) + 0.5;
      context.fillStyle = theme.muted;
      context.fillText(integer(value), LEFT - 6, clamp(y, 6, height - 7));
      context.fillStyle = theme.faint;
      context.fillRect(LEFT, y, width - LEFT, 1);
    }
  }

  y(value, most) {
    const bottom = this.surface.height - 2;
    return bottom - (value / most) * (bottom - TOP);
  }

  columns() {
    return Math.max(1, this.surface.width - LEFT - 2);
  }

  drawCursor(context) {
    const { view, theme } = this.app;
    this.drawCross();
    this.pointer.tell();
    if (view.cursor === null) return;
    const [from, to] = view.window;
    const middle = (view.placeOf(view.cursor) + view.endOf(view.cursor)) / 2;
    const x = LEFT + ((middle - from) / (to - from)) * this.columns();
    if (x < LEFT || x > this.surface.width) return;
    context.fillStyle = theme.accent;
    context.fillRect(Math.round(x), 0, 1, this.surface.height);
  }
}

class QueueChart extends Chart {
  draw() {
    this.surface.fit();
    const context = this.surface.clear();
    const { view } = this.app;
    const { roles } = this.app.theme;
    if (!view.history || this.surface.width < LEFT + 20) return;
    const columns = this.columns();
    const read = (column) => envelope(view, columns, column);
    const [running, waiting, preempted] = ["running", "waiting", "preempted"].map(read);
    const most = Math.max(4, ...running, ...waiting) * 1.05;
    this.axis(context, most);
    this.area(context, running, most, roles.running, 0.22);
    this.area(context, waiting, most, roles.waiting, 0);
    context.fillStyle = roles.preempted;
    for (let x = 0; x < columns; x += 1) {
      if (preempted[x] > 0 && !(preempted[x - 1] > 0)) this.mark(context, LEFT + x);
    }
    this.drawCursor(context);
  }

  // Draw a line of steps, filled below.
  area(context, values, most, color, opacity) {
    context.fillStyle = color;
    stretches(values, (x, width) => {
      const y = this.y(values[x], most);
      const before = x && values[x - 1] >= 0 ? this.y(values[x - 1], most) : y;
      context.globalAlpha = opacity;
      context.fillRect(LEFT + x, y, width, this.y(0, most) - y);
      context.globalAlpha = 1;
      context.fillRect(LEFT + x, y - 1, width, 2);
      context.fillRect(LEFT + x, Math.min(y, before) - 1, 1, Math.abs(y - before) + 2);
    });
  }

  mark(context, x) {
    context.fillRect(x, TOP, 1, this.surface.height - TOP - 2);
    context.beginPath();
    context.moveTo(x - 3.5, 1);
    context.lineTo(x + 4.5, 1);
    context.lineTo(x + 0.5, TOP);
    context.fill();
  }
}

class BudgetChart extends Chart {
  draw() {
    this.surface.fit();
    const context = this.surface.clear();
    const { view } = this.app;
    const { history, current } = view;
    const { roles } = this.app.theme;
    if (!history || this.surface.width < LEFT + 20) return;
    const columns = this.columns();
    const total = (ordinal) => history.at("prefill", ordinal) + history.at("decode", ordinal);
    const steps = foremost(view, columns, total);
    const budget = current.info.max_num_batched_tokens;
    const used = steps.reduce((most, ordinal) => (ordinal < 0 ? most : Math.max(most, total(ordinal))), 1);
    const isNear = used * 6 >= budget;
    const most = (isNear ? Math.max(budget, used) : niceStep(used)) * 1.05;
    this.axis(context, most);
    stretches(steps, (x, width) => {
      const low = this.y(history.at("decode", steps[x]), most);
      const high = this.y(total(steps[x]), most);
      const gap = width > 3 ? 1 : 0;
      context.fillStyle = roles.decode;
      context.fillRect(LEFT + x, low, width - gap, this.y(0, most) - low);
      context.fillStyle = roles.prefill;
      context.fillRect(LEFT + x, high, width - gap, low - high);
    });
    if (budget) this.drawBudget(context, budget, most, isNear);
    this.drawCursor(context);
  }

  drawBudget(context, budget, most, isNear) {
    const { theme } = this.app;
    const { width } = this.surface;
    const text = isNear ? `budget ${integer(budget)}` : `budget ${integer(budget)} ↑`;
    const y = isNear ? Math.round(this.y(budget, most)) + 0.5 : TOP;
    context.strokeStyle = theme.text;
    if (isNear) {
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width, y);
      context.stroke();
      context.setLineDash([]);
    }
    context.font = `11px ${theme.font}`;
    context.textAlign = "right";
    context.textBaseline = "top";
    const textWidth = context.measureText(text).width;
    context.globalAlpha = 0.85;
    context.fillStyle = theme.groundColor;
    context.fillRect(width - textWidth - 8, y + 2, textWidth + 8, 15);
    context.globalAlpha = 1;
    context.fillStyle = theme.text;
    context.fillText(text, width - 4, y + 4);
  }
}

// Return a step's details, as lines of text.
export function stepLines(history, ordinal) {
  const at = (column) => history.at(column, ordinal);
  const lines = [
    `step ${integer(at("step"))} · ${clock(at("time"))}`,
    `${duration(at("seconds"))} · ${count(at("prefill") + at("decode"), "token")}`,
    `${integer(at("prefill"))} prefill, ${integer(at("decode"))} decode`,
    `${integer(at("running"))} running, ${integer(at("waiting"))} waiting`,
    `${count(at("free"), "free block")}, ${integer(at("cached"))} findable by prefix`,
  ];
  if (at("preempted")) lines.push(`${integer(at("preempted"))} preempted`);
  if (at("gap")) lines.push("steps before it were lost");
  return lines;
}

export class Scheduler {
  constructor(app) {
    this.app = app;
    const resized = () => app.loop.invalidate(this);
    this.queue = new QueueChart(app, "Running, waiting and preempted requests, step by step", resized);
    this.budget = new BudgetChart(app, "Tokens computed in each step, against the budget", resized);
    this.now = element("span", { class: "nbe-now" });
    const marks = legend(["running", "running"], ["waiting", "waiting"], ["preempted", "preempted"]);
    const tokens = legend(["prefill", "prefill tokens"], ["decode", "decode tokens"]);
    const { node, body } = panel("scheduler", "Scheduler", this.now);
    body.append(marks, this.queue.surface.stage, tokens, this.budget.surface.stage);
    this.node = node;
  }

  // Say how things stand: now, or after the last step before the moment that is shown.
  words() {
    const { view } = this.app;
    const { time, history, current } = view;
    if (!current) return "";
    if (time !== null) {
      const last = history.ordinalAt(time) - 1;
      if (last < history.begin) return view.hasSteps(time) ? "" : "not kept";
      return `${integer(history.at("running", last))} running · ${integer(history.at("waiting", last))} waiting`;
    }
    const { num_running: running, num_waiting: waiting, num_preemptions: preemptions } = current.info;
    return `${integer(running)} running · ${integer(waiting)} waiting · ${count(preemptions, "preemption")}`;
  }

  drawCross() {
    this.queue.drawCross();
    this.budget.drawCross();
  }

  draw() {
    setText(this.now, this.words());
    this.queue.draw();
    this.budget.draw();
  }
}
