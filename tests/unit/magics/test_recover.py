"""`%engine recover`: this kernel's answers and an engine's, in what order and how they are shown."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import RequestLostError
from nbengine.magics.answers.recover import MAX_SHOWN
from nbengine.magics.interrupts import Interrupted
from tests.unit.magics.conftest import FakeClient, RecordingPublisher
from tests.unit.magics.kept_answers import kept, said
from tests.unit.magics.kernel_cells import publisher, run, until

Capture = pytest.CaptureFixture[str]
HOSTILE = "<script>alert(1)</script>\x1b[31m"


def refused(shell: InteractiveShell, line: str) -> str:
    """The usage error of a line."""
    with pytest.raises(UsageError) as caught:
        shell.run_cell(line).raise_error()
    return str(caught.value)


def test_each_answer_is_labelled_for_the_engine_and_said_to_be_read_when_it_was_shown(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.user_ns["topic"] = "cats"
    said(shell, "%generate about {topic}", capsys)
    assert engine.labels == ["about cats"]
    assert engine.read == [(None, ["random-tiny-1"])]


def test_the_latest_answer_is_shown_again_word_for_word(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate the first", capsys)
    engine.words = ["Good", "bye"]
    said(shell, "%generate second", capsys)
    answer = said(shell, "%engine recover -o again", capsys)
    assert "> second\nGoodbye\n" in answer
    assert "the first" not in answer
    assert "of engine 'random-tiny' · complete" in answer
    again = shell.user_ns["again"]
    assert (again.text, again.prompt, again.token_ids, again.finish_reason) == (
        "Goodbye",
        "second",
        [4, 3],
        "stop",
    )
    assert shell.user_ns["_"] is again
    assert "> the first\nHello world\n" in said(shell, "%engine recover 2", capsys)
    assert "> the first" in said(shell, "%engine recover random-tiny-1", capsys)


def test_all_of_a_comparison_and_branches_are_answers_of_their_own(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%%generate --temperature 0,0.7\nhi", capsys)
    assert engine.labels == ["hi", "hi"]
    assert engine.read == [(None, ["random-tiny-1"]), (None, ["random-tiny-2"])]
    said(shell, "%generate -o answer hi", capsys)
    shell.user_ns["answer"].branch(1, 7).result(60)
    listing = said(shell, "%engine recover -l", capsys).splitlines()[1:]
    assert [line.split()[-1] for line in listing] == [f"random-tiny-{number}" for number in (4, 3, 2, 1)]
    assert engine.labels[2:] == ["hi", "hi"]
    assert "Hello world" in said(shell, "%engine recover 4", capsys)


def test_of_a_comparison_in_which_some_fail_only_the_others_count_as_seen(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    said(shell, "%%generate -a --temperature 0,0.7 --retries 0\nhi", capsys)
    engine.emit("so far", index=0)
    engine.collectors[0].put_error(RequestLostError(1, "engine core 1 ended"))
    engine.emit("whole", "stop", index=1)
    shell.user_ns["_"].result(60)
    assert engine.read == [(None, ["random-tiny-2"])]
    listing = said(shell, "%engine recover -l", capsys)
    assert "failed: RequestLostError: engine core 1 ended" in listing


def test_what_an_engine_has_kept_and_nobody_has_seen_comes_first_and_once(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate here", capsys)
    engine.kept[None] = [kept("9-b", "newer", age=60), kept("9-a", "older", age=90)]
    answer = said(shell, "%engine recover -o result", capsys)
    assert answer.index("newer") < answer.index("older")
    assert "here" not in answer
    assert "ended early: the client left" in answer
    assert shell.user_ns["result"].text == "newer"
    assert engine.read[-1] == (None, ["9-b", "9-a"])
    engine.kept[None] = [kept("9-b", "newer", was_read=True), kept("9-a", "older", age=90, was_read=True)]
    assert "> here\nHello world" in said(shell, "%engine recover", capsys)


def test_the_list_is_in_one_order_and_marks_what_is_new(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate here", capsys)
    engine.kept[None] = [
        kept("9-a", "x" * 100, age=90, missing=1),
        kept("9-b", "seen", age=60, was_read=True, reason="length", cause=""),
        kept("9-c", "so far", age=30, reason=None, cause=""),
        kept("9-d", "", age=120, reason="error", cause="structured_outputs: no way"),
    ]
    lines = said(shell, "%engine recover --list", capsys).splitlines()
    assert lines[0].split() == ["#", "ASKED", "PROMPT", "ANSWER", "TOKENS", "END", "ENGINE", "ID"]
    assert [line.split()[-1] for line in lines[1:]] == ["random-tiny-1", "9-c", "9-b", "9-a", "9-d"]
    assert [" new " in line for line in lines[1:]] == [False, True, False, True, True]
    for line, ending in zip(
        lines[1:],
        (
            "complete",
            "still being written",
            "stopped at the limit",
            "ended early, 1 of 2 answers lost: the client left",
            "failed: structured_outputs: no way",
        ),
        strict=True,
    ):
        assert ending in line
    assert "x" * 39 + "…" in lines[4]
    assert engine.read == [(None, ["random-tiny-1"])]


def test_many_are_shown_a_part_at_a_time_and_all_on_demand(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.kept[None] = [kept(f"9-{n}", f"text {n}.", age=60 + n) for n in range(MAX_SHOWN + 2)]
    answer = said(shell, "%engine recover", capsys)
    assert answer.count("asked at") == MAX_SHOWN
    assert "2 more answers: `%engine recover` again" in answer
    assert engine.read == [(None, [f"9-{n}" for n in range(MAX_SHOWN)])]
    answer = said(shell, "%engine recover --all", capsys)
    assert answer.count("asked at") == MAX_SHOWN + 2


def test_clearing_forgets_what_has_ended_here_and_there(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate here", capsys)
    engine.kept[None] = [kept("9-a", "there"), kept("random-tiny-1", "Hello world")]
    engine.words = None
    said(shell, "%generate -a running", capsys)
    assert said(shell, "%engine recover --clear", capsys) == "2 answers forgotten\n"
    assert said(shell, "%engine recover -l", capsys).count("random-tiny-2") == 1
    engine.emit("done", "stop")
    shell.user_ns["_"].result(60)
    said(shell, "%engine recover --clear", capsys)
    assert said(shell, "%engine recover", capsys).startswith("nothing to recover")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("recover 3", "no answer '3'; there are 1 to 1"),
        ("recover 0", "no answer '0'"),
        ("recover nonsense", "no answer 'nonsense'"),
        ("recover 1 2", "unexpected '2'"),
        ("recover --lst", "did you mean --list?"),
        ("recover -o 1x", "'1x' is not a variable name"),
        ("recover --all --clear", "--all does not go with --clear"),
        ("recover 1 --all", "'1' means one answer, --all all of them"),
        ("recover -l -o x", "-o NAME means one answer, --list all of them"),
        ("recover --session ''", "--session needs a name"),
        ("recover -f html", "invalid choice: 'html'"),
    ],
)
def test_wrong_lines_are_one_clear_complaint(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, line: str, complaint: str
) -> None:
    said(shell, "%generate hi", capsys)
    message = refused(shell, f"%engine {line}")
    assert message.startswith("%engine recover: ")
    assert complaint in message
    assert "\n" not in message


def test_a_failed_answer_is_not_read_and_says_why(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    said(shell, "%generate -a hi", capsys)
    engine.emit("so far")
    engine.collectors[0].put_error(RequestLostError(1, "engine core 1 ended while it worked on it"))
    with pytest.raises(RequestLostError):
        shell.user_ns["_"].result(60)
    assert engine.read == []
    assert "ended early: RequestLostError: engine core 1 ended" in said(shell, "%engine recover", capsys)
    engine.kept[None] = [kept("random-tiny-1", "so far and further", age=0, cause="")]
    assert "so far and further" in said(shell, "%engine recover", capsys)


def test_in_a_kernel_nothing_in_prompt_or_answer_is_html(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.kept[None] = [kept(f"9-{HOSTILE}", HOSTILE, prompt=HOSTILE, cause=HOSTILE)]
    for line in ("%engine recover", "%engine recover -l", "%engine recover -f markdown"):
        publisher(kernel_shell).messages.clear()
        kernel_shell.run_cell(line).raise_error()
        for bundle in publisher(kernel_shell).outputs():
            for kind in ("text/html", "text/markdown"):
                assert "<script" not in bundle.get(kind, "")
    heading = publisher(kernel_shell).outputs()[0]
    assert "\x1b" not in heading["text/plain"]
    assert "&lt;script&gt;" in heading["text/html"]


async def test_one_that_runs_in_the_background_streams_on_until_its_end(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    (await run(kernel_shell, "%%generate -a -o handle\nhi")).raise_error()
    engine.emit("Once")
    publisher(kernel_shell).wait_for("Once")
    publisher(kernel_shell).messages.clear()
    finisher = threading.Thread(target=_finish_when_shown, args=(publisher(kernel_shell), engine))
    finisher.start()
    kernel_shell.run_cell("%engine recover -o again").raise_error()
    finisher.join(60)
    kernel_shell.user_ns["handle"].result(60)
    heading, *shown = publisher(kernel_shell).outputs()
    assert "still being written" in heading["text/plain"]
    assert any(bundle["text/plain"].startswith("Once upon a time\n\n[2 tokens") for bundle in shown)
    assert kernel_shell.user_ns["again"].text == "Once upon a time"
    await until(lambda: engine.read == [(None, ["random-tiny-1"])])


def _finish_when_shown(display: RecordingPublisher, engine: FakeClient) -> None:
    display.wait_for("still being written")
    engine.emit(" upon a time", "stop")


def test_an_interrupted_answer_has_been_seen_and_a_running_one_of_another_notebook_is_shown_as_it_is(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.words = None
    submit = engine.submit

    def interrupted(*args: Any, **options: Any) -> Any:
        collector = submit(*args, **options)
        monkeypatch.setattr(collector, "get_blocking", lambda *_, **__: interrupt())
        return collector

    def interrupt() -> None:
        raise KeyboardInterrupt

    engine.submit = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        shell.run_cell("%%generate\nhi\n").raise_error()
    assert engine.read == [(None, ["random-tiny-1"])]
    engine.kept["other"] = [kept("9-a", "so far", reason=None, cause="")]
    assert "so far" in said(shell, "%engine recover --session other", capsys)


def test_an_interrupt_ends_the_showing_and_not_the_generation(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.words = None
    said(shell, "%generate -a hi", capsys)
    handle = shell.user_ns["_"]

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nbengine.magics.answers.recover.time.sleep", interrupt)
        with pytest.raises(Interrupted, match="what is being written goes on"):
            shell.run_cell("%engine recover").raise_error()
    assert engine.aborted == []
    engine.emit("Hello", "stop")
    assert handle.result(60).text == "Hello"
