"""Everything that is asked in a notebook is kept, unless the configuration says otherwise."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from runs_made import made_run

import nbengine
from nbengine.errors import EngineDeadError, RequestError
from nbengine.frontend.runs.place import store_path
from nbengine.frontend.runs.run import Limits
from nbengine.frontend.runs.store import RunStore
from nbengine.frontend.runs.writer import RunWriter
from nbengine.magics.config import NBEngine
from nbengine.magics.extension import Extension, unload
from nbengine.magics.kept_runs import recording
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kept_answers import Capture, said
from tests.unit.magics.kernel_cells import in_cell, run


def rows() -> list[dict[str, Any]]:
    """Return the rows of all kept runs."""
    return nbengine.runs().rows()


def test_a_prompt_is_kept_with_all_that_belongs_to_it(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/study.ipynb")
    before = time.time()
    shell.user_ns["topic"] = "bread"
    shell.run_cell(
        "%%generate --temperature 0.25 --stop END --system Short.\nTell of {topic}\n"
    ).raise_error()
    (row,) = rows()
    assert before <= row["time"] <= time.time()
    assert (row["run"], row["kind"], row["engine"], row["model"]) == (
        1,
        "generate",
        "random-tiny",
        "random-tiny",
    )
    assert (row["prompt"], row["text"], row["finish_reason"], row["error"]) == (
        "Tell of bread",
        "Hello world",
        "stop",
        "",
    )
    assert row["messages"] == [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Tell of bread"},
    ]
    assert (row["temperature"], row["stop"], row["system"], row["chat"]) == (0.25, ["END"], "Short.", True)
    assert (row["max_tokens"], row["seed"], row["n"]) == (512, None, 1)
    assert (row["tokens"], row["prompt_tokens"], row["cached_tokens"]) == (3, 4, 2)
    assert row["metrics"]["ttft"] == pytest.approx(0.5, abs=0.01)
    assert row["metrics"]["total"] == pytest.approx(1.0, abs=0.01)
    assert row["nbengine"] == nbengine.__version__
    assert row["notebook"] == "/home/me/study.ipynb"
    assert not {"output_kind", "eos_token_id"} & {*row["settings"]}


async def test_the_cell_and_its_execution_are_kept(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    in_cell(kernel_shell, "one", "run 1")
    (await run(kernel_shell, "%generate --raw hi")).raise_error()
    (row,) = rows()
    assert (row["cell"], row["execution"]) == ("one", "run 1")
    assert (row["chat"], row["messages"]) == (False, [])


def test_every_cell_of_a_comparison_is_a_run(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.user_ns["words"] = ["tree", "house"]
    shell.run_cell("%%generate --temperature 0.1,0.7 --each words\n{words}\n").raise_error()
    kept = rows()
    assert [(row["prompt"], row["temperature"]) for row in kept] == [
        ("tree", 0.1),
        ("tree", 0.7),
        ("house", 0.1),
        ("house", 0.7),
    ]
    assert [row["varied"] for row in kept][1] == {"words": "tree", "temperature": 0.7}
    assert {row["kind"] for row in kept} == {"comparison"}
    (first,) = {row["comparison"] for row in kept}
    shell.run_cell("%%generate --temperature 0.1,0.7\nhi\n").raise_error()
    assert first
    assert first not in {row["comparison"] for row in rows()[4:]}


def test_completions_are_kept_with_their_run(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%generate -n 2 hi").raise_error()
    (row,) = rows()
    expected = {"text": "Hello world", "finish_reason": "stop", "tokens": 3}
    assert (row["outputs"], row["tokens"]) == ([expected, expected], 6)
    assert [len(nbengine.runs(find=text)) for text in ("WORLD", "finish_reason")] == [1, 0]


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word.
    """
    return f"{word} is a word"


