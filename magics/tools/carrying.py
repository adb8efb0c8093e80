"""The carrying out of a model's calls: one after another, each with a result, also where something ends them."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.confirm import confirmed
from nbengine.magics.conversations.answer import answer_in
from nbengine.magics.conversations.conversation import CarriedOut, Round
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.waiting import Wait
from nbengine.magics.interrupts import Interrupted, interruptible
from nbengine.magics.tools.cards import CallCard, written
from nbengine.magics.tools.toolbox import NotebookTool, Toolbox
from nbengine.outputs import ToolCall
from nbengine.widgets.words import print_quietly

DEFAULT_MAX_CALLS = 10
INTERRUPTED = "the user has interrupted this call"
NOT_BEGUN = "the calls were ended before this one was carried out"
REFUSED = "the user does not want this call to be carried out"


@dataclass(frozen=True)
class ToolOptions:
    """The options of a line with tools."""

    tools: tuple[NotebookTool, ...] = ()
    """Functions of the notebook."""
    servers: tuple[str, ...] = ()
    """The commands of MCP servers."""
    confirm: bool = False
    max_calls: int = DEFAULT_MAX_CALLS
    choice: str = "auto"
    """"auto", "required", or the name of the tool that the model must call first."""
    parser: str = "auto"
    """The name of the parser that finds the calls in an answer."""


class ToolRounds:
    """The rounds of one turn: answers with calls, each of which is carried out before the next answer."""

    def __init__(self, shell: InteractiveShell, options: ToolOptions, toolbox: Toolbox) -> None:
        self.rounds: list[Round] = []
        self.options = options
        self.toolbox = toolbox
        self.is_exhausted = False
        """A call was left out because there had been `max_calls` before it."""
        self._shell = shell
        self._num_calls = 0
        self._last: GenerationResult | None = None

    def has_taken(self, result: GenerationResult) -> bool:
        """Tell whether an answer's calls are in the last round, so that it is no answer to the user."""
        return result is self._last

    async def take(self, result: GenerationResult, wait: Wait) -> bool:
        """Carry out the calls of a complete answer, and return whether the model is to go on.

        Raises:
            Interrupted: the user has interrupted a call. All calls have results then.
        """
        for unreadable in result.outputs[0].unreadable_calls if result.outputs else ():
            print_quietly(f"a call could not be read, and stays in the answer: {unreadable.reason}")
        calls: Sequence[ToolCall] = result.outputs[0].tool_calls if result.outputs else ()
        if not calls:
            return False
        self._last = result
        answer = answer_in(result.text, result.reading)
        carried: list[CarriedOut] = []
        try:
            for call in calls:
                await self._carry_out(call, wait, carried)
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise Interrupted("the model's calls were interrupted; what had been done is kept") from None
        finally:
            carried += [_left_out(call, NOT_BEGUN) for call in calls[len(carried) :]]
            self.rounds.append(Round(answer.text, answer.reasoning, tuple(carried)))
        return not self.is_exhausted

    async def _carry_out(self, call: ToolCall, wait: Wait, carried: list[CarriedOut]) -> None:
        """Carry out a call and append it with its result, whatever happens."""
        options = self.options
        if self._num_calls >= options.max_calls:
            self.is_exhausted = True
            reason = f"nobody carries it out: there were {options.max_calls} calls in this turn (--max-calls)"
            carried.append(self._shown(_left_out(call, reason), call))
            return
        self._num_calls += 1
        if options.confirm and not self._is_confirmed(call):
            carried.append(self._shown(_left_out(call, REFUSED), call))
            return
        card = CallCard(self._shell, call)
        result, failed, begin = INTERRUPTED, True, time.perf_counter()
        try:
            with interruptible():
                value = self.toolbox.find(call.name).call(call.arguments)
            if inspect.isawaitable(value):
                value = await wait(value)
            result, failed = _sendable(_text_of(value)), False
        except Exception as error:  # noqa: BLE001 (the model reads it, and the user sees it)
            result = _sendable(f"{type(error).__name__}: {error}")
        finally:
            took = time.perf_counter() - begin
            carried.append(CarriedOut(call.id, call.name, call.arguments, result, failed, took))
            card.finish(carried[-1])

    def _shown(self, call: CarriedOut, asked: ToolCall) -> CarriedOut:
        CallCard(self._shell, asked).finish(call)
        return call

    def _is_confirmed(self, call: ToolCall) -> bool:
        return confirmed(
            f"call {written(call.name, call.arguments)}?",
            "%chat: --confirm needs a frontend that can ask, and this one cannot",
        )


def _left_out(call: ToolCall, reason: str) -> CarriedOut:
    return CarriedOut(call.id, call.name, call.arguments, reason, failed=True)


def _text_of(value: object) -> str:
    """Write a tool's value for the model: text as it is, other values as JSON, or else as Python prints them."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _sendable(text: str) -> str:
    # Half of a surrogate pair cannot be sent to the engine, nor to a frontend.
    return text.encode("utf-8", "backslashreplace").decode()
