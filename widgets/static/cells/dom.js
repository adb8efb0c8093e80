// Elements; text goes into text nodes and attributes only.
export function element(tag, className, attributes = {}, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// A notebook looks at the focused element before it takes a key for one of its shortcuts.
export function control(tag, className, attributes, text) {
  return element(tag, className, { ...attributes, "data-lm-suppress-shortcuts": "true" }, text);
}
