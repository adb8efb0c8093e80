"""Command lines of `%dashboard`."""

from __future__ import annotations

import argparse

from nbengine.magics.arguments import MagicParser, variable_name

HEIGHTS = (200, 4000)
"""The lowest and the highest height of the widget, in pixels."""


def dashboard_parser() -> MagicParser:
    """Make the parser of the flags."""
    parser = MagicParser(
        "%dashboard",
        "Show what an engine does, live: requests, scheduler, KV blocks, steps. A terminal gets it as text.",
    )
    parser.add_argument("name", nargs="?", help="engine, also one that this notebook is not attached to")
    parser.add_argument(
        "--plain", action="store_true", help="use core ipywidgets alone, where scripts cannot load"
    )
    parser.add_argument("--text", action="store_true", help="show the present state as plain text")
    parser.add_argument(
        "--watch", type=_interval, metavar="S", help="show text again every S seconds until an interrupt"
    )
    parser.add_argument(
        "--height", type=_height, default=0, metavar="PX", help="pixels (default: as its content)"
    )
    parser.add_argument(
        "--side", action="store_true", help="open it beside the notebook (`pip install nbengine[side]`)"
    )
    parser.add_argument(
        "-o", dest="out", type=variable_name, metavar="NAME", help="keep the widget in this variable"
    )
    parser.add_argument(
        "--close", action="store_true", help="close this notebook's dashboards of the engine, or all"
    )
    return parser


def _height(text: str) -> int:
    low, high = HEIGHTS
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of pixels from {low} to {high}")
    return int(text)


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value
