// The dashboard of an engine: one widget's view, independent of all others on the page.

import { BlockMap } from "./blocks.js";
import { Announcer, Tooltip, element, keepKeys, setAttribute } from "./dom.js";
import { Header } from "./header.js";
import { Link } from "./link.js";
import { Page } from "./page.js";
import { Popout } from "./popout.js";
import { Requests } from "./requests.js";
import { Scheduler } from "./scheduler.js";
import { Store } from "./store.js";
import { Loop } from "./surface.js";
import { Theme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { Trends } from "./trends.js";
import { View, clamp } from "./view.js";
import { Waves } from "./waves.js";

const LEAST_HEIGHT = 240;
const MOST_HEIGHT = 4000;

class Dashboard {
  constructor(model, el) {
    this.model = model;
    this.root = element("div", { class: "nbe-dash", role: "region", "aria-label": "Engine dashboard" });
    keepKeys(this.root);
    el.append(this.root);
    this.page = new Page(this.root);
    this.store = new Store();
    this.tooltip = new Tooltip(this.page);
    this.announcer = new Announcer(this.page);
    this.loop = new Loop(this.page, (isVisible) => this.visibilityChanged(isVisible));
    this.view = new View(this.page, model, this.store, () => this.viewChanged());
    this.link = new Link(this.page, model, this.store, (what) => this.changed(what));
    this.popout = new Popout(this, el);
    this.cross = null; // the time at the crosshair that goes through all panels
    this.trends = new Trends(this);
    this.header = new Header(this);
    this.scheduler = new Scheduler(this);
    this.blocks = new BlockMap(this);
    this.timeline = new Timeline(this);
    this.waves = new Waves(this);
    this.requests = new Requests(this);
    this.panels = [this.trends, this.scheduler, this.blocks, this.timeline, this.waves, this.requests];
    this.parts = [this.header, ...this.panels];
    this.theme = new Theme(this.page, () => this.repaint());
    this.build();
    this.page.watchSize(this.root, () => this.loop.invalidate(...this.parts));
    this.heightChanged = () => this.takeHeight();
    model.on("change:height", this.heightChanged);
    this.takeHeight();
    this.link.start();
  }

  build() {
    this.rankChoice = element("select", { class: "nbe-select" });
    this.rankChoice.addEventListener("change", () => this.view.choose(Number(this.rankChoice.value)));
    this.rankLine = element("label", { class: "nbe-rank" }, "engine core ", this.rankChoice);
    this.rankLine.hidden = true;
    this.header.node.firstChild.append(this.rankLine);
    this.handle = element("div", {
      class: "nbe-handle",
      tabindex: "0",
      role: "separator",
      "aria-orientation": "horizontal",
      "aria-label": "Height of the dashboard",
      "aria-valuemin": LEAST_HEIGHT,
      "aria-valuemax": MOST_HEIGHT,
      title: "Drag to change the height; double click for the height of its content",
    });
    this.handle.addEventListener("pointerdown", (event) => this.dragHandle(event));
    this.handle.addEventListener("dblclick", () => this.setHeight(0, true));
    this.handle.addEventListener("keydown", (event) => this.handleKey(event));
    const body = element("div", { class: "nbe-body" }, ...this.panels.map((part) => part.node));
    this.root.append(this.header.node, body, this.handle, this.announcer.node);
  }

  changed(what) {
    if (what === "block") {
      this.blocks.tell();
      return;
    }
    if (what === "state") {
      this.loop.invalidate(this.header, this.requests);
      return;
    }
    this.view.follow(what === "reset");
    setAttribute(this.root, "data-ended", this.store.engine?.state === "ended");
    this.theme.refresh();
    this.fillRanks();
    this.loop.invalidate(...this.parts);
  }

  viewChanged() {
    this.loop.invalidate(...this.parts);
  }

  // Put the crosshair of all panels at a time, or take it away; lines lie above the canvases, which are not painted again.
  setCross(time) {
    if (time === this.cross) return;
    this.cross = time;
    for (const part of this.panels) part.drawCross?.();
  }

  // Put it into another page, or back.
  moveTo(parent) {
    this.page.moveTo(parent);
    this.takeHeight();
    this.repaint();
  }

  repaint() {
    this.blocks.repaint();
    this.trends.repaint();
    this.loop.invalidate(...this.parts);
  }

  visibilityChanged(isVisible) {
    this.link.setVisible(isVisible);
    if (!isVisible) return;
    this.theme.refresh();
    this.trends.seen();
  }

  fillRanks() {
    const numbers = this.store.rankNumbers;
    this.rankLine.hidden = numbers.length < 2;
    const key = numbers.join();
    if (this.rankKey !== key) {
      this.rankKey = key;
      this.rankChoice.replaceChildren(
        ...numbers.map((number) => {
          const option = element("option", {}, String(number));
          option.value = String(number);
          return option;
        }),
      );
    }
    const chosen = String(this.view.rank);
    if (this.rankChoice.value !== chosen) this.rankChoice.value = chosen;
  }

  takeHeight() {
    this.setHeight(this.model.get("height") || 0, false);
  }

  // 0: as high as the content. A window of its own has its own height.
  setHeight(height, isKept) {
    const limited = height && !this.popout.isOut ? this.limitedHeight(height) : 0;
    this.root.style.height = limited ? `${limited}px` : "";
    this.root.classList.toggle("nbe-fixed", limited > 0);
    setAttribute(this.handle, "aria-valuenow", limited || this.limitedHeight(this.root.getBoundingClientRect().height));
    setAttribute(this.handle, "aria-valuetext", limited ? `${limited} pixels` : "as high as its content");
    this.loop.invalidate(...this.parts);
    if (!isKept) return;
    this.model.set("height", limited);
    this.model.save_changes();
  }

  limitedHeight(height) {
    return Math.round(clamp(height, LEAST_HEIGHT, MOST_HEIGHT));
  }

  dragHandle(event) {
    event.preventDefault();
    this.handle.focus();
    const start = this.root.getBoundingClientRect().height - event.clientY;
    let height = null;
    const move = (moved) => {
      height = start + moved.clientY;
      this.setHeight(height, false);
    };
    const end = () => {
      this.handle.removeEventListener("pointermove", move);
      this.handle.removeEventListener("pointerup", end);
      this.handle.removeEventListener("pointercancel", end);
      if (height !== null) this.setHeight(height, true);
    };
    this.handle.setPointerCapture(event.pointerId);
    this.handle.addEventListener("pointermove", move);
    this.handle.addEventListener("pointerup", end);
    this.handle.addEventListener("pointercancel", end);
  }

  handleKey(event) {
    const step = { ArrowUp: -20, ArrowDown: 20 }[event.key];
    if (step === undefined && event.key !== "Home") return;
    event.preventDefault();
    event.stopPropagation();
    this.setHeight(step === undefined ? 0 : this.root.getBoundingClientRect().height + step, true);
  }

  destroy() {
    this.model.off("change:height", this.heightChanged);
    for (const part of [this.loop, this.link, this.page, this.popout]) part.destroy();
    this.root.remove();
  }
}

export default {
  render({ model, el }) {
    const dashboard = new Dashboard(model, el);
    return () => dashboard.destroy();
  },
};
