"""A conversation in a real kernel with a real engine, Tab completion and help as frontends ask for them."""

from __future__ import annotations

from notebook_support.kernel import Cell, Kernel

TOOLS = """
import time
from typing import Literal

def weather(place: Literal["Rome", "Paris"]) -> str:
    '''Say what the weather is like.

    Args:
        place: the town
    '''
    return f"fine in {place}"

def endless() -> str:
    '''Wait for good.'''
    print("begun")
    time.sleep(3600)
"""


def run_cell(kernel: Kernel, code: str, cell_id: str) -> Cell:
    """Run a cell as frontends do that say which cell it is."""
    client = kernel.client
    content = {
        "code": code,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": True,
    }
    message = client.session.msg("execute_request", content, metadata={"cellId": cell_id})
    client.shell_channel.send(message)
    cell = Cell(message["header"]["msg_id"])
    kernel.cells[cell.message_id] = cell
    assert kernel.finish(cell).status == "ok", cell.outputs
    return cell


def completions(kernel: Kernel, text: str) -> list[str]:
    reply = kernel.client.complete(text, len(text), reply=True, timeout=60)["content"]
    assert reply["cursor_end"] == len(text)
    return [text[: reply["cursor_start"]] + match for match in reply["matches"]]


def check_tools(kernel: Kernel) -> None:
    """Have a model of noise call functions of the notebook, and interrupt one of them."""
    kernel.run(TOOLS)
    assert completions(kernel, "%%chat --tools weat") == ["%%chat --tools weather"]
    flags = "--tool-parser hermes --max-tokens 300 --temperature 0 -o told"
    run_cell(kernel, f"%%chat --name tools --tools weather --tool-choice weather {flags}\nHow is it?\n", "e")
    name, arguments, result, failed = kernel.value(
        "[(call.name, call.arguments, call.result, call.failed) for call in told.turns[0].rounds[0].calls][0]"
    )
    assert (name, failed) == ("weather", False)
    assert result in ("fine in Rome", "fine in Paris")
    assert result[8:] in arguments
    cell = kernel.start(f"%%chat --name tools --tools endless --tool-choice endless {flags}\nWait.\n")
    kernel.wait_for_text(cell, "begun")
    kernel.interrupt()
    kernel.finish(cell)
    assert "the model's calls were interrupted" in cell.text
    assert kernel.value("[turn.finish_reason for turn in told.turns][1:]") == ["abort"]
    assert kernel.value("told.turns[1].rounds[0].calls[0].failed")


def test_a_conversation_is_edited_by_running_its_cells_again(kernel: Kernel, clean_afterwards: None) -> None:
    assert completions(kernel, "%engine start random-t") == [
        "%engine start random-tiny",
        "%engine start random-tiny-moe",
    ]
    assert completions(kernel, "%%generate --temp") == ["%%generate --temperature", "%%generate --template"]
    assert completions(kernel, "%%chat --undo") == ["%%chat --undo"]
    kernel.run("%engine start random-tiny --num-blocks 256 --name box")
    assert completions(kernel, "%engine stop ") == ["%engine stop box"]
    reply = kernel.client.execute("%%chat?", reply=True, timeout=60)["content"]
    (page,) = reply["payload"]
    assert "--undo [N]" in page["data"]["text/plain"]

    flags = "--temperature 0 --max-tokens 24 -o talk"
    run_cell(kernel, f"%%chat {flags}\n  said {{x}} first, at some length\n", "a")
    second = run_cell(kernel, f"%%chat {flags}\nsecond\n", "b")
    assert "prompt tokens reused" in second.text
    run_cell(kernel, f"%%chat {flags}\nthird\n", "c")
    again = run_cell(kernel, f"%%chat {flags}\nedited\n", "b")
    assert "1 later turn dropped" in again.text
    users = "[turn.user for turn in talk.turns]"
    assert kernel.value(users) == ["  said {x} first, at some length", "edited"]
    answers = kernel.value("[message['content'] for message in talk.to_openai()][1::2]")
    assert all(answers)

    kernel.run("%engine load random-tiny --seed 1", deadline=60)
    after = run_cell(kernel, f"%%chat {flags}\nafter\n", "d")
    assert "24 tokens" in after.text
    assert kernel.value(users)[-2:] == ["edited", "after"]
    check_tools(kernel)
    too_long = kernel.run_any("%%chat\n" + "long " * 500)
    assert "tokens long, and the context of engine 'box' holds 2,048" in too_long.text
    assert len(too_long.outputs) == 1

    followed = kernel.start("%engine logs -f")
    kernel.wait_for_text(followed, "ready: engine core 0: 256 blocks")
    kernel.interrupt()
    kernel.finish(followed)
    assert (followed.status, "not followed any more" in followed.text) == ("ok", True)
    kernel.run("%engine stop")
