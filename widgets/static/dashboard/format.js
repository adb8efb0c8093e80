// This module formats numbers for people, where an unknown one is a dash, and names requests for them.

export const NOTHING = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function integer(value) {
  return isNumber(value) ? whole.format(value) : NOTHING;
}

export function perSecond(value) {
  if (!isNumber(value)) return NOTHING;
  return value > 0 && value < 10 ? value.toFixed(1) : whole.format(value);
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(2)} ms`;
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 99.5) return `${seconds.toPrecision(3)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function bytes(value) {
  if (!isNumber(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toPrecision(3) : whole.format(value)} ${units[unit]}`;
}

export function share(part, all) {
  return isNumber(part) && all > 0 ? `${((100 * part) / all).toFixed(part / all < 0.0995 && part ? 1 : 0)} %` : NOTHING;
}

export function clock(time, digits = 3) {
  if (!isNumber(time)) return NOTHING;
  const date = new Date(time * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const start = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return digits ? `${start}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, digits)}` : start;
}

// Return the name that a request has everywhere: its number, and the words that tell it from the others.
export function nameOf({ number, id, preview }) {
  return `#${number} ${preview || id}`;
}

export function count(number, one, many = `${one}s`) {
  return `${integer(number)} ${number === 1 ? one : many}`;
}

// Return the least of 1, 2, 5, 10, 20 … that is not below `value`.
export function niceStep(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  for (const factor of [1, 2, 5]) if (factor * power >= value) return factor * power;
  return 10 * power;
}
