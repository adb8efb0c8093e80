// The view chooses the engine core and the time that all panels show; the widget keeps it.

const STEP_SCALES = [0.05, 40]; // the least and the most pixels of a step
const LIVE_SCALE = 6;
const WINDOWS = [0.02, 3600]; // the least and the most seconds of the window
const LIVE_SECONDS = [2, 30]; // of the window, until someone zooms: all that is known, within these
const LEAST_SECONDS = 1e-5; // seconds that a step without an outcome takes at least
const KEEP_MS = 400;

// Places on the axis are seconds of the clock (`axis` is "time") or ordinals of steps ("steps"); both may have fractions.
export class View {
  constructor(page, model, store, changed) {
    this.page = page;
    this.model = model;
    this.store = store;
    this.changed = changed;
    this.rank = null;
    this.axis = "time"; // the chosen one
    this.isBeforeSteps = false; // a time was gone to that only the axis of seconds has: its steps are not kept
    this.isLive = true;
    this.right = 0; // the place at the right edge, where it is not live
    this.stepScale = LIVE_SCALE;
    this.chosenSeconds = null; // seconds of the window, where someone has zoomed
    this.width = 600; // the width of the timeline's columns, in pixels
    this.cursor = null; // the ordinal at the keyboard's cursor
    this.pausedTime = null; // the time at the right edge: ordinals begin again at 0 with each reset frame
    this.isSeeking = false; // the step at the right edge has not come yet
    this.keptSince = null; // since when the figures are kept that are shown above the steps; null where none are
    this.stopKeeping = null;
    const kept = model.get("view") ?? {};
    if (kept.axis === "steps") this.axis = "steps";
    if (Number.isFinite(kept.scale)) this.stepScale = clamp(kept.scale, ...STEP_SCALES);
    if (Number.isFinite(kept.seconds)) this.chosenSeconds = clamp(kept.seconds, ...WINDOWS);
    if (Number.isInteger(kept.rank)) this.rank = kept.rank;
    if (Number.isFinite(kept.paused_at)) {
      this.isLive = false;
      this.pausedTime = kept.paused_at;
    }
  }

  get current() {
    return this.store.ranks.get(this.rank);
  }

  get history() {
    return this.current?.history;
  }

  get isTime() {
    return this.axis === "time" || this.isBeforeSteps;
  }

  // Return the seconds of the window.
  get seconds() {
    return this.chosenSeconds ?? clamp(this.end - this.begin, ...LIVE_SECONDS);
  }

  get scale() {
    return this.isTime ? this.width / this.seconds : this.stepScale;
  }

  get span() {
    return this.isTime ? this.seconds : this.width / this.stepScale;
  }

  get begin() {
    const { history } = this;
    if (!history) return 0;
    if (!this.isTime) return history.begin;
    return history.end > history.begin ? history.at("time", history.begin) : (this.store.time ?? 0);
  }

  // Return the first place that can be gone to: figures are kept of times whose steps are not.
  get first() {
    return this.isTime && this.keptSince !== null ? Math.min(this.begin, this.keptSince) : this.begin;
  }

  get end() {
    const { history } = this;
    if (!history) return 0;
    if (!this.isTime) return history.end;
    if (history.end === history.begin) return this.store.time ?? 0;
    return Math.max(this.store.time ?? 0, this.lastOf(history.end - 1));
  }

  // Return [from, to) in places; there may be nothing before `begin`.
  get window() {
    const to = this.isLive ? this.end : this.right;
    return [to - this.span, to];
  }

  // Return [first, after the last) of the ordinals that have a part in the window.
  get range() {
    const { history } = this;
    const [from, to] = this.window;
    if (!this.isTime) return [Math.max(history.begin, Math.floor(from)), Math.min(history.end, Math.ceil(to))];
    return [Math.max(history.begin, history.ordinalAt(from) - 1), history.ordinalAt(to)];
  }

  // Return where a step begins, and where it ends.
  placeOf(ordinal) {
    return this.isTime ? this.history.at("time", ordinal) : ordinal;
  }

