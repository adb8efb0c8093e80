"""Copies of the mould are what a start would have made, and files and variables that ask for fresh processes get them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from process_support.engine_under_test import EngineUnderTest

StartEngine = Callable[..., EngineUnderTest]


def is_copy(pid: int) -> bool:
    """Return whether a process that has no use for torch has it, as the mould does."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def ready(start_engine: StartEngine) -> tuple[EngineUnderTest, psutil.Process]:
    engine = start_engine()
    engine.wait_ready()
    return engine, psutil.Process(engine.host.pid)


def test_a_copy_has_the_surroundings_that_a_start_gives(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NBENGINE_LOG_LEVEL", "of this test")
    # As an import of transformers does, in a test before this one.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    engine, host = ready(start_engine)
    core = engine.core()
    assert is_copy(host.pid)
    assert is_copy(core.pid)
    assert (host.ppid(), core.ppid()) == (os.getpid(), host.pid)
    assert os.getsid(host.pid) == os.getsid(core.pid) == host.pid
    assert os.getpgid(core.pid) == core.pid
    assert host.cwd() == core.cwd() == str(tmp_path)
    assert engine.log().count("NBENGINE_LOG_LEVEL=OF THIS TEST is not a log level") == 2
    assert os.readlink(f"/proc/{host.pid}/fd/2") == str(engine.log_path)
    assert " ".join(host.cmdline()).startswith("nbengine: host ")


def test_a_variable_that_is_read_before_main_makes_a_process_fresh(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    engine, host = ready(start_engine)
    assert not is_copy(host.pid)
    assert not is_copy(engine.core().pid)
