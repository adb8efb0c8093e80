// Elements of the page. Data only ever becomes text or the value of a harmless attribute.

const ATTRIBUTES = new Set(["class", "type", "title", "role", "tabindex", "min", "max", "step", "scope", "id", "for"]);

// The page into which an element is put takes it over: until then it belongs to the script's.
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (!ATTRIBUTES.has(name) && !name.startsWith("aria-") && !name.startsWith("data-")) {
      throw new Error(`element(): attribute ${name} is not among those that are allowed`);
    }
    node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function button(label, text, pressed) {
  const node = element("button", { type: "button", class: "nbe-button", "aria-label": label, title: label }, text);
  node.addEventListener("click", pressed);
  return node;
}

// A swatch and its meaning; `mark` is a class of the style sheet.
export function legend(...entries) {
  const items = entries.map(([mark, text]) => element("span", {}, element("i", { class: `nbe-mark nbe-${mark}` }), text));
  return element("span", { class: "nbe-legend" }, ...items);
}

// Keep a notebook from taking keys in here for its shortcuts, which move from cell to cell or insert one. It looks at the
// focused element before it looks at the elements around it.
export function keepKeys(root) {
  root.addEventListener("focusin", (event) => event.target.setAttribute("data-lm-suppress-shortcuts", "true"));
}

export function panel(name, title, ...beside) {
  const head = element("div", { class: "nbe-panel-head" }, element("h3", {}, title), ...beside);
  const body = element("div", { class: "nbe-panel-body" });
  const node = element("section", { class: `nbe-panel nbe-${name}`, "aria-label": title }, head, body);
  return { node, head, body };
}

export function download({ window, document }, name, text) {
  const address = window.URL.createObjectURL(new window.Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name.replace(/[^\w.-]+/g, "_") || "trace.json";
  link.click();
  window.setTimeout(() => window.URL.revokeObjectURL(address), 10_000);
}

// A tooltip: there is one at a time, beside the pointer or a place in a panel, always inside the window. It
// hangs at the page's body, because notebooks cut off what leaves an output.
export class Tooltip {
  constructor(page) {
    this.page = page;
    this.node = element("div", { class: "nbe-tip", "aria-hidden": "true" });
    this.node.hidden = true;
    this.owner = null;
    page.attach(({ document }) => {
      document.body.append(this.node);
      return () => this.node.remove();
    });
  }

  // `lines` are texts; the first is the head.
  show(owner, x, y, lines) {
    this.owner = owner;
    const { theme, contrast } = this.page.root.dataset;
    Object.assign(this.node.dataset, { theme, contrast });
    this.node.replaceChildren(...lines.map((line) => element("div", {}, line)));
    this.node.hidden = false;
    const { width, height } = this.node.getBoundingClientRect();
    // The window without its scroll bars.
    const { clientWidth, clientHeight } = this.page.document.scrollingElement;
    const left = x + 14 + width > clientWidth - 4 ? x - 14 - width : x + 14;
    const top = y + 16 + height > clientHeight - 4 ? y - 12 - height : y + 16;
    this.node.style.left = `${Math.max(4, Math.min(left, clientWidth - 4 - width))}px`;
    this.node.style.top = `${Math.max(4, Math.min(top, clientHeight - 4 - height))}px`;
  }

  hide(owner) {
    if (this.owner !== owner) return;
    this.owner = null;
    this.node.hidden = true;
  }
}

// Says things to screen readers, the newest only, and not more often than they can be heard.
export class Announcer {
  constructor(page) {
    this.page = page;
    this.node = element("div", { class: "nbe-announcer", role: "status", "aria-live": "polite" });
    this.stop = null;
  }

  say(text) {
    this.stop?.();
    this.stop = this.page.after(200, () => setText(this.node, text));
  }
}
