// The line that says what the shades mean, and the button that leads from one uncertain token to the next.
import { element } from "./dom.js";

const UNCERTAIN = 5; // the least shade of a token that had half of the probability or less
const SHADES = 10;

// Return the index of the next token behind `from` that is uncertain, from the beginning where none follows; -1 if there is
// none.
export function nextUncertain(tokens, from) {
  const isUncertain = ([, , shade]) => shade >= UNCERTAIN;
  const behind = tokens.findIndex((token, index) => index > from && isUncertain(token));
  return behind >= 0 ? behind : tokens.findIndex(isUncertain);
}

export function makeLegend(onNext) {
  const legend = element("div", "nbt-legend");
  const scale = element("span", "nbt-scale", { "aria-hidden": "true" });
  for (let shade = 0; shade < SHADES; shade++) {
    scale.append(element("span", "nbt-swatch", shade ? { "data-shade": shade } : {}));
  }
  const words = ["certain", "unlikely"].map((text) => {
    const word = element("span", "");
    word.textContent = text;
    return word;
  });
  const next = element("button", "nbt-next", { type: "button", title: "go to the next token of probability 50 % or less" });
  next.textContent = "next uncertain token";
  next.addEventListener("click", onNext);
  legend.append(words[0], scale, words[1], next);
  return legend;
}
