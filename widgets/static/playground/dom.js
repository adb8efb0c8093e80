// Texts go into text nodes, values and attributes only.
export function element(tag, className, attributes = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function button(className, text, onClick, attributes = {}) {
  const made = element("button", className, { type: "button", ...attributes }, text);
  made.addEventListener("click", onClick);
  return made;
}

// Keep a notebook from taking keys in here for its shortcuts, which move from cell to cell or delete one.
export function keepKeys(root) {
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  root.addEventListener("focusin", (event) => event.target.setAttribute("data-lm-suppress-shortcuts", "true"));
  root.addEventListener("keydown", (event) => event.stopPropagation());
}

// A page without a secure address has no clipboard; the text can be selected all the same.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
