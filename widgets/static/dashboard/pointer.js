// The pointer and the keyboard's cursor over a panel, which say what is there.

import { clamp } from "./view.js";

// The pointer over a panel: it moves the crosshair of all panels, and says what is there as long as it stays.

export class Pointer {
  // `pointed(x, y)` has the place in the canvas and returns { time, lines }: the time there or null, what is said or null.
  constructor(app, surface, pointed) {
    this.app = app;
    this.surface = surface;
    this.pointed = pointed;
    this.at = null; // the pointer's place in the window
    const { canvas } = surface;
    canvas.addEventListener("pointermove", (event) => {
      this.at = [event.clientX, event.clientY];
      this.tell();
    });
    canvas.addEventListener("pointerleave", () => this.leave());
    // A canvas that is moved to another page loses the pointer without a word.
    app.page.attach(() => () => this.leave());
  }

  // Say what is there now: the panel may have moved on below the pointer.
  tell() {
    if (!this.at) return;
    const { app } = this;
    const [x, y] = this.at;
    const { time, lines } = this.pointed(...this.surface.place({ clientX: x, clientY: y }));
    app.setCross(time);
    if (lines) app.tooltip.show(this, x, y, lines);
    else app.tooltip.hide(this);
  }

  leave() {
    if (!this.at) return;
    this.at = null;
    this.app.tooltip.hide(this);
    this.app.setCross(null);
  }

  // Say nothing more until the pointer moves again.
  hush() {
    this.at = null;
    this.app.tooltip.hide(this);
  }
}

// The keyboard's cursor on a panel whose parts lie side by side: arrow keys move it from part to part.
export class KeyCursor {
  // `places()` has the middle of each part on the canvas, from left to right, of which the panel's pointer knows what is there;
  // `pressed(x)` is called with Enter. A panel whose parts have no time, so that the crosshair of all panels does not mark
  // them, marks them itself: `mark(x)` puts its line at a place, or takes it away (null).
  constructor(pointer, places, { pressed = null, mark = null }) {
    Object.assign(this, { pointer, places, pressed, mark });
    this.at = null; // the part's place in the row
    const { canvas } = pointer.surface;
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.forget());
  }

  key(event) {
    const places = this.places();
    if (!places.length || event.altKey || event.ctrlKey || event.metaKey) return;
    const far = Math.ceil(places.length / 10);
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.forget();
    else if (event.key === "Enter" && this.pressed && this.at !== null) this.pressed(places[this.at]);
    else if (Object.hasOwn(steps, event.key)) {
      const step = steps[event.key];
      const from = this.at ?? (step < 0 ? places.length : -1);
      this.at = clamp(from + step, 0, places.length - 1);
      this.pointer.hush();
      const lines = this.show();
      if (lines) this.pointer.app.announcer.say(lines.join(", "));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Show what is there, and return it.
  show() {
    const { app, surface } = this.pointer;
    const x = this.places()[this.at];
    const { time, lines } = x === undefined ? { time: null, lines: null } : this.pointer.pointed(x, 0);
    app.setCross(time);
    this.mark?.(lines ? x : null);
    if (lines) app.tooltip.show(this, ...surface.inWindow(x, surface.height), lines);
    else app.tooltip.hide(this);
    return lines;
  }

  // The panel has moved on below the cursor.
  tell() {
    if (this.at !== null && this.pointer.app.tooltip.owner === this) this.show();
  }

  forget() {
    if (this.at === null) return;
    this.at = null;
    this.pointer.app.tooltip.hide(this);
    this.pointer.app.setCross(null);
    this.mark?.(null);
  }
}