  endOf(ordinal) {
    return this.isTime ? this.history.until(ordinal) : ordinal + 1;
  }

  // Return the place at whose left all of a step is, also of one that has no outcome yet.
  lastOf(ordinal) {
    return this.isTime ? Math.max(this.endOf(ordinal), this.placeOf(ordinal) + LEAST_SECONDS) : ordinal + 1;
  }

  // Find the step at a place; null where there is none.
  ordinalAt(place) {
    const { history } = this;
    if (!history || history.end === history.begin) return null;
    if (!this.isTime) {
      const ordinal = Math.floor(place);
      return ordinal >= history.begin && ordinal < history.end ? ordinal : null;
    }
    const next = history.ordinalAt(place);
    const ordinal = next < history.end && history.at("time", next) === place ? next : next - 1;
    return ordinal >= history.begin && place < history.until(ordinal) ? ordinal : null;
  }

  // Return the place of a time; null where it is not on the axis.
  placeAt(time) {
    if (this.isTime || !this.history) return time;
    const { history } = this;
    if (history.end === history.begin) return null;
    const next = history.ordinalAt(time);
    const ordinal = next < history.end && history.at("time", next) === time ? next : next - 1;
    if (ordinal < history.begin) return null;
    const start = history.at("time", ordinal);
    return ordinal + clamp((time - start) / Math.max(1e-9, history.until(ordinal) - start), 0, 1);
  }

  // Return the time of a place.
  timeAt(place) {
    const { history } = this;
    if (this.isTime || !history || history.end === history.begin) return place;
    const ordinal = clamp(Math.floor(place), history.begin, history.end - 1);
    const start = history.at("time", ordinal);
    return start + clamp(place - ordinal, 0, 1) * (history.until(ordinal) - start);
  }

  // Return whether the steps of a time are kept, as far as any ran then.
  hasSteps(time) {
    const { history } = this;
    return Boolean(history) && history.end > history.begin && time >= history.at("time", history.begin);
  }

  // Return the time that everything shows; null while it is live.
  get time() {
    if (this.isLive) return null;
    return this.cursor === null || !this.history ? this.pausedTime : this.history.until(this.cursor);
  }

  // After a frame: steps have come and gone.
  follow(isReset) {
    const ranks = this.store.rankNumbers;
    if (!this.store.ranks.has(this.rank) && ranks.length) {
      this.rank = ranks[0];
      this.cursor = null;
      this.isSeeking = !this.isLive;
    }
    const { history } = this;
    if (!history) return;
    if (isReset) {
      this.cursor = null;
      this.isSeeking = !this.isLive;
    }
    if (this.isSeeking) {
      this.seek();
      if (this.isForgotten) this.goLive();
    }
    if (!this.isLive) this.right = this.limited(this.right);
    if (this.cursor !== null && this.cursor < history.begin) this.cursor = null;
  }

  // Return whether nothing is known of the time at which it was paused: one of the host's history is not, once the page has
  // been loaded again. A saved state, which has no number, does not tell: it has the latest steps alone.
  get isForgotten() {
    const { store, pausedTime } = this;
    const isKnown = this.hasSteps(pausedTime) || this.keptSince !== null || store.samples.at(pausedTime) !== null;
    return !this.isSeeking && store.seq !== null && !isKnown;
  }

  // Go back to the time at which it was paused; a long history comes in several frames.
  seek() {
    const { history } = this;
    const ordinal = history.ordinalAt(this.pausedTime);
    this.isSeeking = ordinal === history.end;
    this.right = this.limited(this.isTime ? this.pausedTime : ordinal + 1);
  }

  limited(right) {
    const { first, end } = this;
    return clamp(right, Math.min(end, first + Math.min(this.span, this.isTime ? 0.001 : 1)), end);
  }

  choose(rank) {
    if (rank === this.rank) return;
    this.rank = rank;
    this.cursor = null;
    if (!this.isLive) this.seek();
    this.keep();
  }