def test_every_answer_of_a_conversation_is_a_run_those_with_calls_as_well(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    shell.user_ns["look_up"] = look_up
    call = '<tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call>'
    engine.turns = [[call], ["It is a word."]]
    shell.run_cell("%chat --tools look_up --system Short. What is x?").raise_error()
    shell.run_cell("%chat And y?").raise_error()
    kept = rows()
    assert [(row["kind"], row["prompt"], row["text"]) for row in kept] == [
        ("chat", "What is x?", call),
        ("chat", "What is x?", "It is a word."),
        ("chat", "And y?", "Hello world"),
    ]
    assert [[message["role"] for message in row["messages"]] for row in kept] == [
        ["system", "user"],
        ["system", "user", "assistant", "tool"],
        ["system", "user", "assistant", "tool", "assistant", "user"],
    ]
    assert [row["settings"].get("tools", [{}])[0].get("function", {}).get("name") for row in kept] == [
        "look_up",
        "look_up",
        None,
    ]


def test_what_failed_or_was_cut_off_is_kept_as_such(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.refusal = RequestError("the prompt is too long")
    with pytest.raises(UsageError):
        shell.run_cell("%generate refused").raise_error()
    engine.refusal = None
    engine.words = None
    shell.run_cell("%generate -a -o handle cut off").raise_error()
    engine.emit("so far")
    shell.user_ns["handle"].cancel()
    shell.user_ns["handle"].result(60)
    shell.run_cell("%generate -a -o handle dead").raise_error()
    engine.collectors[-1].put_error(EngineDeadError("killed"))
    with pytest.raises(EngineDeadError):
        shell.user_ns["handle"].result(60)
    assert [(row["prompt"], row["text"], row["finish_reason"], row["error"]) for row in rows()] == [
        ("refused", "", "error", "RequestError: the prompt is too long"),
        ("cut off", "so far", "abort", ""),
        ("dead", "", "abort", "EngineDeadError: killed"),
    ]
    assert [row["prompt"] for row in nbengine.runs(errors=True)] == ["refused", "dead"]


def test_nothing_is_written_while_keeping_is_off(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%config NBEngine.keep_runs = False").raise_error()
    shell.run_cell("%generate secret").raise_error()
    shell.run_cell("%chat secret").raise_error()
    shown = said(shell, "%runs", capsys)
    assert "no run has been kept yet" in shown
    assert "what is asked now is not kept" in shown
    assert rows() == []
    unload(shell)
    assert not store_path().parent.exists()


@pytest.mark.parametrize("first", [True, False])
def test_a_request_during_which_keeping_was_off_is_not_kept(
    shell: InteractiveShell, engine: FakeClient, first: bool
) -> None:
    engine.words = None
    shell.run_cell(f"%config NBEngine.keep_runs = {first}").raise_error()
    shell.run_cell("%generate -a -o handle hi").raise_error()
    shell.run_cell(f"%config NBEngine.keep_runs = {not first}").raise_error()
    engine.emit("done", "stop")
    shell.user_ns["handle"].result(60)
    assert rows() == []


def test_the_limits_are_those_of_the_configuration(shell: InteractiveShell, engine: FakeClient) -> None:
    store = RunStore(store_path())
    store.add([made_run(time=time.time() - 5 * 86400)], Limits(max_days=None))
    shell.run_cell("%config NBEngine.runs_max_days = 10").raise_error()
    shell.run_cell("%generate hi").raise_error()
    assert len(rows()) == 2
    shell.run_cell("%config NBEngine.runs_max_days = 3").raise_error()
    shell.run_cell("%generate hi").raise_error()
    assert [row["run"] for row in rows()] == [2, 3]
    shell.run_cell("%config NBEngine.runs_max_mb = 1").raise_error()
    engine.words = ["x" * 600_000]
    shell.run_cell("%generate big").raise_error()
    shell.run_cell("%generate big").raise_error()
    assert [row["run"] for row in rows()] == [5]


def test_a_store_that_cannot_be_written_is_told_once_and_prompts_go_on(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    place = store_path().parent
    place.write_text("a file in its place")
    shell.run_cell("%generate one").raise_error()
    Extension.loaded[shell].recorder.writer.flush()
    told = []
    for _ in range(3):
        told.append(said(shell, "%generate again", capsys).count("not kept: the runs in"))
        Extension.loaded[shell].recorder.writer.flush()
    assert told == [1, 0, 0]
    place.unlink()
    said(shell, "%generate kept", capsys)
    assert [row["prompt"] for row in rows()] == ["kept"]


def test_the_store_lies_beside_the_history_of_ipython(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%generate hi").raise_error()
    unload(shell)
    profile = shell.profile_dir
    assert profile is not None
    assert [each.name for each in (Path(profile.location) / "nbengine").iterdir()] == ["runs.sqlite"]


def test_threads_whose_answers_end_at_once_share_one_writer(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recording.Recorder(shell, NBEngine())
    found: list[RunWriter] = []
    other = threading.Thread(target=lambda: found.append(recorder.writer))

    def make(store: RunStore) -> RunWriter:
        if other.ident is None:
            other.start()
            # Held up until this one is made, it does not end now; else it makes another one.
            other.join(0.2)
        return RunWriter(store)

    monkeypatch.setattr(recording, "RunWriter", make)
    writer = recorder.writer
    other.join(60)
    assert found == [writer]


def test_a_models_version_is_its_revision_or_tells_its_files_apart(tmp_path: Path) -> None:
    from nbengine.config import ModelConfig
    from nbengine.magics.kept_runs.recording import model_version

    weights = tmp_path / "model.safetensors"
    weights.write_text("one")

    def local(**given: Any) -> ModelConfig:
        return ModelConfig(model="m", directory=str(tmp_path), weights=(str(weights),), **given)

    first = model_version(local())
    assert first.startswith("files ")
    assert model_version(local()) == first
    weights.write_text("another")
    assert model_version(local()) not in ("", first)
    weights.unlink()
    assert model_version(local()) == ""
    assert model_version(local(revision="main")) == "main"
    hub = "/cache/models--a--b/snapshots/0123abc"
    assert (
        model_version(ModelConfig(model="a/b", directory=hub, weights=(f"{hub}/x",), revision="main"))
        == "0123abc"
    )
