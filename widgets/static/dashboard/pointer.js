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
