// The page's colours, resolved for painting on a canvas, and the page's darkness.

import { element } from "./dom.js";

export class Theme {
  constructor(page, changed) {
    this.page = page;
    this.changed = changed;
    this.probe = element("i", { class: "nbe-probe", "aria-hidden": "true" });
    page.root.append(this.probe);
    this.pixel = element("canvas").getContext("2d", { willReadFrequently: true });
    this.key = "";
    const check = () => this.refresh();
    // A style sheet that is loaded after the attributes have changed is noticed by what it changes.
    this.probe.addEventListener("transitionend", check);
    page.attach((window) => {
      const { documentElement, body } = window.document;
      const observer = new window.MutationObserver(check);
      for (const node of [documentElement, body]) observer.observe(node, { attributes: true });
      const media = window.matchMedia("(prefers-color-scheme: dark)");
      media.addEventListener("change", check);
      check();
      return () => {
        observer.disconnect();
        media.removeEventListener("change", check);
      };
    });
  }

  // This is cheap enough to be called now and then.
  refresh() {
    const style = this.page.window.getComputedStyle(this.probe);
    const values = [style.backgroundColor, style.color, style.borderTopColor, style.borderRightColor, style.borderBottomColor];
    const key = values.join("|");
    if (key === this.key) return;
    this.key = key;
    const [ground, text, muted, line, accent] = values;
    this.ground = this.channels(ground);
    this.isDark = 0.3 * this.ground[0] + 0.59 * this.ground[1] + 0.11 * this.ground[2] < 128;
    Object.assign(this, { groundColor: ground, text, muted, line, accent });
    this.font = style.fontFamily;
    this.page.root.dataset.theme = this.isDark ? "dark" : "light";
    this.changed();
  }

  // Return red, green and blue of a colour in any notation.
  channels(color) {
    this.pixel.clearRect(0, 0, 1, 1);
    this.pixel.fillStyle = color;
    this.pixel.fillRect(0, 0, 1, 1);
    return [...this.pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  }

  // Return a colour over the ground, as a solid one.
  over(color, opacity) {
    const top = this.channels(color);
    return top.map((value, index) => Math.round(opacity * value + (1 - opacity) * this.ground[index]));
  }
}

export function css([red, green, blue]) {
  return `rgb(${red}, ${green}, ${blue})`;
}
