// The view chooses the engine core and the steps that all panels with steps show; the widget keeps it.

const SCALES = [0.05, 40]; // the least and the most pixels of a step
const LIVE_SCALE = 6;
const KEEP_MS = 400;

export class View {
  constructor(model, store, changed) {
    this.model = model;
    this.store = store;
    this.changed = changed;
    this.rank = null;
    this.isLive = true;
    this.right = 0; // the ordinal after the last one shown, where it is not live; may have a fraction
    this.scale = LIVE_SCALE;
    this.width = 600; // the width of the timeline's columns, in pixels
    this.cursor = null; // the ordinal at the keyboard's cursor
    this.pausedTime = null; // the time of the step at the right edge: ordinals begin again at 0 with each reset frame
    this.isSeeking = false; // the step at the right edge has not come yet
    this.timer = 0;
    const kept = model.get("view") ?? {};
    if (Number.isFinite(kept.scale)) this.scale = clamp(kept.scale, ...SCALES);
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

  get span() {
    return this.width / this.scale;
  }

  // Return [from, to) in ordinals, with fractions; there may be none before `history.begin`.
  get window() {
    const to = this.isLive ? (this.history?.end ?? 0) : this.right;
    return [to - this.span, to];
  }

  // Return the time at the right edge; null while it is live.
  get time() {
    return this.isLive ? null : this.pausedTime;
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
    if (this.isSeeking) this.seek();
    if (!this.isLive) this.right = this.limited(this.right);
    if (this.cursor !== null && this.cursor < history.begin) this.cursor = null;
  }

  // Go back to the time at which it was paused; a long history comes in several frames.
  seek() {
    const { history } = this;
    const ordinal = history.ordinalAt(this.pausedTime);
    this.isSeeking = ordinal === history.end;
    this.right = this.limited(ordinal + 1);
  }

  limited(right) {
    const { begin, end } = this.history;
    return clamp(right, Math.min(end, begin + Math.min(this.span, 1)), end);
  }

  choose(rank) {
    if (rank === this.rank) return;
    this.rank = rank;
    this.cursor = null;
    if (!this.isLive) this.seek();
    this.keep();
  }

  pause() {
    if (!this.isLive) return;
    this.moveTo(this.history?.end ?? 0);
  }

  goLive() {
    this.isLive = true;
    this.isSeeking = false;
    this.pausedTime = null;
    this.cursor = null;
    this.keep();
  }

  moveTo(right) {
    if (!this.history) return;
    this.isLive = false;
    this.isSeeking = false;
    this.right = this.limited(right);
    const last = clamp(Math.ceil(this.right) - 1, this.history.begin, Math.max(this.history.end - 1, 0));
    this.pausedTime = this.history.end > this.history.begin ? this.history.at("time", last) : (this.store.time ?? 0);
    this.keep();
  }

  moveBy(steps) {
    this.moveTo(this.window[1] + steps);
  }

  // Zoom so that the ordinal at `share` of the width stays where it is.
  zoom(factor, share = 1) {
    const [from, to] = this.window;
    const fixed = from + share * (to - from);
    this.scale = clamp(this.scale * factor, ...SCALES);
    if (!this.isLive) this.moveTo(fixed + (1 - share) * this.span);
    this.keep();
  }

  zoomToAll() {
    const { begin, end } = this.history ?? { begin: 0, end: 1 };
    this.scale = clamp(this.width / Math.max(end - begin, 1), ...SCALES);
    if (!this.isLive) this.moveTo(end);
    this.keep();
  }

  // Put the cursor on a step and bring it into the window.
  setCursor(ordinal) {
    if (!this.history || this.history.end === this.history.begin) return;
    this.pause();
    this.cursor = clamp(ordinal, this.history.begin, this.history.end - 1);
    const [from, to] = this.window;
    if (this.cursor < from) this.moveTo(this.cursor + this.span);
    else if (this.cursor + 1 > to) this.moveTo(this.cursor + 1);
    this.keep();
  }

  keep() {
    this.changed();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.model.set("view", { rank: this.rank, scale: this.scale, paused_at: this.pausedTime });
      this.model.save_changes();
    }, KEEP_MS);
  }

  destroy() {
    clearTimeout(this.timer);
  }
}

export function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}
