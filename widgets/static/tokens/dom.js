// The model's text goes into text nodes and attributes only.
export function element(tag, className, attributes = {}) {
  const made = document.createElement(tag);
  made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Keep a notebook from taking keys in here for its shortcuts, which move from cell to cell or insert one. It looks at the
// focused element before it looks at the elements around it.
export function keepKeys(root) {
  root.addEventListener("focusin", (event) => event.target.setAttribute("data-lm-suppress-shortcuts", "true"));
}

// Return the index of the element nearest to one of them in the line above (step -1) or below it (1), or the same index if
// there is no such line.
export function inNextLine(elements, index, step) {
  const box = (at) => elements[at].getClientRects()[0] ?? elements[at].getBoundingClientRect();
  const from = box(index);
  let best = index;
  let line = null;
  for (let at = index + step; elements[at]; at += step) {
    const here = box(at);
    if (Math.abs(here.top - from.top) < here.height / 2) continue;
    line ??= here.top;
    if (Math.abs(here.top - line) > here.height / 2) break;
    if (best === index || Math.abs(here.left - from.left) < Math.abs(box(best).left - from.left)) best = at;
  }
  return best;
}
