"""Loading and unloading the extension."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.magics.config import NBEngine
from nbengine.magics.extension import load, unload
from nbengine.magics.session import AsyncLLMBackend
from tests.unit.magics.conftest import FakeBackend, FakeClient


def test_load_ext_defines_the_magics(shell: InteractiveShell) -> None:
    magics = shell.magics_manager.magics
    assert {"engine", "generate", "chat", "dashboard"} <= set(magics["line"])
    assert {"generate", "chat"} <= set(magics["cell"])


def test_loading_twice_changes_nothing(shell: InteractiveShell, backend: FakeBackend) -> None:
    before = (
        list(shell.input_transformers_cleanup),
        list(shell.input_transformers_post),
        len(shell.configurables),
    )
    load(shell, backend)
    assert before == (
        shell.input_transformers_cleanup,
        shell.input_transformers_post,
        len(shell.configurables),
    )


def test_unloading_takes_everything_away_and_detaches(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    unload(shell)
    assert engine.calls == ["detach"]
    assert "engine 'random-tiny' goes on without this notebook" in capsys.readouterr().out
    assert "generate" not in shell.magics_manager.magics["cell"]
    assert "engine" not in shell.magics_manager.magics["line"]
    assert not any("nbengine" in type(item).__module__ for item in shell.configurables)
    transformers = [*shell.input_transformers_cleanup, *shell.input_transformers_post]
    assert not any("nbengine" in getattr(item, "__module__", "") for item in transformers)
    unload(shell)


@pytest.mark.parametrize("magic", ["generate", "chat"])
def test_branches_end_with_the_extension(shell: InteractiveShell, engine: FakeClient, magic: str) -> None:
    shell.run_cell(f"%%{magic} -o said --logprobs 2\nhi\n").raise_error()
    said = shell.user_ns["said"]
    engine.words = None
    branch = (said.last if magic == "chat" else said).branch(0, 7)
    unload(shell)
    assert branch.result(60).finish_reason == "abort"
    assert engine.aborted


def test_reload_ext_keeps_what_the_notebook_had(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.extension_manager.loaded.add("nbengine")
    shell.run_cell("%config NBEngine.footer = False").raise_error()
    shell.run_cell("%%chat -o said\nhi\n").raise_error()
    before = len(shell.configurables)
    for _ in range(2):
        shell.run_cell("%reload_ext nbengine").raise_error()
    assert engine.calls == []
    assert len(shell.configurables) == before
    (config,) = [item for item in shell.configurables if isinstance(item, NBEngine)]
    assert config.footer is False
    shell.run_cell("%%chat -o said\nand again\n").raise_error()
    assert len(engine.requests) == 2
    assert [message["role"] for message in shell.user_ns["said"].messages] == ["user", "assistant"] * 2
    shell.run_cell("%unload_ext nbengine").raise_error()
    assert engine.calls == ["detach"]
    assert "goes on without this notebook" in capsys.readouterr().out


def test_an_extension_that_was_unloaded_and_loaded_finds_its_engine_again(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    unload(shell)
    load(shell, backend)
    shell.run_cell("%engine attach").raise_error()
    shell.run_cell("%generate hi").raise_error()
    assert len(engine.requests) == 1


def test_the_extension_costs_no_torch() -> None:
    code = (
        "import sys, nbengine.magics.extension\n"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_a_loaded_extension_keeps_a_spare_engine_until_it_is_unloaded(
    shell: InteractiveShell, backend: FakeBackend
) -> None:
    assert backend.has_spare
    unload(shell)
    assert not backend.has_spare


def test_the_configuration_can_do_without_a_spare_engine(
    shell: InteractiveShell, backend: FakeBackend
) -> None:
    unload(shell)
    shell.config.NBEngine.spare_engine = False
    load(shell, backend)
    assert not backend.has_spare


def test_who_attaches_to_an_engine_needs_no_spare_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("nbengine.client.engines.spare.drop_spare", lambda: calls.append("drop"))
    with pytest.raises(NBEngineError, match="no engine"):
        AsyncLLMBackend().attach("nobody", session="s", progress=lambda progress: None)
    assert calls == ["drop"]


def test_a_kernel_imports_for_its_first_engine_when_the_cell_has_ended(
    shell: InteractiveShell, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    unload(shell)

    async def load_in_a_kernel() -> None:
        imported = asyncio.Event()

        def note() -> None:
            calls.append("imported")
            imported.set()

        monkeypatch.setattr("nbengine.magics.extension.import_early", note)
        load(shell, backend)
        calls.append("loaded")
        await asyncio.wait_for(imported.wait(), 60)

    asyncio.run(load_in_a_kernel())
    assert calls == ["loaded", "imported"]
