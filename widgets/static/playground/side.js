// One side: its engine, its settings and its answers, which grow while they are written.
import { button, element } from "./dom.js";
import { Controls } from "./controls.js";

export class Side {
  constructor(number, name, view) {
    this.view = view;
    this.number = number;
    this.texts = [];
    this.running = false;
    this.state = view.state.sides[number];
    const prefix = `${view.prefix}-${number}`;
    this.engine = element("select", "nbp-engine", { "aria-label": `engine of side ${name}` });
    this.engine.addEventListener("change", () => {
      this.state.engine = this.engine.value;
      view.changed();
    });
    this.raw = element("input", "", { type: "checkbox" });
    this.raw.checked = this.state.raw;
    this.raw.addEventListener("change", () => {
      this.state.raw = this.raw.checked;
      view.changed();
    });
    this.go = button("nbp-go", "▶ Run", () => (this.running ? this.stop() : this.run()));
    const head = element(
      "div",
      "nbp-row",
      {},
      element("h3", "nbp-name", {}, name),
      this.engine,
      element("label", "nbp-raw", { title: "complete the prompt as it is, without the chat template" }, this.raw, " raw"),
      this.go,
    );
    const controls = new Controls(view.model.get("controls"), this.state.settings, prefix, () => view.changed());
    const settings = element("details", "nbp-settings", { open: "" }, element("summary", "", {}, "settings"), controls.root);
    this.answers = element("div", "nbp-answers mathjax_ignore tex2jax_ignore", { "aria-label": `answers of side ${name}`, role: "group" });
    this.footer = element("span", "nbp-footer", { role: "status" });
    this.error = element("div", "nbp-error", { role: "alert" });
    const ask = (kind) => view.send({ kind, side: number, state: view.state });
    const foot = element(
      "div",
      "nbp-row",
      {},
      button("nbp-cell", "insert as cell", () => ask("cell")),
      button("nbp-python", "as Python", () => ask("python")),
      this.footer,
    );
    this.root = element("section", "nbp-side", { "aria-label": `side ${name}` }, head, settings, this.answers, this.error, foot);
    this.engines([]);
  }

  engines(names) {
    const known = this.state.engine && !names.includes(this.state.engine) ? [...names, this.state.engine] : names;
    const options = known.map((name) => element("option", "", { value: name }, name));
    this.engine.replaceChildren(element("option", "", { value: "" }, "the last engine"), ...options);
    this.engine.value = this.state.engine;
  }

  run() {
    this.view.send({ kind: "run", side: this.number, state: this.view.state });
  }

  stop() {
    this.view.send({ kind: "stop", side: this.number });
  }

  // Take what the kernel tells; pieces that do not follow what is here are asked for again.
  take({ running, start, texts, footer, error }) {
    const follows = start.every((at, index) => at === 0 || at === (this.texts[index] ?? "").length);
    if (!follows) {
      this.view.send({ kind: "hello" });
      return;
    }
    this.texts = texts.map((text, index) => (start[index] ? this.texts[index] + text : text));
    this.running = running;
    this.go.textContent = running ? "■ Stop" : "▶ Run";
    // A reader of the screen tells the line once it stays.
    this.footer.setAttribute("aria-live", running ? "off" : "polite");
    this.footer.textContent = footer;
    this.error.textContent = error;
    this.root.setAttribute("aria-busy", String(running));
    while (this.answers.children.length > this.texts.length) this.answers.lastChild.remove();
    while (this.answers.children.length < this.texts.length) this.answers.append(element("div", "nbp-answer", { tabindex: "0" }));
    this.texts.forEach((text, index) => {
      const place = this.answers.children[index];
      if (place.textContent !== text) place.textContent = text;
    });
  }
}
