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
export const MORE_CONTRAST = {
  "#15c3fb": [
    "#2493be",
    "#1fc4f8"
  ],
  "#eab401": [
    "#a48503",
    "#e7bb27"
  ],
  "#4d42c2": [
    "#4f45c3",
    "#6573d5"
  ],
  "#e88a99": [
    "#d4638b",
    "#e78794"
  ],
  "#586212": [
    "#5b560e",
    "#78803a"
  ],
  "#7178f9": [
    "#8e71f5",
    "#798bff"
  ],
  "#8b8702": [
    "#746f19",
    "#8e9c45"
  ],
  "#91607d": [
    "#9b546f",
    "#a76b86"
  ],
  "#2a6de0": [
    "#4c42eb",
    "#1277f6"
  ],
  "#45c29a": [
    "#1d9888",
    "#40c49c"
  ],
  "#84309a": [
    "#853495",
    "#a465a9"
  ],
  "#f2c01e": [
    "#b97500",
    "#efc12a"
  ],
  "#d2452f": [
    "#ae2b2a",
    "#da4835"
  ],
  "#e09a1a": [
    "#bd7b25",
    "#e49712"
  ],
  "#8a8f98": [
    "#888992",
    "#898e9b"
  ],
  "#d9822b": [
    "#d46e07",
    "#da822f"
  ]
};
