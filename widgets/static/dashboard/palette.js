// Made from widgets/dashboard/palette.py: change the colours there.
export const REQUESTS = [
  "#15c3fb",
  "#eab401",
  "#4d42c2",
  "#e88a99",
  "#586212",
  "#7178f9",
  "#8b8702",
  "#91607d"
];
export const ROLES = {
  "prefill": "#2a6de0",
  "decode": "#45c29a",
  "recompute": "#84309a",
  "hit": "#f2c01e",
  "preempted": "#d2452f",
  "running": "#2a6de0",
  "waiting": "#e09a1a",
  "cached": "#8a8f98",
  "free": "#8a8f98",
  "dummy": "#d9822b"
};
export const CACHED_OPACITY = 0.6;
export const FREE_OPACITY = 0.16;
