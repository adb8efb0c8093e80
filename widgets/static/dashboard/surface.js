// A canvas that fills its stage, as sharp as the screen is, and the loop that paints what has changed.

import { element } from "./dom.js";

export class Surface {
  // `resized` is called when there is another size to paint in. Asking for it each time would cost a layout.
  constructor(page, attributes, resized) {
    this.page = page;
    this.canvas = element("canvas", { class: "nbe-canvas", ...attributes });
    this.stage = element("div", { class: "nbe-stage" }, this.canvas);
    this.context = this.canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    this.ratio = 1;
    this.isStale = true;
    page.watchSize(this.stage, () => {
      this.isStale = true;
      resized();
    });
  }

  // Take the stage's size; true if it is another one, and all has to be painted.
  fit() {
    const ratio = Math.max(1, this.page.window.devicePixelRatio || 1);
    if (!this.isStale && ratio === this.ratio) return false;
    this.isStale = false;
    const width = Math.floor(this.stage.clientWidth);
    const height = Math.floor(this.stage.clientHeight);
    if (width === this.width && height === this.height && ratio === this.ratio) return false;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return true;
  }

  // Set the least height; where it changes, `resized` is called.
  need(height) {
    const wanted = `${height}px`;
    if (this.stage.style.minHeight !== wanted) this.stage.style.minHeight = wanted;
  }

  // Put the crosshair at a place between `left` and the right edge, or take it away.
  cross(x, left = 0) {
    const isIn = x !== null && x >= left && x <= this.width;
    if (!this.line) {
      if (!isIn) return;
      this.line = element("div", { class: "nbe-crosshair", "aria-hidden": "true" });
      this.stage.append(this.line);
    }
    this.line.hidden = !isIn;
    if (isIn) this.line.style.transform = `translateX(${Math.round(x)}px)`;
  }

  clear() {
    this.context.clearRect(0, 0, this.width, this.height);
    return this.context;
  }

  // Return the place of a pointer, in the canvas's units.
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  // Return the place of a point of the canvas in the window.
  inWindow(x, y) {
    const box = this.canvas.getBoundingClientRect();
    return [box.left + x, box.top + y];
  }
}

// A loop that paints parts of a dashboard when they have changed, at most once a frame of the screen, while they can be seen.
export class Loop {
  constructor(page, visibilityChanged) {
    this.page = page;
    this.dirty = new Set();
    this.isVisible = false;
    this.isAwaited = false; // a frame of the screen
    this.paint = () => {
      this.isAwaited = false;
      const parts = [...this.dirty];
      this.dirty.clear();
      for (const part of parts) part.draw();
    };
    const changed = () => {
      const isVisible = this.isInView && page.document.visibilityState !== "hidden";
      if (isVisible === this.isVisible) return;
      this.isVisible = isVisible;
      visibilityChanged(isVisible);
      this.request();
    };
    this.isInView = false;
    page.attach((window) => {
      const { document } = window;
      const observer = new window.IntersectionObserver((entries) => {
        this.isInView = entries[entries.length - 1].isIntersecting;
        changed();
      });
      observer.observe(page.root);
      document.addEventListener("visibilitychange", changed);
      changed();
      return () => {
        observer.disconnect();
        document.removeEventListener("visibilitychange", changed);
      };
    });
  }

  invalidate(...parts) {
    for (const part of parts) this.dirty.add(part);
    this.request();
  }

  request() {
    if (!this.isVisible || !this.dirty.size || this.isAwaited) return;
    this.isAwaited = true;
    this.page.nextFrame(this.paint);
  }

  destroy() {
    this.isVisible = false;
  }
}
