// The tables of a comparison's means and differences. That of means sorts and filters the grid below it; the data are
// those of widgets/grid/widget.py, and magics/comparison/score_view.py makes them.
// Names and texts go into text nodes and attributes only.
const NEXT = { none: "descending", descending: "ascending", ascending: "none" };
const SIGNS = { none: "↕", descending: "↓", ascending: "↑" };
const WORDS = { descending: "highest first", ascending: "lowest first" };
const CHANGED = "Scores have changed since the rows were chosen.";
const DATA = ["change:summary", "change:order", "change:differing"];
const GONE = "The grid is not on this page: run the cell again.";

function element(tag, className, attributes = {}, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// A notebook looks at the focused element before it takes a key for one of its shortcuts.
function control(tag, className, attributes, text) {
  return element(tag, className, { ...attributes, "data-lm-suppress-shortcuts": "true" }, text);
}

class View {
  constructor(model, el) {
    this.model = model;
    this.score = null;
    this.direction = "none";
    this.heads = new Map();
    this.root = element("div", "nbs");
    const summary = model.get("summary");
    this.means = this.table(summary, (name) => this.head(name));
    this.differences = this.table(summary.differences, (name) => element("th", "", { scope: "col" }, name));
    const tables = element("div", "nbs-tables");
    tables.append(this.means, this.differences);
    this.fill();
    this.root.append(tables, this.filter(), this.statusLine());
    el.append(this.root);
    this.onChange = () => this.changed();
    for (const name of DATA) model.on(name, this.onChange);
  }

  remove() {
    for (const name of DATA) this.model.off(name, this.onChange);
    this.root.remove();
  }

  table({ title, scores, note }, head) {
    const table = element("table", "nbs-table mathjax_ignore tex2jax_ignore");
    const row = element("tr");
    row.append(element("th", "", { scope: "col" }, title), ...scores.map(head));
    table.createTHead().append(row);
    table.createTBody();
    table.prepend(element("caption", "nbs-note", {}, note));
    return table;
  }

  // A single setting differs from none.
  fill() {
    const { rows, differences } = this.model.get("summary");
    this.fillRows(this.means, rows);
    this.fillRows(this.differences, differences.rows);
    this.differences.hidden = differences.rows.length === 0;
  }

  fillRows(table, rows) {
    const made = rows.map(({ label, cells }) => {
      const row = element("tr");
      row.append(element("th", "", { scope: "row" }, label), ...cells.map((text) => element("td", "", {}, text)));
      return row;
    });
    table.tBodies[0].replaceChildren(...made);
  }

  // An answer that was asked again has its scores. The rows of the grid stay: nothing moves under the pointer.
  changed() {
    this.fill();
    if (this.direction !== "none" || this.only.checked) this.status.textContent = CHANGED;
  }

  head(name) {
    const head = element("th", "", { scope: "col", "aria-sort": "none" });
    const button = control("button", "nbs-sort", { type: "button", title: `sort the answers by ${name}` }, name);
    const sign = element("span", "nbs-sign", { "aria-hidden": "true" }, SIGNS.none);
    button.append(" ", sign);
    button.addEventListener("click", () => this.sortBy(name));
    head.append(button);
    this.heads.set(name, { head, sign });
    return head;
  }

  filter() {
    const label = element("label", "nbs-filter");
    this.only = control("input", "", { type: "checkbox" });
    this.only.addEventListener("change", () => this.apply());
    label.append(this.only, " only where the settings differ");
    label.hidden = this.model.get("summary").rows.length < 2;
    return label;
  }

  statusLine() {
    this.status = element("span", "nbs-note mathjax_ignore tex2jax_ignore", { role: "status" });
    return this.status;
  }

  sortBy(name) {
    this.direction = name === this.score ? NEXT[this.direction] : "descending";
    this.score = name;
    for (const [other, { head, sign }] of this.heads) {
      const direction = other === name ? this.direction : "none";
      head.setAttribute("aria-sort", direction);
      sign.textContent = SIGNS[direction];
    }
    this.apply();
  }

  // A page may show the same output twice.
  apply() {
    const number = this.model.get("differing").length;
    const order = this.rowsInOrder([...Array(number).keys()]);
    for (const table of document.querySelectorAll(`#${CSS.escape(this.model.get("grid"))}`)) {
      if (!table.nbArrange) continue;
      // The grid is a widget, which draws the rows that it is told of.
      table.nbArrange(order);
      this.status.textContent = this.words({ shown: order.length, all: number });
      return;
    }
    const bodies = [...document.querySelectorAll(`#${CSS.escape(this.model.get("grid"))} > tbody`)];
    const counts = bodies.map((body) => this.arrange(body));
    this.status.textContent = counts.length ? this.words(counts[0]) : GONE;
  }

  rowsInOrder(numbers) {
    const differing = this.model.get("differing");
    return numbers.filter((row) => !this.only.checked || differing[row]).sort((a, b) => this.compare(a, b));
  }

  arrange(body) {
    const differing = this.model.get("differing");
    const rows = [...body.rows].sort((a, b) => this.compare(Number(a.dataset.row), Number(b.dataset.row)));
    const isShown = (row) => !this.only.checked || differing[row.dataset.row];
    for (const row of rows) row.style.display = isShown(row) ? "flex" : "none";
    body.append(...rows);
    return { shown: rows.filter(isShown).length, all: rows.length };
  }

  // Compare two rows by their numbers; rows without a score come last.
  compare(first, second) {
    const order = this.direction === "none" ? [] : this.model.get("order")[this.score];
    const one = order[first] ?? null;
    const other = order[second] ?? null;
    if (one === other) return first - second;
    if (one === null || other === null) return one === null ? 1 : -1;
    return this.direction === "descending" ? other - one : one - other;
  }

  words({ shown, all }) {
    const sorted = this.direction === "none" ? "" : `, sorted by ${this.score}, ${WORDS[this.direction]}`;
    return `${shown} of ${all} rows${sorted}`;
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.remove();
  },
};
