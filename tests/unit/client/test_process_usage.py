"""Looking at processes that vanish, belong to others or have strange names."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nbengine.client.observe import process_usage
from nbengine.client.observe.process_usage import ProcessUsage, client_pids, printable, usage_of
from nbengine.config import EngineConfig, ModelConfig
from nbengine.runtime.connection import ConnectionInfo

PID = 4711


class FakeProcess:
    """A process whose attributes are values, or errors to raise."""

    def __init__(self, **answers: Any) -> None:
        self.pid = PID
        self.answers = {
            "ppid": 2,
            "status": psutil.STATUS_SLEEPING,
            "cmdline": ["/usr/bin/python3", "x.py"],
            "name": "python3",
            "memory_info": SimpleNamespace(rss=5),
            "cpu_times": SimpleNamespace(user=1.0, system=0.5),
            "num_threads": 3,
            **answers,
        }

    @contextlib.contextmanager
    def oneshot(self) -> Iterator[None]:
        yield

    def __getattr__(self, name: str) -> Any:
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return lambda: answer


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Look at a process made up of answers, whose session is 1."""

    def look(session: int | None = None, parent: int | None = None, **answers: Any) -> ProcessUsage:
        monkeypatch.setattr(process_usage.psutil, "Process", lambda pid: FakeProcess(**answers))
        monkeypatch.setattr(process_usage.os, "getsid", lambda pid: 1)
        return usage_of(PID, session=session, parent=parent)

    return look


def test_this_process_is_seen_as_it_is() -> None:
    usage = usage_of(os.getpid(), session=os.getsid(0), parent=os.getppid())
    assert usage.is_running
    assert usage.memory_bytes is not None
    assert usage.memory_bytes > 1 << 20
    assert usage.cpu_seconds is not None
    assert usage.num_threads == psutil.Process().num_threads()


def test_numbers_and_title_are_those_of_the_system(look: Any) -> None:
    assert look(session=1, parent=2) == ProcessUsage(PID, "python3 x.py", True, 5, 1.5, 3)


@pytest.mark.parametrize("attribute", ["status", "cmdline", "memory_info", "cpu_times", "num_threads"])
@pytest.mark.parametrize("error", [psutil.NoSuchProcess(PID), psutil.ZombieProcess(PID)])
def test_a_process_that_vanishes_while_it_is_read_is_gone(
    look: Any, attribute: str, error: Exception
) -> None:
    assert look(**{attribute: error}) == ProcessUsage(PID)


def test_a_zombie_and_a_process_of_another_session_or_parent_are_gone(look: Any) -> None:
    assert look(status=psutil.STATUS_ZOMBIE) == ProcessUsage(PID)
    assert look(session=2) == ProcessUsage(PID)
    assert look(parent=3) == ProcessUsage(PID)


def test_what_another_user_hides_is_left_open(look: Any) -> None:
    denied = psutil.AccessDenied(PID)
    usage = look(memory_info=denied, num_threads=denied)
    assert usage == ProcessUsage(PID, "python3 x.py", True, None, 1.5, None)
    assert look(cmdline=denied) == ProcessUsage(PID, is_running=True)


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("nbengine: core 0 my-engine", "nbengine: core 0 my-engine"),
        ("/usr/bin/python3 -m ipykernel_launcher -f /run/k.json", "python3 -m ipykernel_launcher"),
        ("/opt/python -P /home/me/x.py --token SECRET", "python -P x.py"),
        ("python --option=SECRET x.py SECRET", "python x.py"),
        ("python -c SECRET", "python"),
        ("python", "python"),
        ("", "python3"),
    ],
)
def test_a_title_says_what_runs_and_keeps_arguments_out_of_saved_notebooks(
    look: Any, command: str, title: str
) -> None:
    assert look(cmdline=command.split()).title == title


def test_a_title_is_one_line_of_characters_that_steer_nothing(look: Any) -> None:
    hostile = ["nbengine:", "a\nb\tc", "\x1b[31m\x07", "\u202egnp\x00", "\udcff", "ä→日本"]
    title = look(cmdline=hostile).title
    assert title == "nbengine: a b c \ufffd[31m\ufffd \ufffdgnp\ufffd \ufffd ä→日本"
    assert printable(title) == title
    title.encode()


def test_clients_are_found_by_the_sockets_that_they_listen_on(tmp_path: Path) -> None:
    info = ConnectionInfo(
        name="e",
        run_dir=str(tmp_path),
        log_path="",
        host_pid=1,
        host_started=1,
        config=EngineConfig(ModelConfig("m")),
    )
    assert client_pids(info) == []
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as closed:
        listening.bind(str(tmp_path / "c-1.in"))
        listening.listen()
        closed.bind(str(tmp_path / "c-2.in"))
        assert client_pids(info) == [os.getpid()]
    assert client_pids(info) == []


def test_a_stopped_process_runs_and_is_stopped(look: Any) -> None:
    assert look(status=psutil.STATUS_STOPPED).is_stopped
    assert look(status=psutil.STATUS_STOPPED).is_running
    assert not look().is_stopped
