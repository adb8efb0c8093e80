// The axis that panels share: ticks of the clock or of steps.

import { clock, integer, niceStep } from "./format.js";

const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400];
export const AXIS = 20;

// Return seconds between two ticks, at least `least`, that a clock has.
export function clockStep(least) {
  if (least < 1) return niceStep(least);
  return CLOCK_STEPS.find((step) => step >= least) ?? 86_400;
}

// Draw ticks of the clock between two times; `x(time)` is their place.
export function clockTicks(context, theme, size, [start, end], x, left) {
  const step = clockStep(((end - start) * 90) / Math.max(1, size.width - left));
  const digits = step < 0.1 ? 3 : step < 1 ? 1 : 0;
  // Ticks lie where the clock on the wall has round figures.
  const offset = new Date(end * 1000).getTimezoneOffset() * 60;
  const text = (time) => (step >= 60 ? clock(time, 0).slice(0, 5) : clock(time, digits));
  drawTicks(context, theme, size, function* () {
    for (let time = Math.ceil((start - offset) / step) * step + offset; time <= end; time += step) yield [x(time), text(time)];
  }, left);
}

// Draw ticks at the steps with round numbers.
export function stepTicks(context, theme, size, history, [first, end], x, scale, left) {
  const every = Math.max(1, niceStep(84 / scale));
  drawTicks(context, theme, size, function* () {
    for (let ordinal = first; ordinal < end; ordinal += 1) {
      const step = history.at("step", ordinal);
      if (step % every === 0) yield [x(ordinal), integer(step)];
    }
  }, left);
}

function drawTicks(context, theme, size, places, left) {
  context.font = `11px ${theme.font}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  let free = left;
  for (const [place, text] of places()) {
    const x = Math.round(place);
    if (x < free) continue;
    const end = x + 6 + context.measureText(text).width;
    context.fillStyle = theme.faint;
    context.fillRect(x, 4, 1, size.height - 4);
    if (end > size.width) continue;
    context.fillStyle = theme.muted;
    context.fillText(text, x + 4, AXIS / 2);
    free = end + 8;
  }
}
