"""An engine's log tells of its start, stage by stage, with the seconds of a clock that the test sets."""

from __future__ import annotations

import logging
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

import nbengine
from nbengine.config import ModelConfig
from nbengine.engine import start_log
from nbengine.engine.start_log import StartLog, log_beginning
from nbengine.ipc.control_messages import Progress
from nbengine.runtime.logs import log_end, log_tail


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=start_log.__name__)


def test_the_first_line_names_engine_model_and_versions(caplog: pytest.LogCaptureFixture) -> None:
    log_beginning("mine", ModelConfig(model="random-tiny", directory="/models/tiny"))
    versions = (
        f"nbengine {nbengine.__version__}, torch {version('torch')}, transformers {version('transformers')}"
    )
    assert caplog.messages == [
        f"engine mine, model random-tiny (/models/tiny), {versions}, Python {platform.python_version()}"
    ]


def test_a_package_that_is_not_there_is_said_to_be_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_log, "PACKAGES", ("nobody-has-this",))
    log_beginning("mine", ModelConfig())
    assert f"(not found yet), nbengine {nbengine.__version__}, no nobody-has-this, Python" in caplog.text


def test_every_stage_is_said_with_its_seconds_as_soon_as_it_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 10.0
    log = StartLog(lambda: now, began=8.0)
    log(Progress("load", "reading the weights' headers", 0.0, 0.0))
    assert caplog.messages == ["start: process took 2.00 s"]
    now = 13.0
    log(Progress("load", "loaded the weights", 1.0, 3.0))
    assert len(caplog.messages) == 1
    now = 14.5
    # It reports at its end alone, and had begun before.
    log(Progress("profile", "2 GiB for the KV cache", 1.0, 1.0))
    log(Progress("kv"))
    now = 14.75
    log(Progress("kv", "64 blocks", 1.0, 0.25))
    log.ready()
    log(Progress("load", "the weights again, after a sleep", 0.5, 1.0))
    assert caplog.messages[1:] == [
        "start: load took 3.50 s (loaded the weights)",
        "start: profile took 1.00 s (2 GiB for the KV cache)",
        "start: kv took 0.25 s (64 blocks)",
        "start: takes requests after 6.75 s",
    ]


def test_what_is_shown_of_the_log_when_something_ended_is_not_how_it_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log_beginning("e", ModelConfig("m"))
    path = tmp_path / "log"
    lines = [f"2026-01-01 00:00:00,000 INFO [host] {r.name}: {r.getMessage()}" for r in caplog.records]
    path.write_text("\n".join([*lines, "2026-01-01 00:00:01,000 ERROR [core 0] x: it broke", "a trace"]))
    path.chmod(0o600)
    assert log_tail(path) == "2026-01-01 00:00:01,000 ERROR [core 0] x: it broke\na trace"
    assert log_end(path, 40) == path.read_text()
    assert log_end(path, 1) == "a trace"
