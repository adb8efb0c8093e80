// The page's colours, resolved for painting on a canvas, and the page's darkness.

import { element } from "./dom.js";
import { MORE_CONTRAST, REQUESTS, ROLES } from "./palette.js";

// What the palette's colours depend on: whether it is dark, and whether the reader's system asks for more contrast.
const MEDIA = ["(prefers-color-scheme: dark)", "(prefers-contrast: more)", "(forced-colors: active)"];
// Themes with high contrast have lines as strong as text, and quiet text as strong as any.
const STRONG_LINE = 4.5;
const STRONG_QUIET = 0.9;

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
      const media = MEDIA.map((query) => window.matchMedia(query));
      for (const each of media) each.addEventListener("change", check);
      check();
      return () => {
        observer.disconnect();
        for (const each of media) each.removeEventListener("change", check);
      };
    });
  }

  // This is cheap enough to be called now and then.
  refresh() {
    const style = this.page.window.getComputedStyle(this.probe);
    const borders = ["Top", "Right", "Bottom", "Left"].map((side) => style[`border${side}Color`]);
    const values = [style.backgroundColor, style.color, ...borders];
    const key = values.join("|");
    if (key === this.key) return;
    this.key = key;
    const [ground, text, muted, line, accent, faint] = values;
    this.ground = this.channels(ground);
    this.isDark = !isLight(this.ground);
    const strength = (color) => contrast(this.channels(ground, color), this.ground);
    this.hasMoreContrast = strength(line) >= STRONG_LINE && strength(muted) >= STRONG_QUIET * strength(text);
    Object.assign(this, { groundColor: ground, text, muted, accent, faint });
    this.font = style.fontFamily;
    this.page.root.dataset.theme = this.isDark ? "dark" : "light";
    this.page.root.dataset.contrast = this.hasMoreContrast ? "more" : "usual";
    this.takePalette();
    this.changed();
  }

  // Take the palette's colours, or those that stand out more; the style sheet has them, too.
  takePalette() {
    const shown = (color) => (this.hasMoreContrast ? MORE_CONTRAST[color][Number(this.isDark)] : color);
    this.requests = REQUESTS.map(shown);
    this.roles = Object.fromEntries(Object.entries(ROLES).map(([name, color]) => [name, shown(color)]));
    const named = { ...this.roles, block: this.roles.free };
    this.requests.forEach((color, number) => (named[`request-${number}`] = color));
    for (const [name, color] of Object.entries(named)) {
      if (this.hasMoreContrast) this.page.root.style.setProperty(`--nbe-${name}`, color);
      else this.page.root.style.removeProperty(`--nbe-${name}`);
    }
  }

  // Return the colour of a request, by its number.
  request(number) {
    return this.requests[number % this.requests.length];
  }

  // Return black or white, whichever can be read on a colour.
  inkOn(color) {
    return isLight(this.channels(color)) ? "#000000" : "#ffffff";
  }

  // Return red, green and blue of colours in any notation, each painted over the one before.
  channels(...colors) {
    this.pixel.clearRect(0, 0, 1, 1);
    for (const color of colors) {
      this.pixel.fillStyle = color;
      this.pixel.fillRect(0, 0, 1, 1);
    }
    return [...this.pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  }

  // Return a colour over the ground, as a solid one.
  over(color, opacity) {
    const top = this.channels(color);
    return top.map((value, index) => Math.round(opacity * value + (1 - opacity) * this.ground[index]));
  }
}

export function isLight([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140;
}

// Return the contrast of two colours, from 1 to 21, as WCAG 2.1 defines it.
function contrast(...colors) {
  const [darker, lighter] = colors.map(luminance).sort((first, second) => first - second);
  return (lighter + 0.05) / (darker + 0.05);
}

function luminance(color) {
  const [red, green, blue] = color.map((value) => value / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

export function css([red, green, blue]) {
  return `rgb(${red}, ${green}, ${blue})`;
}
