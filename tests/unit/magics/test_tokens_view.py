"""`%%generate --logprobs` in a kernel: what is sent to the widget, what a saved notebook has."""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import msgspec
import pytest
from answers import Word, delta_of, token_id, tree_of
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.extension import Extension, unload
from nbengine.magics.tokens import view as tokens_view
from nbengine.magics.tokens.branching import BranchTree
from nbengine.magics.tokens.feed import EAGER_ALTERNATIVES, TokensFeed, num_in_text
from nbengine.magics.tokens.view import static_bundle
from nbengine.widgets.open_views import OpenViews
from nbengine.widgets.tokens.widget import TokensWidget
from tests.unit.magics.conftest import FakeClient, RecordingPublisher

VIEW = "application/vnd.jupyter.widget-view+json"
WORDS: list[Word] = [
    ("The", 0.9, {"A": 0.05}),
    (" <b>", 0.1, {"</span>": 0.05}),
    ("!", 0.5, {}),
    ("<end>", 0.8, {}),
]


class RecordedWidget:
    """A widget that records what the script would get."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.snapshot: dict[str, Any] = {}

    def send(self, content: dict[str, Any]) -> None:
        self.frames.append(msgspec.json.decode(msgspec.json.encode(content)))


def feed_of(tree: BranchTree) -> tuple[TokensFeed, RecordedWidget, list[str]]:
    widget, calls = RecordedWidget(), list[str]()
    feed = TokensFeed(
        tree,
        widget,
        footer=True,
        on_hello=lambda: calls.append("hello"),
        on_rest=lambda: calls.append("rest"),
    )
    tree.listeners.append(feed.push)
    return feed, widget, calls


def test_only_what_is_new_is_sent_and_everything_is_kept_at_the_end() -> None:
    tree, _ = tree_of(WORDS[:2], None)
    feed, widget, _ = feed_of(tree)
    feed.push(tree[0])
    tree[0].own.absorb(delta_of(WORDS[2:], "stop", text="!"))
    feed.push(tree[0])
    first, second = widget.frames
    assert [token[1] for token in first["tokens"]] == [[["", "The"]], [["", " <b>"]]]
    assert (first["start"], first["state"], first["in_text"]) == (0, "running", None)
    assert [token[1] for token in second["tokens"]] == [[["", "!"]], [["", "<end>"]]]
    assert (second["start"], second["state"], second["in_text"]) == (2, "done", 3)
    assert "finished" in second["footer"]
    assert [len(node["tokens"]) for node in widget.snapshot["nodes"]] == [4]
    assert first["tokens"][0] == [
        token_id("The"),
        [["", "The"]],
        0,
        "90 %",
        1,
        [[token_id("The"), "The", "90 %", 0.9], [token_id("A"), "A", "5.0 %", 0.05]],
    ]


def test_a_script_that_comes_late_gets_everything_and_then_what_is_new() -> None:
    tree, _ = tree_of(WORDS[:2], None)
    feed, widget, calls = feed_of(tree)
    feed.push(tree[0])
    feed.receive({"kind": "hello"})
    assert calls == ["hello"]
    assert (widget.frames[-1]["kind"], len(widget.frames[-1]["nodes"][0]["tokens"])) == ("reset", 2)
    feed.push(tree[0])
    assert (widget.frames[-1]["start"], widget.frames[-1]["tokens"]) == (2, [])


def test_alternatives_beyond_the_first_are_sent_when_asked_for() -> None:
    many = {f"w{number}": 0.01 for number in range(30)}
    tree, _ = tree_of([("x", 0.5, many)])
    feed, widget, _ = feed_of(tree)
    feed.push(tree[0])
    assert len(widget.frames[0]["tokens"][0][5]) == EAGER_ALTERNATIVES
    feed.receive({"kind": "alternatives", "node": 0, "position": 0})
    assert len(widget.frames[-1]["alternatives"]) == 31


def test_clicks_branch_select_and_stop() -> None:
    tree, client = tree_of(WORDS)
    feed, widget, _ = feed_of(tree)
    feed.receive({"kind": "branch", "node": 0, "position": 0, "token": token_id("A")})
    assert widget.frames[-1] == {"kind": "select", "node": 1}
    assert widget.frames[0]["label"] == "A"
    feed.receive({"kind": "branch", "node": 0, "position": 0, "token": token_id("A")})
    assert (len(tree), widget.frames[-1]) == (2, {"kind": "select", "node": 1})
    feed.receive({"kind": "branch", "node": 0, "position": 99, "token": 1})
    assert widget.frames[-1]["kind"] == "notice"
    assert "position must be in [0, 4)" in widget.frames[-1]["text"]
    feed.receive({"kind": "stop", "node": 1})
    assert tree[1].result(60).finish_reason == "abort"
    assert client.aborted == ["branch-1"]
    tree[0].own.finished = False
    feed.receive({"kind": "stop", "node": 0})
    assert client.aborted == ["branch-1", "first"]


def test_a_feed_that_is_closed_neither_sends_nor_does_anything() -> None:
    tree, client = tree_of(WORDS)
    feed, widget, calls = feed_of(tree)
    feed.close()
    feed.push(tree[0])
    for content in (
        {"kind": "hello"},
        {"kind": "rest"},
        {"kind": "alternatives", "node": 0, "position": 0},
        {"kind": "branch", "node": 0, "position": 0, "token": 1},
        {"kind": "stop", "node": 0},
    ):
        feed.receive(content)
    assert (widget.frames, widget.snapshot, calls, len(tree), client.aborted) == ([], {}, [], 1, [])


@pytest.mark.parametrize(
    "content", [{"kind": "evil"}, {}, "x", {"kind": "branch", "node": "0", "position": 0, "token": 1}]
)
def test_what_no_script_sends_is_refused(content: Any) -> None:
    feed, _, _ = feed_of(tree_of(WORDS)[0])
    with pytest.raises(msgspec.ValidationError):
        feed.receive(content)


@pytest.mark.parametrize(
    ("text", "count"),
    [("The <b>!", 3), ("The <b>!<end>", 4), ("The", 1), ("", 0), ("The <b", 2), ("other", 4)],
)
def test_tokens_behind_the_text_are_counted_out(text: str, count: int) -> None:
    tree, _ = tree_of(WORDS, text=text)
    assert num_in_text(tree[0]) == count


def test_a_first_space_that_the_tokenizer_drops_does_not_matter() -> None:
    tree, _ = tree_of([(" a", 0.5, {}), (" b", 0.5, {}), ("<end>", 0.5, {})], text="a b")
    assert num_in_text(tree[0]) == 2


def test_the_static_form_has_answers_and_branches_and_no_html_of_theirs() -> None:
    tree, client = tree_of(WORDS, text="The <b>!")
    branch = tree.branch(1, "</span>")
    client.write([(" &amp;", 0.5, {})], "length", text="The</span> &amp;", cached=3)
    branch.result(60)
    bundle = static_bundle(tree, footer=True)
    assert bundle["text/plain"].startswith("1.\nThe <b>!\n\n[4 tokens")
    assert "2. ↳ </span> at 1 of 1.\nThe</span> &amp;\n\n[stopped at the limit" in bundle["text/plain"]
    html = bundle["text/html"]
    assert "<b>" not in html
    assert html.count("<span") == html.count("</span>")
    assert "&amp;amp;" in html
    assert "3 of 5 prompt tokens reused" in html
    folded = static_bundle(tree, footer=False, folded=True)
    assert folded["text/plain"].startswith("[6 tokens with their probabilities]\n\n2. ↳")
    assert folded["text/html"].startswith("<details>")
    assert "reused" not in folded["text/html"]


def test_long_answers_keep_fewer_alternatives() -> None:
    alternatives = {f"alternative {number}": 0.04 for number in range(20)}
    short, long = (
        len(static_bundle(tree_of([("x", 0.1, alternatives)] * count)[0], footer=False)["text/html"]) / count
        for count in (100, 4000)
    )
    assert short > 180
    assert long < 150
    tree, _ = tree_of([("x", 0.1, alternatives)] * 4000)
    feed, widget, _ = feed_of(tree)
    feed.push(tree[0])
    assert len(msgspec.json.encode(widget.snapshot)) < 300_000


async def run(shell: InteractiveShell, code: str) -> None:
    cell = shell.transform_cell(code)
    (await shell.run_cell_async(code, transformed_cell=cell, store_history=True)).raise_error()
    shell.events.trigger("post_execute")


def messages(shell: InteractiveShell) -> list[dict[str, Any]]:
    found = shell.display_pub
    assert isinstance(found, RecordingPublisher)
    return [data for _, data, _ in found.messages]


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> list[TokensWidget]:
    """The widgets that are made; what they send is kept in their `sent`."""
    made: list[TokensWidget] = []

    class Recorded(TokensWidget):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.__dict__["sent"] = []
            made.append(self)

        def send(self, content: Any, buffers: Any = None) -> None:
            self.__dict__["sent"].append(content)

    monkeypatch.setattr("nbengine.widgets.tokens.widget.TokensWidget", Recorded)
    return made


async def test_a_cell_shows_a_widget_that_streams_and_ends_with_its_static_form(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any]
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate -o answer --logprobs 2\nhi\n"))
    async with asyncio.timeout(60):
        while not engine.collectors:
            await asyncio.sleep(0.005)
        engine.emit("<i>")
        while not widgets or not widgets[0].sent:
            await asyncio.sleep(0.005)
        assert widgets[0].sent[0]["tokens"][0][1] == (("", "<i>"),)
        engine.emit("!", "stop")
        await cell
    shown = messages(kernel_shell)
    assert len(shown) == 2
    assert all(data[VIEW]["model_id"] == widgets[0].model_id for data in shown)
    assert "&lt;i&gt;" in shown[-1]["text/html"]
    assert shown[-1]["text/plain"].startswith("<i>!\n\n[2 tokens")
    assert widgets[0].snapshot["nodes"][0]["state"] == "done"

    answer = kernel_shell.user_ns["answer"]
    branch = answer.branch(0, 7)
    engine.emit("x", "stop")
    branch.result(60)
    assert widgets[0].sent[-1]["id"] == 1
    # Nobody has said hello: what is saved is kept up to date at once.
    assert "↳ token 7 at 0 of 1." in messages(kernel_shell)[-1]["text/plain"]


async def test_markdown_is_rendered_with_its_tokens_folded_below(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any]
) -> None:
    await run(kernel_shell, "%%generate -f markdown --logprobs 2\nhi\n")
    outputs = kernel_shell.display_pub.outputs()  # type: ignore[attr-defined]
    assert [set(data) for data in outputs] == [
        {"text/plain", "text/markdown"},
        {"text/plain", "text/html", VIEW},
    ]
    assert widgets[0].folded
    assert outputs[1]["text/plain"] == "[3 tokens with their probabilities]"


async def test_in_a_conversation_they_are_folded_below_the_answer_and_branches_are_no_turns(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any]
) -> None:
    await run(kernel_shell, "%%chat -o talk --logprobs 2\nhi\n")
    answer, tokens = kernel_shell.display_pub.outputs()  # type: ignore[attr-defined]
    talk = kernel_shell.user_ns["talk"]
    assert answer["text/plain"].startswith(talk.turns[0].text)
    assert VIEW not in answer
    assert tokens[VIEW]["model_id"] == widgets[0].model_id
    assert tokens["text/html"].startswith("<details>")
    talk.last.branch(0, 7).result(60)
    assert "↳ token 7 at 0 of 1." in messages(kernel_shell)[-1]["text/plain"]
    assert [turn.user for turn in talk.turns] == ["hi"]
    await run(kernel_shell, "%%chat -o talk\nand without\n")
    assert len(widgets) == 1


async def test_without_anywidget_there_is_the_static_form(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name == "nbengine.widgets.tokens.widget":
            raise ImportError("no anywidget here")
        return original(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    await run(kernel_shell, "%%generate --logprobs 2\nhi\n")
    (output,) = kernel_shell.display_pub.outputs()  # type: ignore[attr-defined]
    assert set(output) == {"text/plain", "text/html"}
    assert output["text/html"].count("<span title=") == 3


async def test_a_script_that_does_not_come_is_replaced_and_one_that_comes_late_returns(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_view, "GREETING_SECONDS", 0.01)
    await run(kernel_shell, "%%generate --logprobs 2\nhi\n")
    publisher: Any = kernel_shell.display_pub
    with publisher.changed:
        assert publisher.changed.wait_for(lambda: VIEW not in publisher.messages[-1][1], 60)
    (output,) = publisher.outputs()
    assert output["text/html"].count("<span title=") == 3
    widgets[0]._handle_custom_msg({"kind": "hello"}, [])
    assert VIEW in publisher.outputs()[0]


@pytest.mark.parametrize("end", ["%engine stop", "%engine detach", "%engine restart", ""])
async def test_when_its_engine_is_left_a_view_becomes_its_static_form(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any], end: str
) -> None:
    await run(kernel_shell, "%%generate -o answer --logprobs 2\nhi\n")
    widgets[0]._handle_custom_msg({"kind": "hello"}, [])
    publisher: Any = kernel_shell.display_pub
    assert VIEW in publisher.outputs()[0]
    if end:
        await run(kernel_shell, end)
    else:
        unload(kernel_shell)
    output = publisher.outputs()[0]
    assert set(output) == {"text/plain", "text/html"}
    assert output["text/html"].count("<span title=") == 3
    assert widgets[0].comm is None
    sent = len(widgets[0].sent)
    widgets[0]._handle_custom_msg({"kind": "hello"}, [])
    widgets[0]._handle_custom_msg({"kind": "branch", "node": 0, "position": 0, "token": 7}, [])
    assert (len(widgets[0].sent), len(kernel_shell.user_ns["answer"].tree)) == (sent, 1)
    assert VIEW not in publisher.outputs()[0]


async def test_another_engines_end_leaves_a_view_alone(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any]
) -> None:
    await run(kernel_shell, "%%generate --logprobs 2\nhi\n")
    await run(kernel_shell, "%engine start --name other\n%engine stop other")
    assert VIEW in kernel_shell.display_pub.outputs()[0]  # type: ignore[attr-defined]
    assert widgets[0].comm is not None


async def test_an_answer_that_outlives_its_engine_never_gets_its_widget_back(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any]
) -> None:
    engine.words = None
    await run(kernel_shell, "%%generate -a -o early --logprobs 2\nhi\n")
    await run(kernel_shell, "%%generate -a -o late --logprobs 2\nhi\n")
    publisher: Any = kernel_shell.display_pub
    engine.emit("a", index=0)
    with publisher.changed:
        assert publisher.changed.wait_for(lambda: VIEW in publisher.outputs()[0], 60)
    kernel_shell.run_cell("%engine stop").raise_error()
    assert VIEW not in publisher.outputs()[0]
    for index in range(2):
        engine.emit("b", "stop", index)
    assert kernel_shell.user_ns["early"].result(60).text == "ab"
    assert kernel_shell.user_ns["late"].result(60).text == "b"
    outputs = publisher.outputs()
    assert [VIEW in output for output in outputs[:2]] == [False, False]
    assert [output["text/html"].count("<span title=") for output in outputs[:2]] == [2, 1]
    assert len(widgets) == 1


async def test_the_oldest_of_many_views_is_closed(
    kernel_shell: InteractiveShell,
    engine: FakeClient,
    widgets: list[Any],
) -> None:
    Extension.loaded[kernel_shell].session.ongoing.views.most = 2
    for _ in range(3):
        await run(kernel_shell, "%%generate --logprobs 2\nhi\n")
    publisher: Any = kernel_shell.display_pub
    assert [VIEW in output for output in publisher.outputs()] == [False, True, True]
    assert [widget.comm is None for widget in widgets] == [True, False, False]


def test_views_that_nobody_has_any_more_are_forgotten() -> None:
    class Closed:
        def close(self) -> None:
            closed.append(self)

    closed: list[Closed] = []
    views, kept = OpenViews[Closed](2), Closed()
    views.add(kept, "a")
    for _ in range(4):
        views.add(Closed(), "a")
        views.close_superfluous()
    assert closed == []
    views.close("b")
    assert closed == []
    views.close("a")
    views.close()
    assert closed == [kept]


async def test_an_answer_that_does_not_come_leaves_nothing_but_its_error(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[Any]
) -> None:
    engine.words = None
    await run(kernel_shell, "%%generate -a -o later --logprobs 2\nhi\n")
    handle = kernel_shell.user_ns["later"]
    handle.cancel()
    assert handle.result(60).finish_reason == "abort"
    (output,) = kernel_shell.display_pub.outputs()  # type: ignore[attr-defined]
    assert output["text/plain"] == ""
    assert widgets == []


def test_a_terminal_gets_plain_text(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%%generate -o answer --logprobs 2\nhi\n").raise_error()
    printed = capsys.readouterr().out
    assert printed.startswith("Hello world\n[3 tokens")
    assert "finished" in printed
    shell.run_cell("branch = answer.branch(1, 77)").raise_error()
    assert engine.written[-1] == [5, 77]
    assert shell.user_ns["branch"].result(60).finish_reason == "stop"
    shell.run_cell("answer.tree").raise_error()
    assert "└─ 1  'token 77' at 1: 'Hello world'  stop, 5 tokens" in capsys.readouterr().out
