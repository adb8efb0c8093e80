"""The card of a call: its tool with arguments, its result or error, and the time that it took."""

from __future__ import annotations

import json
from html import escape

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.conversations.conversation import CarriedOut
from nbengine.outputs import ToolCall
from nbengine.widgets.live import LiveDisplay, in_kernel
from nbengine.widgets.words import MUTED, PLAIN, PROSE, harmless, joined, muted, print_quietly, seconds

_LONGEST_SHOWN = 400
"""Characters of a result that are shown unfolded."""
_CARD = (
    f'<div {PLAIN} style="border-left:3px solid var({{colour}});padding:0.2em 0.8em;margin:0.4em 0">'
    f'<code style="{PROSE}">{{head}}</code>{{body}}</div>'
)
_RESULT = f'<pre style="{PROSE};margin:0.2em 0 0 0">{{}}</pre>'
_FOLDED = f'<details><summary style="{MUTED};cursor:pointer">{{}}</summary>{_RESULT}</details>'
_RUNNING, _DONE, _FAILED = (
    "--jp-border-color2,#bbb",
    "--jp-success-color1,#388e3c",
    "--jp-error-color1,#d32f2f",
)


class CallCard:
    """The output of one call in the running cell; in a terminal its lines are printed."""

    def __init__(self, shell: InteractiveShell, call: ToolCall) -> None:
        self._head = written(call.name, call.arguments)
        self._live = LiveDisplay(shell) if in_kernel(shell) else None
        if self._live is not None:
            body = muted("running …")
            html = _CARD.format(colour=_RUNNING, head=escape(self._head), body=body)
            self._live.show({"text/plain": f"{self._head}\n[running …]", "text/html": html})

    def finish(self, call: CarriedOut) -> None:
        """Show the result."""
        if self._live is None:
            print_quietly(joined(self._head, _time(call)))
            print(harmless(call.result))
            return
        plain = "\n".join(part for part in (self._head, call.result, f"[{_ending(call)}]") if part)
        self._live.show({"text/plain": plain, "text/html": card_html(call)})


def card_html(call: CarriedOut) -> str:
    """Render a call with its result; a long result is folded."""
    result = escape(call.result)
    if len(call.result) > _LONGEST_SHOWN:
        first = call.result[:_LONGEST_SHOWN].split("\n", 1)[0]
        result = _FOLDED.format(f"{escape(first[:100])} … ({len(call.result):,} characters)", result)
    elif result:
        result = _RESULT.format(result)
    return _CARD.format(
        colour=_FAILED if call.failed else _DONE,
        head=escape(written(call.name, call.arguments)),
        body=result + muted(_ending(call)),
    )


def written(name: str, arguments: str) -> str:
    """Write a call as Python would: `price(item='pear', count=2)`; `arguments` is the JSON text of an object."""
    try:
        given = json.loads(arguments or "{}").items()
    except (ValueError, RecursionError, AttributeError):
        return f"{name}({arguments})"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given)})"


def _ending(call: CarriedOut) -> str:
    return joined("failed" if call.failed and call.seconds is not None else "", _time(call))


def _time(call: CarriedOut) -> str:
    return "not carried out" if call.seconds is None else seconds(call.seconds)
