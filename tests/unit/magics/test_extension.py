"""Loading and unloading the extension."""

from __future__ import annotations

import subprocess
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.extension import load, unload
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
    assert branch.result(5).finish_reason == "abort"
    assert engine.aborted


def test_a_reloaded_extension_finds_its_engine_again(
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
        "heavy = {'torch', 'transformers', 'numba'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
