"""The time for which the engine may hold a request's tokens, to tell them together."""

from __future__ import annotations

from nbengine.checks import require, require_number
from nbengine.sampling_params import RequestOutputKind, SamplingParams

FOR_READERS = 0.03
"""The seconds for text that someone sees growing, which is drawn no more often."""
_UNTIL_END = 0.25
"""The seconds where only the end matters. If the engine ends first, the tokens of this time are lost."""
_UNTIL_STOP = 0.05
"""The seconds where only the end matters, and a stop string may be it: the engine hears of one when the frontend has
seen it, and what it computes until then is for nothing."""
_LONGEST = 60.0


def default_interval(params: SamplingParams) -> float:
    """Return the seconds for a request of which its caller has said nothing."""
    if params.output_kind is not RequestOutputKind.FINAL_ONLY:
        return 0.0
    return _UNTIL_STOP if params.stop else _UNTIL_END


def checked_interval(value: object) -> float:
    """Return the seconds that `value` stands for; raise unless it is a number from 0 to 60."""
    interval = require_number("output_interval", value)
    require("output_interval", value, 0 <= interval <= _LONGEST, f"a number of seconds in [0, {_LONGEST:g}]")
    return interval
