"""`%%chat` as a kernel runs it: awaited, in one output, with the reasoning folded and everything dead that looks like HTML."""

from __future__ import annotations

import asyncio
from html.parser import HTMLParser

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.conversations.answer import Answer
from nbengine.magics.conversations.conversation import Conversation, Exchange
from nbengine.magics.conversations.view import chat_bundle, conversation_bundle
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until

HOSTILE = "</pre></details><script>alert(1)</script><img src=x onerror=y>\n\n# $x$ \\(y\\) & `z`"


class Tags(HTMLParser):
    """The elements of a piece of HTML, and the text inside one kind of them."""

    def __init__(self, html: str, kind: str = "") -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.open: list[str] = []
        self.inside: list[str] = []
        self._kind = kind
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.kinds.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._kind in self.open:
            self.inside.append(data)


async def test_reasoning_is_folded_from_its_first_word_on(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%chat -o talk\n2 + 2?\n"))
    await until(lambda: bool(engine.collectors))
    messages = publisher(kernel_shell).messages
    engine.emit("<think>two ")
    await until(lambda: bool(messages))
    engine.emit("and two</think>")
    engine.emit("Four")
    await until(lambda: "Four" in messages[-1][1]["text/plain"])
    engine.emit(".", "stop")
    (await cell).raise_error()
    assert messages[0][1]["text/plain"].startswith("[reasoning, 1 word …]\n\n\n\n[1 token")
    assert all(
        "<details" in data["text/html"] and " open" not in data["text/html"] for _, data, _ in messages
    )
    (shown,) = publisher(kernel_shell).outputs()
    assert shown["text/plain"].startswith("[reasoning, 3 words]\n\nFour.\n\n[4 tokens")
    assert Tags(shown["text/html"], "details").inside == ["reasoning, 3 words", "two and two"]
    assert kernel_shell.user_ns["_"] is kernel_shell.user_ns["talk"]
    assert [turn.text for turn in kernel_shell.user_ns["talk"].turns] == ["Four."]


async def test_an_interrupt_leaves_the_partial_turn(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "talk = %chat one"))
    await until(lambda: bool(engine.collectors))
    engine.emit("half")
    await until(lambda: bool(publisher(kernel_shell).messages))
    cell.cancel()
    assert isinstance((await cell).error_in_exec, KeyboardInterrupt)
    (turn,) = kernel_shell.user_ns["_"].turns
    assert (turn.user, turn.text, turn.interrupted) == ("one", "half", True)
    assert "ended early" in publisher(kernel_shell).outputs()[0]["text/plain"]


async def test_a_line_shows_its_answer_once(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    (await run(kernel_shell, "%chat hi?")).raise_error()
    assert len(publisher(kernel_shell).outputs()) == 1
    assert "Conversation" not in capsys.readouterr().out
    (await run(kernel_shell, "%chat --show")).raise_error()
    assert "1. assistant" in publisher(kernel_shell).outputs()[1]["text/html"]


async def test_an_assigned_conversation_is_shown_where_a_later_cell_names_it(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    (await run(kernel_shell, "talk = %chat hi?")).raise_error()
    capsys.readouterr()
    kernel_shell.run_cell("talk", store_history=True).raise_error()
    assert "Conversation('default', 1 turn)" in capsys.readouterr().out


async def test_the_body_reaches_the_engine_byte_for_byte(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    body = "  '''>>> {\"a\": 1}\t\n\n   %generate x?\n\\n"
    (await run(kernel_shell, f"%%chat\n{body}\n")).raise_error()
    assert engine.requests[0][0] == {"prompt": f"<user>{body}"}


@pytest.mark.parametrize("output_format", ["text", "markdown", "json", "code"])
def test_nothing_that_a_model_writes_is_html(output_format: str) -> None:
    bundle = chat_bundle(Answer(HOSTILE, HOSTILE), output_format, HOSTILE)
    (kind,) = bundle.keys() - {"text/plain"}
    fold, _, rest = bundle[kind].partition("</details>")
    parsed = Tags(fold + "</details>", "pre")
    assert parsed.kinds == ["details", "summary", "pre"]
    assert "".join(parsed.inside) == HOSTILE
    assert "\n" not in fold
    assert not {"$", "\\"} & set(fold)
    assert "<script" not in rest
    assert "<img" not in rest


def test_nothing_in_a_conversation_is_html() -> None:
    talk = Conversation(HOSTILE, HOSTILE)
    talk.add(Exchange(HOSTILE, HOSTILE, HOSTILE, "length"))
    html = conversation_bundle(talk)["text/html"]
    assert set(Tags(html).kinds) == {"div", "pre", "details", "summary"}
    assert "".join(Tags(html, "pre").inside) == HOSTILE * 4
    assert "1. assistant (stopped at the limit)" in html
    assert Tags(conversation_bundle(Conversation(HOSTILE))["text/html"]).kinds == ["div"]
    assert talk._repr_mimebundle_() == {"text/html": html}
