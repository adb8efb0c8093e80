// The playground: a prompt with its variables, asked with two settings; widgets/playground/widget.py has the messages.
import { send } from "../common/send.js";
import { button, copy, element, keepKeys } from "./dom.js";
import { Examples } from "./examples.js";
import { Side } from "./side.js";

const READ_MS = 200;
const SAVE_MS = 400;
const NO_KERNEL = "The kernel does not answer: run the cell again.";
const NAMES = ["A", "B"];

let playgrounds = 0;

class View {
  constructor(model, el) {
    this.model = model;
    this.prefix = `nbp${++playgrounds}`;
    this.state = { examples: [], ...structuredClone(model.get("state")) };
    this.timers = {};
    this.variables = [];
    this.build(el);
    this.onMessage = (message) => this.receive(message);
    model.on("msg:custom", this.onMessage);
    model.get("answers").forEach((answer) => this.sides[answer.side]?.take({ ...answer, running: false }));
    this.send({ kind: "hello" });
  }

  build(el) {
    this.root = element("div", "nbp");
    keepKeys(this.root);
    this.root.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.runBoth();
    });
    this.name = element("input", "nbp-field", { type: "text", placeholder: "playground", "aria-label": "name of the prompt" });
    this.name.value = this.state.name;
    this.name.addEventListener("input", () => {
      this.state.name = this.name.value;
      this.changed();
    });
    const help = "{name} is a variable; lines that say system:, user: or assistant: begin messages. Ctrl+Enter runs both sides.";
    this.editor = element("textarea", "nbp-editor", { rows: 6, id: `${this.prefix}-text`, placeholder: help, spellcheck: "false" });
    this.editor.value = this.state.text;
    this.editor.addEventListener("input", () => {
      this.state.text = this.editor.value;
      this.changed();
      this.later("read", READ_MS, () => this.send({ kind: "read", text: this.state.text }));
    });
    this.complaint = element("div", "nbp-error", { role: "alert" });
    this.fields = element("div", "nbp-variables");
    this.examples = new Examples(this.state.examples, () => this.changed());
    this.notice = element("div", "nbp-notice", { role: "status" });
    this.code = element("div", "nbp-code");
    this.code.hidden = true;
    this.sides = NAMES.map((name, number) => new Side(number, name, this));
    const head = element(
      "div",
      "nbp-row",
      {},
      element("label", "nbp-label", { for: `${this.prefix}-text` }, "prompt"),
      this.name,
      button("nbp-keep", "keep", () => this.send({ kind: "keep", state: this.state }), { title: "as %%prompt does" }),
      button("nbp-both", "▶ Run both", () => this.runBoth(), { title: "Ctrl+Enter" }),
    );
    const sides = element("div", "nbp-sides", {}, ...this.sides.map((side) => side.root));
    this.root.append(head, this.editor, this.complaint, this.fields, this.examples.root, this.notice, sides, this.code);
    el.append(this.root);
  }

  send(content) {
    if (!send(this.model, content)) this.tell(NO_KERNEL, true);
  }

  later(name, delay, action) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(action, delay);
  }

  // What is entered is kept with the widget, so that a page that is loaded again has it.
  changed() {
    this.later("save", SAVE_MS, () => this.save());
  }

  save() {
    this.model.set("state", structuredClone(this.state));
    this.model.save_changes();
  }

  runBoth() {
    for (const side of this.sides) if (!side.running) side.run();
  }

  receive(message) {
    if (message.kind === "reset") {
      this.read(message);
      for (const side of this.sides) side.engines(message.engines);
      for (const answer of message.sides) this.sides[answer.side].take(answer);
    } else if (message.kind === "read") this.read(message);
    else if (message.kind === "side") this.sides[message.side].take(message);
    else if (message.kind === "code") this.show(message);
    else if (message.kind === "notice") this.tell(message.text, message.error);
  }

  tell(text, isError) {
    this.notice.textContent = text;
    this.notice.classList.toggle("nbp-error", isError);
  }

  // Show a field for each variable; those that stay keep the cursor.
  read({ variables, error }) {
    this.complaint.textContent = error;
    if (error || variables.join() === this.variables.join()) return;
    this.variables = variables;
    const old = new Map([...this.fields.children].map((row) => [row.dataset.name, row]));
    this.fields.replaceChildren(...variables.map((name) => old.get(name) ?? this.field(name)));
  }

  field(name) {
    const id = `${this.prefix}-value-${name}`;
    const input = element("textarea", "nbp-field", { id, rows: 1 });
    input.value = this.state.values[name] ?? "";
    this.state.values[name] = input.value;
    input.addEventListener("input", () => {
      this.state.values[name] = input.value;
      this.changed();
    });
    return element("div", "nbp-variable", { "data-name": name }, element("label", "nbp-flag", { for: id }, name), input);
  }

  async show({ what, text, note }) {
    const isCopied = await copy(text);
    const title = what === "cell" ? "as a cell" : "as Python";
    const words = isCopied ? note : note.replace("It is copied: paste it", "Copy it").replace("It is copied.", "Copy it from here.");
    const close = button("nbp-close", "close", () => (this.code.hidden = true));
    const again = button("nbp-copy", "copy", () => copy(text));
    const pre = element("pre", "nbp-source mathjax_ignore tex2jax_ignore", { tabindex: "0", "aria-label": title }, text);
    this.code.replaceChildren(element("div", "nbp-row", {}, element("strong", "", {}, title), again, close), pre);
    this.code.append(element("div", "nbp-note", { role: "status" }, words));
    this.code.hidden = false;
  }

  remove() {
    for (const timer of Object.values(this.timers)) clearTimeout(timer);
    this.model.off("msg:custom", this.onMessage);
    this.root.remove();
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.remove();
  },
};
