// The examples of a prompt: questions and good answers, which are text as it is and stand before the question.
import { button, element } from "./dom.js";

export class Examples {
  // `examples` is the list that is edited, of { question, answer }.
  constructor(examples, onChange) {
    Object.assign(this, { examples, onChange });
    this.count = element("summary", "", {});
    this.rows = element("div", "nbp-shots");
    const add = button("nbp-add", "add an example", () => this.add());
    this.root = element("details", "nbp-settings", {}, this.count, this.rows, add);
    this.root.open = examples.length > 0;
    this.show();
  }

  show() {
    this.count.textContent = `examples (${this.examples.length})`;
    this.rows.replaceChildren(...this.examples.map((example, index) => this.row(example, index)));
  }

  row(example, index) {
    const field = (name) => {
      const label = `${name} of example ${index + 1}`;
      const input = element("textarea", "nbp-field", { rows: 1, placeholder: name, "aria-label": label });
      input.value = example[name];
      input.addEventListener("input", () => {
        example[name] = input.value;
        this.onChange();
      });
      return input;
    };
    const remove = button("nbp-remove", "remove", () => this.remove(index), { "aria-label": `remove example ${index + 1}` });
    return element("div", "nbp-shot", {}, field("question"), field("answer"), remove);
  }

  add() {
    this.examples.push({ question: "", answer: "" });
    this.show();
    this.rows.lastChild.querySelector("textarea").focus();
    this.onChange();
  }

  remove(index) {
    this.examples.splice(index, 1);
    this.show();
    (this.rows.children[index]?.querySelector("textarea") ?? this.root.querySelector(".nbp-add")).focus();
    this.onChange();
  }
}
