// The settings of a side, made of what the kernel tells of the sampling flags; an empty one says nothing.
import { element } from "./dom.js";

const NUMERIC = { number: "any", integer: "1" };

export class Controls {
  constructor(controls, settings, prefix, onChange) {
    this.root = element("div", "nbp-controls");
    for (const control of controls) this.root.append(this.row(control, settings, prefix, onChange));
  }

  row(control, settings, prefix, onChange) {
    const id = `${prefix}-${control.name}`;
    const label = element("label", "nbp-flag", { for: id, title: control.help }, control.flag);
    const field = this.field(control, id);
    field.value = settings[control.name] ?? "";
    const row = element("div", "nbp-control", { "data-name": control.name }, label);
    const slider = control.low === undefined ? null : this.slider(control);
    const show = () => {
      if (slider === null) return;
      slider.value = field.value === "" ? String(control.start) : field.value;
      slider.classList.toggle("nbp-unset", field.value === "");
      slider.setAttribute("aria-valuetext", field.value === "" ? "as the model wants it" : field.value);
    };
    const note = () => {
      settings[control.name] = field.value;
      show();
      onChange();
    };
    field.addEventListener("input", note);
    slider?.addEventListener("input", () => {
      field.value = slider.value;
      note();
    });
    if (slider !== null) row.append(slider);
    row.append(field);
    show();
    return row;
  }

  slider({ flag, low, high, step }) {
    return element("input", "nbp-slider", { type: "range", min: low, max: high, step, "aria-label": `${flag} slider` });
  }

  field({ kind, help }, id) {
    const attributes = { id, title: help, placeholder: "default" };
    if (kind === "lines") return element("textarea", "nbp-field", { ...attributes, rows: 1, placeholder: "one a line" });
    if (kind in NUMERIC) return element("input", "nbp-field nbp-number", { ...attributes, type: "number", step: NUMERIC[kind] });
    return element("input", "nbp-field", { ...attributes, type: "text" });
  }
}
