"""A cell finds again what it had asked and got before, of which little is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.frontend.runs.place import store_path
from nbengine.magics.answers import rerun
from nbengine.magics.answers.diff import Earlier
from nbengine.magics.answers.rerun import EarlierAnswers
from nbengine.magics.config import NBEngine
from nbengine.magics.extension import load, unload
from nbengine.magics.generation.request import Origin, Request
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.outputs import CompletionOutput, RequestOutput
from nbengine.sampling_params import SamplingParams
from tests.unit.magics.conftest import FakeBackend, FakeClient
from tests.unit.magics.kernel_cells import in_cell, run, until


class Asked(Request):
    """A request to no engine."""

    def __init__(self, prompt: str) -> None:
        nobody: Any = None
        super().__init__(Origin(nobody, SamplingParams()), prompt, prompt)

    def answer(self, text: str) -> None:
        """Let it have its answer."""
        completion = CompletionOutput(0, text, [1], finish_reason="stop")
        self.result.absorb(RequestOutput("r", None, [1], [completion], True))
        self.end(shown=False)


async def test_each_of_several_generations_of_a_cell_is_compared_with_its_own_predecessor(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    loop = "kept = []\nfor w in ('a', 'b'):\n    r = %generate {w}\n    kept.append(r)"
    in_cell(kernel_shell, "one", "run 1")
    (await run(kernel_shell, loop)).raise_error()
    assert [r.previous for r in kernel_shell.user_ns["kept"]] == [None, None]
    in_cell(kernel_shell, "one", "run 2")
    (await run(kernel_shell, loop.replace("('a', 'b')", "('c', 'd', 'e')"))).raise_error()
    kept = kernel_shell.user_ns["kept"]
    assert [r.previous and r.previous.prompt for r in kept] == ["a", "b", None]


def test_of_what_a_cell_had_before_only_the_first_texts_are_kept(
    kernel_shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerun, "MOST_MAGICS", 3)
    earlier = EarlierAnswers(kernel_shell, Recorder(kernel_shell, NBEngine()))
    for execution in ("run 1", "run 2"):
        in_cell(kernel_shell, "one", execution)
        asked = [Asked(f"{execution}: {number}") for number in range(6)]
        results = [weakref.ref(request.result) for request in asked]
        for request in asked:
            earlier.begin()({}, request)
            request.answer("x")
        before = [request.result.previous for request in asked]
        del request, asked
        gc.collect()
        assert [result() for result in results] == [None] * 6
    assert before == [Earlier(f"run 1: {number}", "x") for number in range(3)] + [None] * 3


async def test_what_a_request_that_runs_on_has_by_now_is_what_the_cell_had(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    in_cell(kernel_shell, "one", "run 1")
    (await run(kernel_shell, "%%generate -a -o first\nhi\n")).raise_error()
    engine.emit("so far")
    await until(lambda: kernel_shell.user_ns["first"].text == "so far")
    in_cell(kernel_shell, "one", "run 2")
    (await run(kernel_shell, "%%generate -a -o second\nhi\n")).raise_error()
    for index in range(2):
        engine.emit(" and on", "stop", index)
    assert (await kernel_shell.user_ns["second"]).previous == Earlier("hi", "so far")
    in_cell(kernel_shell, "one", "run 3")
    engine.words = ["again"]
    (await run(kernel_shell, "%%generate -o third\nhi\n")).raise_error()
    assert kernel_shell.user_ns["third"].previous == Earlier("hi", " and on")


def test_a_request_that_was_refused_had_no_answer(kernel_shell: InteractiveShell) -> None:
    earlier = EarlierAnswers(kernel_shell, Recorder(kernel_shell, NBEngine()))
    for execution in ("run 1", "run 2"):
        in_cell(kernel_shell, "one", execution)
        refused = Asked("hi")
        refused.result.abort("error")
        earlier.begin()({"seed": 1}, refused)
        assert refused.on_end == []
    assert refused.result.previous == Earlier("hi", "")


async def test_what_a_cell_had_in_a_kernel_before_is_found_among_the_kept_runs(
    kernel_shell: InteractiveShell, backend: FakeBackend, engine: FakeClient
) -> None:
    shell = kernel_shell
    cell = "%generate one\n%generate --temperature 0,0.5 two\n%generate three"
    for execution in ("run 1", "run 2"):
        engine.words = [execution]
        in_cell(shell, "it", execution)
        (await run(shell, cell)).raise_error()
    in_cell(shell, "another", "run 3")
    (await run(shell, "%generate elsewhere")).raise_error()
    # As after a restart, nothing is known any more.
    unload(shell)
    load(shell, backend)
    shell.run_cell("%engine attach").raise_error()
    in_cell(shell, "it", "run 4")
    again = (
        "a = %generate --diff one\nb = %generate --diff --temperature 0,0.5,1 two\nc = %generate --diff three"
    )
    (await run(shell, again)).raise_error()
    names = shell.user_ns
    assert names["a"].previous == Earlier("one", "run 2")
    assert [each.previous for each in names["b"]] == [Earlier("two", "run 2")] * 2 + [None]
    assert names["c"].previous == Earlier("three", "run 2")


async def test_kept_runs_that_cannot_be_read_cost_the_comparison_alone(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    place = store_path()
    place.parent.mkdir()
    place.write_text("no database " * 100)
    in_cell(kernel_shell, "it", "run 1")
    (await run(kernel_shell, "a = %generate --diff one")).raise_error()
    assert kernel_shell.user_ns["a"].text == "Hello world"
    assert kernel_shell.user_ns["a"].previous is None
    assert "cannot be read: file is not a database" in capsys.readouterr().out
