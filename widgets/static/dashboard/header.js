// The header: the engine's names, its state and its rates.

import { button, element, setAttribute, setText } from "./dom.js";
import { NOTHING, bytes, clock, duration, integer, perSecond, share } from "./format.js";

// The names of the button that lets a suspended engine go on, by its state.
const HELD = { asleep: "Wake", paused: "Resume" };

const TILES = [
  ["tokens in", "Prompt tokens computed in a second, without those found in the prefix cache"],
  ["tokens out", "Tokens generated in a second"],
  ["first token", "Median time to the first token, inside the engine"],
  ["between tokens", "Median time between tokens, inside the engine"],
  ["memory", "Memory of all workers together"],
  ["KV blocks in use", "Share of the blocks that requests hold"],
  ["prefix hits", "Share of the looked-up prompt tokens that were in the prefix cache, since the start"],
];

export class Header {
  constructor(app) {
    this.app = app;
    this.state = element("span", { class: "nbe-state" });
    this.name = element("span", { class: "nbe-name" });
    this.model = element("span", { class: "nbe-model" });
    this.topology = element("span", { class: "nbe-muted" });
    this.goOn = button("Let it go on", "", () => this.letGoOn());
    this.goOn.hidden = true;
    this.refusal = null; // the reason why the engine does not go on
    this.banner = element("div", { class: "nbe-banner", role: "note" });
    this.values = new Map();
    const tiles = TILES.map(([label, title]) => {
      const value = element("div", { class: "nbe-value" }, NOTHING);
      this.values.set(label, value);
      const name = element("div", { class: "nbe-label" }, label);
      return element("div", { class: "nbe-tile", role: "listitem", title }, name, value);
    });
    this.node = element(
      "header",
      { class: "nbe-header" },
      element("div", { class: "nbe-title" }, this.state, this.goOn, this.name, this.model, this.topology),
      element("div", { class: "nbe-tiles", role: "list" }, ...tiles),
      this.banner,
    );
  }

  draw() {
    const { engine, rates } = this.app.store;
    const infos = [...this.app.store.ranks.values()].map((rank) => rank.info);
    const total = (field) => infos.reduce((sum, info) => sum + info[field], 0);
    setText(this.state, engine ? engine.state : "…");
    setAttribute(this.state, "data-state", engine ? engine.state : "unknown");
    setText(this.name, engine?.name ?? "");
    setText(this.model, engine?.model ?? "");
    setText(this.topology, engine ? [engine.topology, engine.device, engine.dtype].filter(Boolean).join(" · ") : "");
    this.drawGoOn(engine);
    const blocks = total("num_blocks");
    this.set("tokens in", perSecond(rates?.tokens_in_per_second), "/s");
    this.set("tokens out", perSecond(rates?.tokens_out_per_second), "/s");
    this.set("first token", duration(rates?.time_to_first_token));
    this.set("between tokens", duration(rates?.inter_token_latency));
    this.set("memory", bytes(rates?.memory_bytes));
    this.set("KV blocks in use", share(blocks - total("num_free_blocks"), blocks), ` of ${integer(blocks)}`);
    this.set("prefix hits", share(total("prefix_cache_hits"), total("prefix_cache_queries")));
    this.drawBanner(engine);
  }

  drawGoOn(engine) {
    const word = this.app.link.state === "live" ? HELD[engine?.state] : undefined;
    if (!word) this.refusal = null;
    setText(this.goOn, word ?? "");
    setAttribute(this.goOn, "aria-label", `${word} the engine`);
    this.goOn.hidden = !word;
  }

  letGoOn() {
    const isSent = this.app.link.goOn((error) => {
      this.refusal = error;
      this.draw();
    });
    if (!isSent) this.refusal = "the kernel does not answer";
    this.draw();
  }

  set(label, value, unit = "") {
    const node = this.values.get(label);
    if (node.dataset.value === value + unit) return;
    node.dataset.value = value + unit;
    node.replaceChildren(value);
    if (unit && value !== NOTHING) node.append(element("small", {}, unit));
  }

  drawBanner(engine) {
    const { link, store } = this.app;
    const lines = [];
    if (link.state === "saved") {
      const saved = `saved state of ${new Date(store.time * 1000).toLocaleDateString()} ${clock(store.time, 0)}`;
      lines.push(`${saved}, ${link.isLate ? "no live engine" : "asking the kernel for more …"}`);
    } else if (link.state === "waiting") {
      lines.push(link.isLate ? "The kernel does not answer: nothing is known of the engine." : "waiting for the kernel …");
    } else if (link.state === "silent") lines.push(`The kernel does not answer. This is the state at ${clock(store.time, 0)}.`);
    if (engine?.note) lines.push(engine.note);
    if (this.refusal) lines.push(this.refusal);
    setText(this.banner, lines.join(" — "));
    this.banner.hidden = !lines.length;
  }
}
