import { element } from "./dom.js";

const GAP = 2;
const MARGIN = 8;

// The alternatives of one token, in the top layer, inside the viewport.
export class Popover {
  constructor(root, prefix, onChoose, onClose) {
    this.headId = `${prefix}-head`;
    this.hintId = `${prefix}-hint`;
    this.box = element("div", "nbt-popover", {
      role: "dialog",
      "aria-describedby": `${this.headId} ${this.hintId}`,
      tabindex: "-1",
      popover: "manual",
      hidden: "",
    });
    this.onChoose = onChoose;
    this.onClose = onClose;
    this.anchor = null;
    root.append(this.box);
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest("button");
      if (row) this.onChoose(Number(row.dataset.token));
    });
  }

  show(anchor, token, alternatives, refusal) {
    this.anchor = anchor;
    this.box.replaceChildren();
    const [id, pieces, , probability, rank] = token;
    const own = alternatives.find((alternative) => alternative[0] === id);
    const name = own ? own[1] : pieces.map(([mark, text]) => mark || text).join("");
    const head = element("div", "nbt-head", { id: this.headId });
    head.textContent = `${name} · ${probability}` + (rank ? ` · rank ${rank}` : "");
    this.box.setAttribute("aria-label", `Alternatives to ${name}`);
    this.box.append(head);
    for (const alternative of alternatives) this.box.append(this.row(alternative, id, refusal));
    const others = alternatives.some((alternative) => alternative[0] !== id);
    const hint = element("div", "nbt-hint", { id: this.hintId });
    hint.textContent = !others ? "no alternatives were asked for" : refusal ? `no branches: ${refusal}` : "choose one to go on from it";
    this.box.append(hint);
    this.box.hidden = false;
    if (!this.box.matches(":popover-open")) this.box.showPopover?.();
    this.place();
  }

  row([id, label, words, probability], ownId, refusal) {
    const row = element(refusal || id === ownId ? "div" : "button", "nbt-row", { "data-token": id });
    if (row.tagName === "BUTTON") row.type = "button";
    if (id === ownId) row.setAttribute("aria-current", "true");
    const text = element("span", "nbt-label");
    text.textContent = label;
    const share = element("span", "nbt-share");
    share.textContent = words;
    const bar = element("span", "nbt-bar");
    bar.style.width = `${Math.max(1, probability * 100)}%`;
    row.append(bar, text, share);
    return row;
  }

  // Below the token or above it, where there is more room, and never over it.
  place() {
    const at = this.anchor.getClientRects()[0] ?? this.anchor.getBoundingClientRect();
    this.box.style.maxHeight = "";
    const wanted = this.box.getBoundingClientRect();
    const below = window.innerHeight - at.bottom - GAP - MARGIN;
    const above = at.top - GAP - MARGIN;
    const isBelow = wanted.height <= below || below >= above;
    const height = Math.min(wanted.height, isBelow ? below : above);
    this.box.style.maxHeight = `${height}px`;
    this.box.style.top = `${isBelow ? at.bottom + GAP : at.top - GAP - height}px`;
    const rightmost = window.innerWidth - wanted.width - MARGIN;
    this.box.style.left = `${Math.max(MARGIN, Math.min(at.left, rightmost))}px`;
  }

  // Go to a token's row, else to the first that can be chosen, else to the box itself.
  focus(token) {
    const row = this.box.querySelector(`button[data-token="${token}"]`) ?? this.box.querySelector("button");
    (row ?? this.box).focus();
  }

  close() {
    if (!this.anchor) return;
    const anchor = this.anchor;
    const hadFocus = this.box.contains(document.activeElement);
    this.anchor = null;
    if (this.box.matches(":popover-open")) this.box.hidePopover();
    this.box.hidden = true;
    this.onClose(anchor, hadFocus);
  }

  onKey(event) {
    const rows = [...this.box.querySelectorAll("button")];
    const index = rows.indexOf(document.activeElement);
    if (event.key === "Escape" || event.key === "Tab") this.close();
    else if (event.key === "ArrowDown") rows[(index + 1) % rows.length]?.focus();
    else if (event.key === "ArrowUp") rows[(index - 1 + rows.length) % rows.length]?.focus();
    else return;
    event.preventDefault();
  }
}
