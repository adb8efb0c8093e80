// The step timeline shows what each request did in each step; it can pause, go back, zoom and export a file.

import { button, element, legend, panel, setAttribute, setText } from "./dom.js";
import { clock, count, integer, nameOf } from "./format.js";
import { FINISHED, PREEMPTED, RECOMPUTE } from "./history.js";
import { AXIS } from "./axis.js";
import { Pointer } from "./pointer.js";
import { stepLines } from "./scheduler.js";
import { Surface } from "./surface.js";
import { GUTTER, Painter, Rows } from "./timeline_rows.js";
import { clamp } from "./view.js";

const HELP = "Arrow keys move the cursor, page keys by a window, home and end to the ends, plus and minus zoom, space pauses.";
const EXPORT_MS = 3000;
const NO_STEPS = "the steps of this time are not kept";

export class Timeline {
  constructor(app) {
    this.app = app;
    this.rows = new Rows();
    this.wanted = 0; // the height that the rows need
    this.row = null; // the number of the request at the keyboard's cursor
    this.stopTimer = null; // while an export is asked for
    this.surface = new Surface(
      app.page,
      {
        tabindex: "0",
        role: "application",
        "aria-roledescription": "step timeline",
        "aria-label": `Step timeline. ${HELP}`,
      },
      () => app.loop.invalidate(this),
    );
    this.pauseButton = button("Pause", "❚❚ Pause", () => this.toggle());
    this.slider = element("input", {
      type: "range",
      min: "0",
      max: "1",
      step: "1",
      class: "nbe-slider",
      "aria-label": "Position among the last steps",
    });
    this.slider.addEventListener("input", () => this.slide());
    this.place = element("span", { class: "nbe-place" });
    this.axisButton = button("Show time", "Time", () => app.view.measure(app.view.isTime ? "steps" : "time"));
    this.exportButton = button("Export as Chrome trace", "Export", () => this.export());
    const tools = element(
      "div",
      { class: "nbe-tools", role: "toolbar", "aria-label": "Timeline" },
      this.pauseButton,
      this.slider,
      this.place,
      this.axisButton,
      button("Zoom out", "−", () => app.view.zoom(1 / 1.5)),
      button("Zoom in", "+", () => app.view.zoom(1.5)),
      button("Show all steps", "All", () => app.view.zoomToAll()),
      this.exportButton,
    );
    const marks = legend(
      ["prefill", "prefill"],
      ["decode-low", "decode"],
      ["recompute", "resumed"],
      ["hit", "prefix hit"],
      ["cross", "preempted"],
    );
    const { node, body } = panel("timeline", "Step timeline", marks);
    body.append(tools, this.surface.stage);
    this.node = node;
    this.listen();
  }

