// A window of its own for a dashboard, which can be watched on another screen while the notebook goes on. The script stays the
// notebook's, and so does the line to the kernel.

import { button, element, keepKeys, setAttribute, setText } from "./dom.js";
import { Page } from "./page.js";
import { Theme } from "./theme.js";

const LEAST_WIDTH = 960;
const LEAST_WINDOW_HEIGHT = 640;
const BLOCKED = "The browser has blocked the window: allow pop-ups for this page.";
const OUT = ["Pop out into a window of its own", "Pop out"];
const BACK = ["Bring back into the notebook", "Bring back"];

export class Popout {
  constructor(app, home) {
    this.app = app;
    this.home = home; // the element of the notebook in which the dashboard stands otherwise
    this.opened = null; // its own window
    this.away = null; // what stands in its place meanwhile
    this.button = button(...OUT, () => (this.opened ? this.bringBack(true) : this.open()));
    this.said = element("span", { class: "nbe-blocked" });
    this.said.hidden = true;
  }

  get isOut() {
    return this.opened !== null;
  }

  open() {
    const { app } = this;
    const { width, height } = app.root.getBoundingClientRect();
    const size = [Math.max(LEAST_WIDTH, Math.round(width)), Math.max(LEAST_WINDOW_HEIGHT, Math.round(height))];
    const opened = app.page.window.open("", "", `popup,width=${size[0]},height=${size[1]}`);
    this.say(opened && !opened.closed ? "" : BLOCKED);
    if (this.said.textContent) return;
    this.opened = opened;
    const { document } = opened;
    const name = app.store.engine?.name;
    document.title = name ? `Dashboard of engine ${name}` : "Engine dashboard";
    document.documentElement.lang = "en";
    document.body.className = "nbe-window";
    const styles = stylesOf(this.home);
    document.head.append(...styles.map((style) => document.importNode(style, true)));
    this.leavePlace(styles);
    app.moveTo(document.body);
    // Its person has closed it, or loaded it again, which leaves nothing in it.
    opened.addEventListener("pagehide", () => this.bringBack(false));
    this.showButton(BACK);
    this.button.focus();
  }

  // Leave word in the notebook, and follow its theme from there.
  leavePlace(styles) {
    const back = button(...BACK, () => this.bringBack(true));
    const text = element("span", { role: "status" }, "The dashboard is shown in its own window.");
    this.away = element("div", { class: "nbe-away", role: "region", "aria-label": "Engine dashboard" }, text, back);
    keepKeys(this.away);
    this.home.append(this.away);
    this.notebook = new Page(this.away);
    const names = new Set(styles.flatMap((style) => style.textContent.match(/--jp-[\w-]+/g) ?? []));
    new Theme(this.notebook, () => this.dress(names));
    // The script ends with the notebook's page, so the window does, too.
    this.notebook.attach((window) => {
      const leave = () => this.bringBack(false);
      window.addEventListener("pagehide", leave);
      return () => window.removeEventListener("pagehide", leave);
    });
  }

  // Give the window what the notebook's theme says.
  dress(names) {
    const theme = this.notebook.window.getComputedStyle(this.away);
    const { style } = this.opened.document.documentElement;
    for (const name of names) style.setProperty(name, theme.getPropertyValue(name));
    style.colorScheme = theme.colorScheme;
  }

  // `isAsked`: its person has pressed a button for that, and goes on there.
  bringBack(isAsked) {
    const { opened, away, home, app } = this;
    if (!opened) return;
    const { document } = this.notebook;
    const isFocusFree = document.activeElement === document.body || away.contains(document.activeElement);
    this.opened = null;
    this.notebook.destroy();
    away.remove();
    app.moveTo(home);
    opened.close();
    this.showButton(OUT);
    if (isAsked) document.defaultView.focus();
    if (isAsked || isFocusFree) this.button.focus({ preventScroll: !isAsked });
  }

  showButton([label, text]) {
    setText(this.button, text);
    setAttribute(this.button, "aria-label", label);
    setAttribute(this.button, "title", label);
  }

  say(text) {
    setText(this.said, text);
    this.said.hidden = !text;
    if (text) this.app.announcer.say(text);
  }

  destroy() {
    if (!this.opened) return;
    const { opened } = this;
    this.opened = null;
    this.notebook.destroy();
    this.away.remove();
    opened.close();
  }
}

// Return the style sheets of dashboards, from the page or the shadow tree in which an element stands.
function stylesOf(node) {
  const scopes = new Set([node.ownerDocument, node.getRootNode()]);
  const styles = [...scopes].flatMap((scope) => [...scope.querySelectorAll("style")]);
  return styles.filter((style) => style.textContent.includes(".nbe-dash"));
}
