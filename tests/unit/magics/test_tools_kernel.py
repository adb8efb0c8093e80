"""`%%chat --tools` as a kernel runs it: awaited, with a card for each call, and interrupts that come between them."""

from __future__ import annotations

import asyncio

from IPython.core.interactiveshell import InteractiveShell

from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until
from tests.unit.magics.test_chat_kernel import HOSTILE, Tags

CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'
LOOK = """
import asyncio
begun = asyncio.Event()

async def look(where: str) -> str:
    \'\'\'Look somewhere.

    Args:
        where: the place
    \'\'\'
    begun.set()
    if endless:
        await asyncio.Event().wait()
    return found
"""


async def test_each_call_has_a_card_between_the_answers(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.user_ns.update(endless=False, found=HOSTILE * 20)
    kernel_shell.run_cell(LOOK).raise_error()
    engine.turns = [["Let me look.", CALL], ["I see."]]
    (await run(kernel_shell, "%%chat --tools look -o talk\nWhat is there?\n")).raise_error()
    first, card, last = publisher(kernel_shell).outputs()
    assert first["text/plain"].startswith("Let me look.\n\n[")
    assert last["text/plain"].startswith("I see.\n\n[")
    assert card["text/plain"].startswith("look(where='here')\n")
    # The result is long, so it is folded; and it is text.
    tags = Tags(card["text/html"], "pre")
    assert "".join(tags.inside) == HOSTILE * 20
    assert {"script", "img"}.isdisjoint(tags.kinds)
    assert "details" in tags.kinds
    states = [data["text/plain"] for _, data, _ in publisher(kernel_shell).messages]
    assert "look(where='here')\n[running …]" in states


async def test_a_call_that_is_being_written_is_named(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.user_ns.update(endless=False, found="")
    kernel_shell.run_cell(LOOK).raise_error()
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%chat --tools look -o talk\nWhat is there?\n"))
    await until(lambda: bool(engine.collectors))
    engine.emit(CALL[:50])
    messages = publisher(kernel_shell).messages
    await until(lambda: any("[calling look … · 1 token" in data["text/plain"] for _, data, _ in messages))
    engine.emit(CALL[50:], "stop")
    await until(lambda: len(engine.collectors) == 2)
    engine.emit("Nothing.", "stop")
    (await cell).raise_error()
    assert kernel_shell.user_ns["talk"].text == "Nothing."


async def test_an_interrupt_ends_a_tool_that_waits(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.user_ns.update(endless=True, found="")
    kernel_shell.run_cell(LOOK).raise_error()
    engine.turns = [[CALL, CALL]]
    cell = asyncio.create_task(run(kernel_shell, "%%chat --tools look -o talk\nWhat is there?\n"))
    await until(lambda: "begun" in kernel_shell.user_ns and kernel_shell.user_ns["begun"].is_set())
    cell.cancel()
    assert isinstance((await cell).error_in_exec, KeyboardInterrupt)
    (turn,) = kernel_shell.user_ns["_"].turns
    assert [call.failed for call in turn.rounds[0].calls] == [True, True]
    assert turn.interrupted
    assert len(engine.requests) == 1
