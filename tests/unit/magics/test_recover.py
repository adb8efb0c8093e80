"""`%engine recover`: this kernel's answers and an engine's, in what order, how shown, and what is said of the rest."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.connection import write_connection
from nbengine.errors import EngineDeadError, RequestLostError, UtilityError
from nbengine.frontend.transcripts import Transcript
from nbengine.magics.generation.answers import Answers, kept_answer, merged, selected
from nbengine.magics.generation.recover import MAX_SHOWN
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.interrupts import Interrupted
from nbengine.outputs import CompletionOutput, RequestOutput
from tests.unit.magics.conftest import FakeBackend, FakeClient, RecordingPublisher
from tests.unit.magics.kernel_cells import publisher, run, until

Capture = pytest.CaptureFixture[str]
HOSTILE = "<script>alert(1)</script>\x1b[31m"


def kept(
    request_id: str,
    text: str,
    *,
    age: float = 60.0,
    reason: str | None = "abort",
    cause: str = "the client left",
    was_read: bool = False,
    prompt: str = "why?",
    missing: int = 0,
) -> Transcript:
    """What an engine has kept; a token a character."""
    submitted = time.time() - age
    completion = CompletionOutput(0, text, [ord(c) for c in text], None, None, reason)
    output = RequestOutput(request_id, prompt, None, [completion], reason is not None)
    ended = None if reason is None else submitted + 1
    return Transcript(request_id, "s", prompt, output, 3, submitted, ended, cause, was_read, missing)


def said(shell: InteractiveShell, line: str, capsys: Capture) -> str:
    """What a line that succeeds prints."""
    capsys.readouterr()
    shell.run_cell(line).raise_error()
    return capsys.readouterr().out


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
    shell.user_ns["answer"].branch(1, 7).result(5)
    listing = said(shell, "%engine recover -l", capsys).splitlines()[1:]
    assert [line.split()[-1] for line in listing] == [f"random-tiny-{number}" for number in (4, 3, 2, 1)]
    assert engine.labels[2:] == ["hi", "hi"]
    assert "Hello world" in said(shell, "%engine recover 4", capsys)


def test_of_a_comparison_in_which_some_fail_only_the_others_count_as_seen(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    said(shell, "%%generate -a --temperature 0,0.7\nhi", capsys)
    engine.emit("so far", index=0)
    engine.collectors[0].put_error(RequestLostError(1, "engine core 1 ended"))
    engine.emit("whole", "stop", index=1)
    shell.user_ns["_"].result(5)
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
    shell.user_ns["_"].result(5)
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
        ("recover -o 1x", "'1x' is not a name of a variable"),
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


def test_nothing_to_recover_says_where_there_might_be_something(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    assert "no engine runs, and what an engine has kept is gone with it" in said(
        shell, "%engine recover", capsys
    )
    said(shell, "%engine start random-tiny --name one", capsys)
    client = backend.clients["one"]
    client.unread_sessions = {"kernel-7": 2, "kernel-8": 0}
    answer = said(shell, "%engine recover -l", capsys)
    assert "no answer of this notebook is kept" in answer
    assert "engine 'one' has 2 answers that nobody has read: %engine recover --session kernel-7" in answer
    assert "kernel-8" not in answer
    client.kept["kernel-7"] = [kept("5-x", "from elsewhere")]
    assert "from elsewhere" in said(shell, "%engine recover --session kernel-7", capsys)
    assert client.read == [("kernel-7", ["5-x"])]
    assert (
        said(shell, "%engine recover --session other", capsys) == "nothing has been kept of session 'other'\n"
    )
    said(shell, "%engine detach", capsys)
    assert "`%engine attach`: one" in said(shell, "%engine recover", capsys)


def test_a_restarted_kernel_joins_its_engine_by_itself(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    engine.kept[None] = [kept("9-a", "from before")]
    # What a killed kernel leaves: the mark in the engine's directory, and nothing else.
    shell.magics_manager.registry["EngineMagics"]._session._engines.clear()
    answer = said(shell, "%engine recover", capsys)
    assert backend.attached == ["random-tiny"]
    assert "from before" in answer


def test_an_engine_that_cannot_be_asked_is_named_and_the_kernels_own_answers_are_shown(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate here", capsys)
    for error, reason in (
        (UtilityError("engine core 1 has ended"), "core 1 has ended"),
        (TimeoutError(), "no answer"),
    ):
        engine.answers["transcripts"] = error
        answer = said(shell, "%engine recover", capsys)
        assert "> here\nHello world" in answer
        assert "what engine 'random-tiny' has kept cannot be read: " in answer
        assert reason in answer


def test_an_engine_that_does_not_answer_is_asked_once_and_named(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%engine start random-tiny --name other", capsys)
    backend.clients["other"].unread_sessions = {"kernel-7": 1}
    engine.answers |= {"transcripts": TimeoutError(), "transcript_sessions": AssertionError("asked again")}
    assert said(shell, "%engine recover", capsys).splitlines() == [
        "nothing found",
        "what engine 'random-tiny' has kept cannot be read: no answer",
        "engine 'other' has 1 answer that nobody has read: %engine recover --session kernel-7",
    ]
    assert said(shell, "%engine recover --session s", capsys).startswith("nothing found of session 's'\n")
    engine.answers = {"transcript_sessions": TimeoutError()}
    found = said(shell, "%engine recover", capsys)
    assert "what engine 'random-tiny' has kept cannot be read: no answer" in found
    assert "--session kernel-7" in found


def test_what_an_engine_does_not_note_or_forget_is_said_and_the_rest_is_done(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%engine start random-tiny --name other", capsys)
    said(shell, "%generate here", capsys)
    backend.clients["other"].kept[None] = [kept("9-b", "there")]
    engine.kept[None] = [kept("9-a", "still there")]
    engine.answers["read_transcripts"] = EngineDeadError("gone")
    shown = said(shell, "%engine recover", capsys)
    assert "still there" in shown
    assert "what engine 'random-tiny' has kept cannot be marked as read: gone" in shown
    assert backend.clients["other"].read[-1] == (None, ["9-b"])
    engine.answers["forget_transcripts"] = TimeoutError()
    assert said(shell, "%engine recover --clear", capsys).splitlines() == [
        "2 answers forgotten",
        "what engine 'random-tiny' has kept cannot be forgotten: no answer",
    ]
    assert said(shell, "%engine recover -l", capsys).count("9-a") == 1


def test_engines_of_the_notebook_that_are_not_attached_are_named(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    engine.kept[None] = [kept("9-a", "from before")]
    # What "Restart and run all" leaves where the first cell starts an engine.
    shell.magics_manager.registry["EngineMagics"]._session._engines.clear()
    said(shell, "%engine start random-tiny --name second", capsys)
    note = (
        "engine 'random-tiny' of this notebook is not attached: `%engine attach random-tiny`, then "
        "`%engine recover` again"
    )
    assert said(shell, "%engine recover", capsys) == f"nothing found\n{note}\n"
    said(shell, "%generate here", capsys)
    shown = said(shell, "%engine recover", capsys)
    assert "> here\nHello world" in shown
    assert note in shown
    assert note in said(shell, "%engine recover -l", capsys)
    assert said(shell, "%engine recover --clear", capsys) == f"1 answer forgotten\n{note}\n"
    assert note not in said(shell, "%engine recover --session s", capsys)
    said(shell, "%engine attach random-tiny", capsys)
    shown = said(shell, "%engine recover", capsys)
    assert "from before" in shown
    assert "not attached" not in shown
    said(shell, "%engine detach second", capsys)
    assert "not attached" not in said(shell, "%engine recover", capsys)


def test_what_a_restarted_core_had_kept_is_said_to_be_lost(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    said(shell, "%generate here", capsys)
    engine.connection.ready[0].incarnation = 2
    write_connection(engine.connection)
    assert (
        "engine core 0 of engine 'random-tiny' has died and was started again: what it had kept is lost"
        in said(shell, "%engine recover", capsys)
    )


def test_a_failed_answer_is_not_read_and_says_why(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    said(shell, "%generate -a hi", capsys)
    engine.emit("so far")
    engine.collectors[0].put_error(RequestLostError(1, "engine core 1 ended while it worked on it"))
    with pytest.raises(RequestLostError):
        shell.user_ns["_"].result(5)
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
    finisher.join(5)
    kernel_shell.user_ns["handle"].result(5)
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
        patch.setattr("nbengine.magics.generation.recover.time.sleep", interrupt)
        with pytest.raises(Interrupted, match="what is being written goes on"):
            shell.run_cell("%engine recover").raise_error()
    assert engine.aborted == []
    engine.emit("Hello", "stop")
    assert handle.result(5).text == "Hello"


def test_an_engine_that_died_leaves_the_kernel_its_own_answers(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    said(shell, "%generate -a hi", capsys)
    engine.emit("last words")
    engine.collectors[0].put_error(EngineDeadError("the engine core was killed"))
    with pytest.raises(EngineDeadError):
        shell.user_ns["_"].result(5)
    engine.die()
    assert "last words" in said(shell, "%engine recover", capsys)


# The list of answers.


def make_result(request_id: str, num_tokens: int) -> GenerationResult:
    result = GenerationResult(request_id, "why?")
    completion = CompletionOutput(0, "", [1] * num_tokens, finish_reason="stop")
    result.absorb(RequestOutput(request_id, None, [1], [completion], True))
    return result


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30))
def test_the_kernel_keeps_the_latest_within_bounds_and_all_that_still_run(history) -> None:
    answers = Answers(max_answers=5, max_tokens=60)
    begun = []
    for number, (num_tokens, ends) in enumerate(history):
        answer = answers.begin(str(number), make_result(str(number), num_tokens), "e")
        begun.append(answer)
        if ends:
            answers.end(answer)
    found = answers.newest_first()
    assert [answer for answer in begun[::-1] if answer.ended is None] == [a for a in found if a.ended is None]
    ended = [answer for answer in begun[:-1] if answer.ended is not None]
    left = [answer for answer in ended if answer in found]
    # What is left are the latest, and one more would not have fitted.
    assert left == ended[len(ended) - len(left) :]
    running = [answer for answer in begun if answer.ended is None or answer is begun[-1]]
    if left:
        assert len(left) + len(running) <= 5
        assert sum(a.num_tokens for a in left + running) <= 60
    if len(left) < len(ended):
        more = ended[len(ended) - len(left) - 1 :] + running
        assert len(more) > 5 or sum(a.num_tokens for a in more) > 60


def test_an_answer_that_both_have_is_the_kernels_unless_the_engine_has_more() -> None:
    answers = Answers()
    own = answers.begin("r", make_result("r", 5), "e")
    for length, running, expected in ((5, False, own), (6, True, own), (4, False, own), (6, False, None)):
        own.ended = None if running else 1.0
        theirs = kept_answer(kept("r", "x" * length), "e")
        assert merged([own], [theirs]) == [expected or theirs]


def test_a_number_counts_from_the_latest_and_an_id_is_exact() -> None:
    found = [kept_answer(kept(request_id, "x"), "e") for request_id in ("7", "2", "abc")]
    assert selected(found, "1") is found[0]
    assert selected(found, "2") is found[1]
    assert selected(found, "7") is found[0]
    assert selected(found, "abc") is found[2]
    assert selected(found, "ab") is None
    assert selected(found, "²") is None
