// The page in which a dashboard stands. It can be put into another one, so all that belongs to a page, and not to an element,
// is made here, in the window of the root element: there it is made again after a move.

export class Page {
  constructor(root) {
    this.root = root;
    this.attached = new Set();
  }

  get document() {
    return this.root.ownerDocument;
  }

  get window() {
    return this.document.defaultView;
  }

  // Call `attach(window)` now, and again after each move; it returns the function that undoes what it did. Return the
  // function that ends it.
  attach(attach) {
    const entry = { attach, detach: attach(this.window) };
    this.attached.add(entry);
    return () => {
      if (this.attached.delete(entry)) entry.detach();
    };
  }

  // Call `callback` once, later; what is returned prevents that.
  after(milliseconds, callback) {
    const due = performance.now() + milliseconds;
    const end = this.attach((window) => {
      const fire = () => {
        end();
        callback();
      };
      const timer = window.setTimeout(fire, Math.max(0, due - performance.now()));
      return () => window.clearTimeout(timer);
    });
    return end;
  }

  every(milliseconds, callback) {
    return this.attach((window) => {
      const timer = window.setInterval(callback, milliseconds);
      return () => window.clearInterval(timer);
    });
  }

  // Call `callback` once, with the next frame of the screen.
  nextFrame(callback) {
    const end = this.attach((window) => {
      const fire = () => {
        end();
        callback();
      };
      const frame = window.requestAnimationFrame(fire);
      return () => window.cancelAnimationFrame(frame);
    });
    return end;
  }

  // Call `callback` when an element has another size, and once at the beginning.
  watchSize(node, callback) {
    return this.attach((window) => {
      const observer = new window.ResizeObserver(callback);
      observer.observe(node);
      return () => observer.disconnect();
    });
  }

  // Put the root into an element, of this page or another.
  moveTo(parent) {
    this.detachAll();
    parent.append(this.root);
    for (const entry of [...this.attached]) entry.detach = entry.attach(this.window);
  }

  detachAll() {
    for (const { detach } of this.attached) detach();
  }

  destroy() {
    this.detachAll();
    this.attached.clear();
  }
}