  listen() {
    const { canvas } = this.surface;
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    this.pointer = new Pointer(this.app, this.surface, (x, y) => this.pointed(x, y));
    canvas.addEventListener("pointerup", () => (this.grabbed = null));
    canvas.addEventListener("pointercancel", () => (this.grabbed = null));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.app.tooltip.hide(this));
  }

  toggle() {
    const { view } = this.app;
    if (view.isLive) view.pause();
    else view.goLive();
    this.app.announcer.say(view.isLive ? "live" : "paused");
  }

  slide() {
    const { view } = this.app;
    const value = Number(this.slider.value);
    if (value >= (view.history?.end ?? 0)) view.goLive();
    else view.scrubTo(view.lastOf(Math.max(value - 1, view.history.begin)));
  }

  export() {
    if (this.exportButton.getAttribute("aria-disabled") === "true") return;
    const { link } = this.app;
    if (!link.export(() => this.exportEnds("Export"))) {
      this.exportEnds("Export (no answer)", "The kernel does not answer.");
      return;
    }
    setAttribute(this.exportButton, "aria-disabled", true);
    setText(this.exportButton, "Exporting …");
    this.stopTimer = this.app.page.after(EXPORT_MS, () => {
      if (link.state === "live") this.exportEnds("Export (kernel is busy)", "The kernel is busy: the file comes when it has time.");
      else this.exportEnds("Export (no answer)", "The kernel does not answer.");
    });
  }

  exportEnds(label, said) {
    this.stopTimer?.();
    setAttribute(this.exportButton, "aria-disabled", false);
    setText(this.exportButton, label);
    if (said) this.app.announcer.say(said);
  }

  grab(event) {
    if (event.button !== 0) return;
    const { view } = this.app;
    this.grabbed = { x: event.clientX, y: event.clientY, right: view.window[1], offset: this.rows.offset };
    this.surface.canvas.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const { view } = this.app;
    const held = this.grabbed;
    if (!held || (Math.abs(event.clientX - held.x) <= 2 && Math.abs(event.clientY - held.y) <= 2)) return;
    this.pointer.hush();
    this.rows.scroll(held.offset - (event.clientY - held.y));
    view.scrubTo(held.right - (event.clientX - held.x) / view.scale);
  }

  pointed(x, y) {
    const { view } = this.app;
    if (!view.history || x < GUTTER) return { time: null, lines: null };
    const place = view.window[0] + (x - GUTTER) / view.scale;
    const ordinal = view.ordinalAt(place);
    const isKnown = place >= view.first && place <= view.end;
    return {
      time: isKnown ? view.timeAt(place) : null,
      lines: ordinal === null ? (isKnown ? this.idleLines(place) : null) : this.lines(ordinal, this.rows.at(y)),
    };
  }

  // Say what is known of a time in which no step ran.
  idleLines(time) {
    const { history } = this.app.view;
    if (!this.app.view.hasSteps(time)) return [clock(time), NO_STEPS];
    const next = history.ordinalAt(time);
    const isLost = next < history.end && history.at("gap", next);
    return [clock(time), isLost ? "nothing is known: steps were lost" : "no step ran"];
  }

  // The wheel moves sideways through time and zooms with control; up and down belongs to the page unless the focus is here.
  wheel(event) {
    const { view } = this.app;
    if (event.ctrlKey || event.metaKey) {
      const part = (this.surface.place(event)[0] - GUTTER) / view.width;
      view.zoom(Math.exp(-event.deltaY / 300), clamp(part, 0, 1));
    } else {
      const isFocused = this.app.page.document.activeElement === this.surface.canvas;
      const way = event.deltaX || (event.shiftKey || isFocused ? event.deltaY : 0);
      if (!way) return;
      this.scrub(way / view.scale);
    }
    event.preventDefault();
  }

  scrub(steps) {
    const { view } = this.app;
    if (view.isLive && steps > 0) return;
    view.moveBy(steps);
    if (view.right >= view.end && steps > 0) view.goLive();
  }

  key(event) {
    const { view } = this.app;
    const { history } = view;
    if (!history || event.altKey || event.ctrlKey || event.metaKey) return;
    const [first, last] = view.range;
    const at = view.cursor ?? Math.min(last, history.end);
    const page = Math.max(1, last - first);
    const far = event.shiftKey ? 10 : 1;
    const actions = {
      ArrowLeft: () => view.setCursor(at - far),
      ArrowRight: () => view.setCursor(at + far),
      ArrowUp: () => this.moveRow(-1),
      ArrowDown: () => this.moveRow(1),
      PageUp: () => view.setCursor(at - page),
      PageDown: () => view.setCursor(at + page),
      Home: () => view.setCursor(history.begin),
      End: () => view.goLive(),
      "+": () => view.zoom(1.5),
      "=": () => view.zoom(1.5),
      "-": () => view.zoom(1 / 1.5),
      " ": () => this.toggle(),
      Escape: () => this.forgetCursor(),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    this.pointer.hush();
    actions[event.key]();
    event.preventDefault();
    event.stopPropagation();
    this.draw();
    this.showCursor();
  }

  moveRow(by) {
    const { numbers } = this.rows;
    if (!numbers.length) return;
    const { view } = this.app;
    if (view.cursor === null) view.setCursor(view.history.end - 1);
    const index = numbers.indexOf(this.row);
    this.row = numbers[clamp(index < 0 ? (by > 0 ? 0 : numbers.length - 1) : index + by, 0, numbers.length - 1)];
    this.rows.show(this.row);
  }

  forgetCursor() {
    this.app.view.cursor = null;
    this.row = null;
    this.app.view.changed();
  }

  showCursor() {
    const { view, tooltip, announcer } = this.app;
    if (view.cursor === null) {
      tooltip.hide(this);
      return;
    }
    const lines = this.lines(view.cursor, this.row ?? undefined);
    const row = this.rows.index.get(this.row);
    const y = row === undefined ? AXIS : this.rows.y(row) + this.rows.height;
    const middle = (this.x(view.placeOf(view.cursor)) + this.x(view.endOf(view.cursor))) / 2;
    tooltip.show(this, ...this.surface.inWindow(middle, y), lines);
    announcer.say(lines.join(", "));
  }

  x(place) {
    const { view } = this.app;
    return GUTTER + (place - view.window[0]) * view.scale;
  }

  drawCross() {
    const { view, cross } = this.app;
    const place = cross === null || !view.history ? null : view.placeAt(cross);
    this.surface.cross(place === null ? null : this.x(place), GUTTER);
  }

  // Return the description of a step, and of a request's part in it.
  lines(ordinal, number) {
    const { history } = this.app.view;
    const lines = stepLines(history, ordinal);
    return number === undefined ? lines : [...lines, ...this.requestLines(history, ordinal, number)];
  }

  requestLines(history, ordinal, number) {
    const request = this.app.store.request(this.app.view.rank, number);
    const entry = history.entriesAt(ordinal).find((candidate) => candidate.number === number);
    const did = [];
    if (entry) did.push(`${["decode", "prefill", "computed again"][entry.kind]}: ${count(entry.tokens, "token")}`);
    if (entry?.hit > 0) did.push(`${integer(entry.hit)} found in the prefix cache`);
    if (entry?.kind === RECOMPUTE && entry.hit >= 0) did.push("resumed");
    history.visitEvents(ordinal, ordinal + 1, (_, who, kind) => {
      if (who !== number) return;
      if (kind === PREEMPTED) did.push("preempted before this step");
      if (kind === FINISHED) did.push("ended after this step");
    });
    return [request ? nameOf(request) : `#${number}`, ...(did.length ? did : ["nothing in this step"])];
  }

  draw() {
    const { view, store, theme } = this.app;
    this.surface.fit();
    const { width, height } = this.surface;
    view.width = Math.max(1, width - GUTTER);
    const context = this.surface.clear();
    const { history } = view;
    this.drawTools(history);
    if (!history || width < GUTTER + 20) return;
    this.rows.fill(history, ...view.range, height - AXIS);
    // The height never shrinks: the parts below would move up and down while requests come and go. Nor does it grow while
    // the pointer is on the table below: its rows would move away from the pointer.
    if (!this.app.requests.isHeld) this.wanted = Math.max(this.wanted, this.rows.wantedHeight);
    this.surface.need(this.wanted);
    if (view.cursor !== null) {
      context.fillStyle = theme.accent;
      context.globalAlpha = 0.22;
      const left = this.x(view.placeOf(view.cursor));
      context.fillRect(left, 0, Math.max(2, this.x(view.endOf(view.cursor)) - left), height);
      const row = this.rows.index.get(this.row);
      if (row !== undefined) context.fillRect(GUTTER, this.rows.y(row), width - GUTTER, this.rows.height);
      context.globalAlpha = 1;
    }
    new Painter(context, view, this.rows, this.surface, theme).paint();
    this.drawCross();
    this.pointer.tell();
    const isEmpty = history.end === history.begin;
    const word = view.window[1] <= view.begin && view.first < view.begin ? NO_STEPS : isEmpty && store.engine ? "no steps yet" : "";
    context.fillStyle = theme.muted;
    context.font = `12px ${theme.font}`;
    context.textAlign = "center";
    context.fillText(word, width / 2, height / 2);
  }

  drawTools(history) {
    const { view } = this.app;
    const label = view.isLive ? "Pause" : "Go on live";
    setText(this.pauseButton, view.isLive ? "❚❚ Pause" : "▶ Live");
    setAttribute(this.pauseButton, "aria-label", label);
    setAttribute(this.pauseButton, "title", label);
    setAttribute(this.node, "data-live", view.isLive);
    const axis = view.isTime ? "Show steps, each as wide as the others" : "Show time";
    setText(this.axisButton, view.isTime ? "Time" : "Steps");
    setAttribute(this.axisButton, "aria-label", axis);
    setAttribute(this.axisButton, "title", axis);
    const [begin, end] = history ? [history.begin, history.end] : [0, 1];
    setAttribute(this.slider, "min", begin);
    setAttribute(this.slider, "max", Math.max(end, begin + 1));
    const shown = history && end > begin ? view.range[1] : 0;
    const value = String(view.isLive ? Math.max(end, begin + 1) : shown);
    if (this.slider.value !== value) this.slider.value = value;
    let text = "";
    if (view.time !== null && !view.hasSteps(view.time)) text = `no steps of ${clock(view.time, 1)}`;
    else if (history && end > begin) {
      const last = clamp(shown - 1, begin, end - 1);
      text = `step ${integer(history.at("step", last))} · ${clock(history.at("time", last), 1)}`;
    }
    setText(this.place, text);
    setAttribute(this.slider, "aria-valuetext", text || "no steps");
  }
}