  // Take the other axis; what is paused stays at its time.
  measure(axis) {
    if (axis === this.axis && !this.isBeforeSteps) return;
    const last = this.history ? this.range[1] - 1 : -1;
    this.axis = axis;
    this.isBeforeSteps = false;
    if (!this.isLive && this.history?.end > this.history?.begin) this.moveToStep(Math.max(last, this.history.begin));
    this.keep();
  }

  pause() {
    if (!this.isLive) return;
    this.moveTo(this.end);
  }

  goLive() {
    this.isLive = true;
    this.isBeforeSteps = false;
    this.isSeeking = false;
    this.pausedTime = null;
    this.cursor = null;
    this.keep();
  }

  moveTo(right) {
    const { history } = this;
    if (!history) return;
    // What is paused keeps its window, whatever comes.
    if (this.isTime) this.chosenSeconds ??= this.seconds;
    this.isLive = false;
    this.isSeeking = false;
    this.right = this.limited(right);
    if (this.isTime) this.pausedTime = this.right;
    else {
      const last = clamp(Math.ceil(this.right) - 1, history.begin, Math.max(history.end - 1, 0));
      this.pausedTime = history.end > history.begin ? history.at("time", last) : (this.store.time ?? 0);
    }
    this.keep();
  }

  // Go to a place with all that is shown: the keyboard's cursor, whose time would be shown, does not stay behind.
  scrubTo(right) {
    this.cursor = null;
    this.moveTo(right);
  }

  // Let a step be the last one in sight.
  moveToStep(ordinal) {
    this.moveTo(this.lastOf(ordinal));
  }

  // Go to a time. One whose steps are not kept has a place on the axis of seconds alone, which is left again after it.
  moveToTime(time) {
    if (!this.history) return;
    this.isBeforeSteps = !this.hasSteps(time);
    if (this.isTime) this.scrubTo(time);
    else this.scrubTo(this.lastOf(Math.max(this.history.begin, this.history.ordinalAt(time) - 1)));
  }

  // Figures are shown that are kept since a time (null: none are). Where nothing is kept of the moment any more, it moves on.
  reachBackTo(time) {
    this.keptSince = time;
    if (this.isLive || !this.history || this.hasSteps(this.pausedTime)) return;
    if (time === null) this.goLive();
    else this.moveToTime(Math.max(time, this.pausedTime));
  }

  moveBy(places) {
    this.scrubTo(this.window[1] + places);
  }

  // Zoom so that the place at `share` of the width stays where it is.
  zoom(factor, share = 1) {
    const [from, to] = this.window;
    const fixed = from + share * (to - from);
    if (this.isTime) this.chosenSeconds = clamp(this.seconds / factor, ...WINDOWS);
    else this.stepScale = clamp(this.stepScale * factor, ...STEP_SCALES);
    if (!this.isLive) this.moveTo(fixed + (1 - share) * this.span);
    this.keep();
  }

  zoomToAll() {
    const { begin, end } = this;
    if (this.isTime) this.chosenSeconds = clamp(end - begin, ...WINDOWS);
    else this.stepScale = clamp(this.width / Math.max(end - begin, 1), ...STEP_SCALES);
    if (!this.isLive) this.moveTo(end);
    this.keep();
  }

  // Put the cursor on a step and bring it into the window.
  setCursor(ordinal) {
    if (!this.history || this.history.end === this.history.begin) return;
    this.pause();
    this.cursor = clamp(ordinal, this.history.begin, this.history.end - 1);
    const [from, to] = this.window;
    if (this.placeOf(this.cursor) < from) this.moveTo(this.placeOf(this.cursor) + this.span);
    else if (this.lastOf(this.cursor) > to) this.moveToStep(this.cursor);
    this.keep();
  }

  keep() {
    this.changed();
    this.stopKeeping?.();
    this.stopKeeping = this.page.after(KEEP_MS, () => {
      const { rank, axis, chosenSeconds: seconds, stepScale: scale, pausedTime } = this;
      this.model.set("view", { rank, axis, seconds, scale, paused_at: pausedTime });
      this.model.save_changes();
    });
  }
}

export function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}
