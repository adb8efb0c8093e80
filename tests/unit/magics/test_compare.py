"""`%%generate` with lists in it, where the cell blocks: what is asked, what is left behind, what is printed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import (
    EngineDeadError,
    InvalidArgumentError,
    NBEngineError,
    NotSupportedError,
    RequestError,
)
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.magics.comparison.arguments import parse_request
from nbengine.magics.comparison.result import ComparisonHandle, ComparisonResult
from nbengine.magics.comparison.view import GridState, GridTerminalView
from nbengine.magics.config import NBEngine
from nbengine.magics.extension import Extension
from nbengine.magics.generation.result import GenerationResult
from nbengine.outputs import CompletionOutput, RequestOutput
from nbengine.sampling_params import SamplingParams
from tests.unit.magics.conftest import FakeBackend, FakeClient

Capture = pytest.CaptureFixture[str]
Submit = Callable[..., RequestOutputCollector]


def refuse(engine: FakeClient, monkeypatch: pytest.MonkeyPatch, errors: dict[int, BaseException]) -> None:
    """Let the engine refuse requests, by their position."""
    original: Submit = engine.submit
    position = iter(range(1000))

    def submit(prompt: Any, params: SamplingParams, **rest: Any) -> RequestOutputCollector:
        error = errors.get(next(position))
        if error is not None:
            raise error
        return original(prompt, params, **rest)

    monkeypatch.setattr(engine, "submit", submit)


def run(shell: InteractiveShell, cell: str) -> ComparisonResult:
    shell.run_cell(cell).raise_error()
    result = shell.user_ns["_"]
    assert isinstance(result, ComparisonResult)
    return result


def test_all_requests_are_sent_before_an_output_is_read_and_each_answer_is_printed_once(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    outcome = shell.run_cell("%%generate --temperature 0,0.7 --top-p 0.5,1 -o all\nhi\n")
    outcome.raise_error()
    printed = capsys.readouterr().out
    assert printed.startswith("── temperature 0 · top_p 0.5 ──\nHello world\n[3 tokens")
    assert printed.count("Hello world") == 4
    assert "[4 answers · 12 tokens" in printed
    assert "8 of 16 prompt tokens reused" in printed
    assert "Out[" not in printed
    result = shell.user_ns["all"]
    assert result is shell.user_ns["_"] is outcome.result
    assert [(p.temperature, p.top_p) for _, p in engine.requests] == [(0, 0.5), (0, 1), (0.7, 0.5), (0.7, 1)]
    assert result.settings[2] == {"temperature": 0.7, "top_p": 0.5}
    assert result.axes == {"temperature": [0.0, 0.7], "top_p": [0.5, 1.0]}
    assert [answer.request_id for answer in result] == [c.request_id for c in engine.collectors]
    assert result.finished
    assert repr(result) == "ComparisonResult(4 results: 2 temperature × 2 top_p)"


def test_results_are_found_by_position_and_by_settings(shell: InteractiveShell, engine: FakeClient) -> None:
    result = run(shell, "%%generate --temperature 0,0.7 --seed 1,2,3\nhi\n")
    assert len(result) == 6
    assert result[1] is result.results[1] is result[{"temperature": 0, "seed": 2}]
    assert result[-2:] == result.results[4:]
    assert result.select(seed=3) == [result[2], result[5]]
    assert list(result) == result.results
    with pytest.raises(KeyError, match=r"3 results have {'temperature': 0}"):
        result[{"temperature": 0}]
    with pytest.raises(KeyError, match=r"no results have {'seed': 9}"):
        result[{"seed": 9}]
    with pytest.raises(InvalidArgumentError, match="one that was varied: temperature, seed, got 'sed'"):
        result.select(sed=1)


def test_rows_have_the_settings_and_the_figures(shell: InteractiveShell, engine: FakeClient) -> None:
    result = run(shell, "%%generate --seed 1,2\nhi\n")
    assert result.rows()[1] == {
        "seed": 2,
        "text": "Hello world",
        "finish_reason": "stop",
        "tokens": 3,
        "ttft": 0.5,
        "tokens_per_second": pytest.approx(4, rel=0.1),
        "prompt_tokens": 4,
        "cached_tokens": 2,
    }
    shell.user_ns["text"] = ["a", "b"]
    result = run(shell, "%%generate --each text -n 2\n{text}\n")
    assert [(row["text_given"], row["sample"], row["text"]) for row in result.rows()] == [
        (text, sample, "Hello world") for text in "ab" for sample in (0, 1)
    ]


def test_log_probabilities_have_a_column_where_they_are_asked_for(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    result = run(shell, "%%generate --seed 1,2 --logprobs 0\nhi\n")
    assert "logprob" not in run(shell, "%%generate --seed 1,2\nhi\n").rows()[0]
    for answer in result:
        answer.outputs[0].cumulative_logprob = -1.5
    assert [row["logprob"] for row in result.rows()] == [-1.5, -1.5]


def test_a_frame_needs_pandas_and_nothing_else_does(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = run(shell, "%%generate --each w=a,b\n{w}\n")
    with pytest.raises(NotSupportedError, match=r"to_frame\(\) needs pandas.*\.rows\(\)"):
        result.to_frame()
    fake = types.ModuleType("pandas")
    fake.DataFrame = lambda rows: ("frame", rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert result.to_frame() == ("frame", result.rows())


def test_engines_stand_side_by_side(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --name B").raise_error()
    backend.clients["B"].words = ["other"]
    result = run(shell, "%%generate --engine random-tiny,B --temperature 0,1\nhi\n")
    assert [(s["engine"], answer.text) for s, answer in zip(result.settings, result, strict=True)] == [
        ("random-tiny", "Hello world"),
        ("B", "other"),
    ] * 2
    assert len(engine.requests) == len(backend.clients["B"].requests) == 2
    with pytest.raises(UsageError, match="there is no engine 'C'"):
        shell.run_cell("%%generate --engine B,C\nhi\n").raise_error()
    assert len(backend.clients["B"].requests) == 2


def test_a_value_that_is_not_allowed_is_refused_before_anything_is_sent(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    outcome = shell.run_cell("%%generate --temperature 0,-1\nhi\n")
    assert isinstance(outcome.error_in_exec, UsageError)
    assert "temperature must be" in capsys.readouterr().err
    assert engine.requests == []


def test_what_one_request_cannot_do_stays_with_it(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    refuse(engine, monkeypatch, {1: RequestError("the prompt is too long")})
    result = run(shell, "%%generate --seed 1,2,3\nhi\n")
    printed = capsys.readouterr().out
    assert "── seed 2 ──\nfailed: the prompt is too long\n" in printed
    assert "[1 of 3 failed: the prompt is too long]" in printed
    assert [answer.finish_reason for answer in result] == ["stop", "error", "stop"]
    assert [row["error"] for row in result.rows()] == [None, "the prompt is too long", None]
    assert str(result.errors[1]) == "the prompt is too long"
    assert repr(result) == "ComparisonResult(3 results: 3 seed, 1 failed)"


def test_an_error_while_it_streams_stays_in_its_place_too(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.words = None
    original: Submit = engine.submit

    def submit(prompt: Any, params: SamplingParams, **rest: Any) -> RequestOutputCollector:
        collector = original(prompt, params, **rest)
        index = len(engine.collectors) - 1
        engine.emit(f"answer {index}", None if index == 0 else "stop", index)
        if index == 0:
            collector.put_error(RequestError("bad grammar"))
        return collector

    monkeypatch.setattr(engine, "submit", submit)
    result = run(shell, "%%generate --seed 1,2\nhi\n")
    assert [(answer.text, answer.finish_reason) for answer in result] == [
        ("answer 0", "error"),
        ("answer 1", "stop"),
    ]


@pytest.mark.parametrize(
    ("error", "shown"),
    [(RequestError("too long"), UsageError), (EngineDeadError("the engine ended"), EngineDeadError)],
)
def test_where_nothing_works_the_cell_fails_with_one_error(
    shell: InteractiveShell,
    engine: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    error: NBEngineError,
    shown: type[Exception],
    capsys: Capture,
) -> None:
    refuse(engine, monkeypatch, dict.fromkeys(range(3), error))
    outcome = shell.run_cell("%%generate --seed 1,2,3\nhi\n")
    assert type(outcome.error_in_exec) is shown
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(str(error)) == 1


def test_an_engine_that_dies_ends_the_cell_once_what_others_can_do_is_done(
    shell: InteractiveShell,
    engine: FakeClient,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    shell.run_cell("%engine start random-tiny --name B").raise_error()
    refuse(engine, monkeypatch, dict.fromkeys(range(2), EngineDeadError("killed by signal 9")))
    outcome = shell.run_cell("%%generate --engine random-tiny,B --seed 1,2 -o both\nhi\n")
    assert isinstance(outcome.error_in_exec, EngineDeadError)
    both = shell.user_ns["_"]
    assert isinstance(both, ComparisonResult)
    assert both is shell.user_ns["both"]
    assert [answer.text for answer in both] == ["", "Hello world"] * 2
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("killed by signal 9") == 1
    assert "[2 of 4 failed: the engine ended]" in printed.out
    with pytest.raises(UsageError, match="engine 'random-tiny' is not attached here"):
        shell.run_cell("%generate --engine random-tiny hi").raise_error()


def test_an_interrupt_while_requests_are_sent_ends_those_that_were(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(engine, monkeypatch, {2: KeyboardInterrupt()})
    outcome = shell.run_cell("%%generate --seed 1,2,3\nhi\n")
    assert isinstance(outcome.error_in_exec, KeyboardInterrupt)
    assert engine.aborted == [collector.request_id for collector in engine.collectors]
    assert len(engine.aborted) == 2
    assert Extension.loaded[shell].session.ongoing.snapshot() == {}


def test_answers_are_kept_and_can_branch(shell: InteractiveShell, engine: FakeClient) -> None:
    result = run(shell, "%%generate --seed 1,2 --json\nhi\n")
    kept = Extension.loaded[shell].session.ongoing.answers.newest_first()
    assert [answer.result for answer in kept] == result.results[::-1]
    assert all(answer.ended is not None for answer in kept)
    assert engine.read == [(None, [collector.engine_request_id]) for collector in engine.collectors]
    assert all(answer.tree is not None and answer.is_json for answer in result)


def test_in_the_background_a_handle_stands_for_all(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    shell.run_cell("%%generate -a -o later --seed 1,2\nhi\n").raise_error()
    handle = shell.user_ns["later"]
    assert isinstance(handle, ComparisonHandle)
    assert repr(handle) == "ComparisonHandle('2 results', running)"
    assert not handle.done
    for index in (0, 1):
        engine.emit(f"answer {index}", "stop", index)
    assert [answer.text for answer in handle.result(60)] == ["answer 0", "answer 1"]
    assert "answer" not in capsys.readouterr().out


def test_a_handle_ends_all_requests(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.words = None
    shell.run_cell("%%generate -a -o later --seed 1,2,3\nhi\n").raise_error()
    engine.emit("half", None, 0)
    engine.emit("whole", "stop", 1)
    handle = shell.user_ns["later"]
    handle.cancel()
    result = handle.result(60)
    assert [(a.text, a.finish_reason) for a in result] == [
        ("half", "abort"),
        ("whole", "stop"),
        ("", "abort"),
    ]
    assert set(engine.aborted) >= {engine.collectors[0].request_id, engine.collectors[2].request_id}


def test_a_line_magic_gives_the_result_back_and_code_can_call_it(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    shell.run_cell("found = %generate --seed 1,2 hi").raise_error()
    assert [answer.text for answer in shell.user_ns["found"]] == ["Hello world"] * 2
    code = "def ask(words):\n    return get_ipython().run_line_magic('generate', '--each words {words}')\n"
    shell.run_cell(code + "r = %generate --each w=x,y {w}").raise_error()
    assert [prompt["prompt"] for prompt, _ in engine.requests[2:]] == ["<user>x", "<user>y"]


def test_the_notebook_waits_for_no_request_that_has_ended(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ongoing = Extension.loaded[shell].session.ongoing
    seen: list[dict[str, bool]] = []
    original: Submit = engine.submit

    def submit(prompt: Any, params: SamplingParams, **rest: Any) -> RequestOutputCollector:
        seen.append(ongoing.snapshot())
        return original(prompt, params, **rest)

    monkeypatch.setattr(engine, "submit", submit)
    run(shell, "%%generate --seed 1,2,3\nhi\n")
    assert [list(state.values()) for state in seen] == [[], [True], [True, True]]
    assert ongoing.snapshot() == {}


def test_the_help_tells_of_lists_and_each(shell: InteractiveShell, capsys: Capture) -> None:
    shell.run_cell("%generate -h").raise_error()
    printed = capsys.readouterr().out
    for words in (
        "--temperature 0,0.7,1",
        "--each questions",
        '--each df["question"]',
        "--diff",
        "to_frame()",
    ):
        assert words in printed


def test_defaults_that_pandas_would_need_are_not_imported(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    run(shell, "%%generate --each w=a,b\n{w}\n").rows()
    assert "pandas" not in sys.modules


def test_where_every_stream_fails_the_cell_fails_with_the_first_error(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    engine.words = None
    original: Submit = engine.submit

    def submit(prompt: Any, params: SamplingParams, **rest: Any) -> RequestOutputCollector:
        collector = original(prompt, params, **rest)
        collector.put_error(RequestError(f"refused {collector.request_id}"))
        return collector

    monkeypatch.setattr(engine, "submit", submit)
    outcome = shell.run_cell("%%generate --seed 1,2\nhi\n")
    assert isinstance(outcome.error_in_exec, UsageError)
    assert capsys.readouterr().err == "UsageError: refused random-tiny-1\n"
    assert [answer.finish_reason for answer in shell.user_ns["_"]] == ["error", "error"]


def absorb(result: GenerationResult, text: str, finish_reason: str | None = None) -> None:
    completion = CompletionOutput(0, text, [1], finish_reason=finish_reason)
    result.absorb(RequestOutput("r", None, [1], [completion], finish_reason is not None))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_prints_what_is_complete_in_order_and_meanwhile_how_far_it_is(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    plan = parse_request("--seed 1,2,3", "hi\n", NBEngine(), {})
    results = [GenerationResult(str(index), "hi") for index in range(3)]
    comparison = ComparisonResult(plan.axes, [c.settings for c in plan.combinations], results)
    view = GridTerminalView(GridState(plan, [SamplingParams(max_tokens=9)] * 3, comparison))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)

    def printed() -> str:
        lines = capsys.readouterr().out.replace("\x1b[2K", "").split("\r")
        return "".join(line for line in lines if not line.startswith("\x1b[2m["))

    absorb(results[1], "second", "stop")
    absorb(results[0], "fir")
    view.update(comparison)
    out = capsys.readouterr().out
    assert ("1 of 3 answers · 1 running · 2 tokens" in out) is is_terminal
    assert "second" not in out
    absorb(results[0], "st", "stop")
    view.update(comparison)
    assert printed() == "── seed 1 ──\nfirst\n[2 tokens]\n\n── seed 2 ──\nsecond\n[1 token]\n\n"
    results[2].abort()
    view.finish(comparison, "note")
    rest = printed()
    assert rest.startswith("── seed 3 ──\n")
    assert "first" not in rest
    assert "note" in rest
