"""Ends, causes and logs of processes are put into words, and the light processes load little."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbengine.config import EngineConfig, ParallelConfig
from nbengine.engine.host.main import claim_name
from nbengine.errors import EngineStartError, InvalidArgumentError, RequestError
from nbengine.executor.base import Executor
from nbengine.executor.choice import executor_class
from nbengine.ipc.liveness import this_process
from nbengine.runtime.connection import ConnectionInfo, connection_file, write_connection
from nbengine.runtime.logs import configure_logging, describe_exception, log_tail
from nbengine.runtime.processes import child_environment, describe_status


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "was killed by signal 11 (SIGSEGV)"),
        (
            -signal.SIGKILL,
            "was killed by signal 9 (SIGKILL); the kernel's out-of-memory killer ends processes so",
        ),
        (
            -signal.SIGBUS,
            f"was killed by signal {int(signal.SIGBUS)} (SIGBUS); a file that it had mapped, such as the model's weights, "
            + "was cut short or could not be read, or shared memory (/dev/shm) ran out",
        ),
        (-255, "was killed by signal 255 (unknown)"),
    ],
)
def test_an_exit_status_is_put_into_words(status, text) -> None:
    assert describe_status(status) == text


def raise_chain() -> None:
    try:
        try:
            raise KeyError("root")
        except KeyError as error:
            raise RequestError("middle") from error
    except RequestError:
        raise ValueError("outer")  # noqa: B904


def test_a_cause_ends_with_its_root() -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        raise_chain()
    assert (
        describe_exception(caught.value) == "ValueError: outer; caused by middle; caused by KeyError: 'root'"
    )
    assert describe_exception(EngineStartError("cause", "log")) == "cause"


def test_a_suppressed_context_is_no_cause() -> None:
    error = ValueError("told")
    error.__context__ = KeyError("not told")
    error.__suppress_context__ = True
    assert describe_exception(error) == "ValueError: told"


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 100_000 + b"\n" + b"".join(b"line %d\n" % n for n in range(100)))
    tail = log_tail(log).splitlines()
    assert tail == [f"line {n}" for n in range(70, 100)]
    assert log_tail(tmp_path / "missing") == ""
    log.write_bytes(b"")
    assert log_tail(log) == ""


@pytest.fixture
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("value", "level"), [("debug", logging.DEBUG), ("ERROR", logging.ERROR), ("nonsense", 20)]
)
def test_the_log_level_comes_from_the_environment(
    restored_logging, monkeypatch, capsys, value, level
) -> None:
    monkeypatch.setenv("NBENGINE_LOG_LEVEL", value)
    configure_logging("core 0")
    assert logging.getLogger().level == level
    logging.getLogger("x").error("hello")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith("ERROR [core 0] x: hello")
    assert lines[-1][:4].isdigit()
    assert ("is not a log level" in lines[0]) == (value == "nonsense")


def test_children_do_not_inherit_the_notebooks_variables(monkeypatch) -> None:
    for name in ("JPY_PARENT_PID", "MPLBACKEND", "FORCE_COLOR", "CLICOLOR", "PAGER", "NBENGINE_PARENT_FD"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    environment = child_environment()
    assert environment["HF_HOME"] == "/models"
    assert environment == {name: os.environ[name] for name in environment}
    assert not {"JPY_PARENT_PID", "MPLBACKEND", "FORCE_COLOR", "CLICOLOR", "PAGER"} & set(environment)
    assert "NBENGINE_PARENT_FD" not in environment


def test_workers_and_engine_cores_do_not_load_the_host() -> None:
    code = "import sys, nbengine.engine.__main__; sys.exit('nbengine.engine.host' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_host_and_the_wire_load_nothing_that_they_do_not_use() -> None:
    code = (
        "import sys, json\n"
        "import nbengine.engine.__main__, nbengine.engine.host.main, nbengine.ipc.serial\n"
        "print(json.dumps(sorted({'torch', 'numpy', 'transformers', 'asyncio', 'ssl'} & set(sys.modules))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert json.loads(done.stdout) == []


def test_an_engine_core_loads_no_arrays_before_its_executor_or_a_request_needs_them() -> None:
    code = (
        "import sys, json\n"
        "import nbengine.engine.__main__, nbengine.engine.core.main, nbengine.engine.core.dp_core_proc\n"
        "import nbengine.executor.multiproc, nbengine.executor.worker_proc\n"
        "print(json.dumps(sorted({'torch', 'numpy', 'transformers', 'asyncio'} & set(sys.modules))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert json.loads(done.stdout) == []


def backend(name: str | None) -> EngineConfig:
    return EngineConfig(parallel=ParallelConfig(distributed_executor_backend=name))


def test_an_executor_of_ones_own_is_found_by_its_path() -> None:
    found = executor_class(backend("tests.process.process_support.fake_executor:FakeExecutor"))
    assert issubclass(found, Executor)
    assert found.__name__ == "FakeExecutor"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.such.module:X", "no executor no.such.module:X"),
        ("nbengine.errors:Missing", "no executor nbengine.errors:Missing"),
        ("nbengine.errors:NBEngineError", "is not an Executor"),
    ],
)
def test_a_path_that_leads_to_no_executor_is_a_start_error(path, reason) -> None:
    with pytest.raises(EngineStartError, match=reason):
        executor_class(backend(path))


def test_other_names_of_executors_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="module:Class"):
        backend("nonsense")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def connection(run_dir: str, pid: int, started: int = 0) -> ConnectionInfo:
    return ConnectionInfo(
        name="n", run_dir=run_dir, log_path="", host_pid=pid, host_started=started, config=EngineConfig()
    )


def test_a_name_is_taken_from_the_dead_and_from_nonsense_but_not_from_the_living(runtime: Path) -> None:
    connection_file("n").write_text("nonsense")
    claim_name(connection("/run/1", os.getpid(), 1))
    claim_name(connection("/run/2", os.getpid(), this_process().started))
    claim_name(connection("/run/2", os.getpid(), this_process().started))
    with pytest.raises(EngineStartError, match="an engine named 'n' is running"):
        claim_name(connection("/run/3", 1))
    write_connection(connection("/run/2", 2**22 - 1))
    claim_name(connection("/run/3", 1))


def test_threads_spin_briefly_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert child_environment()["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in child_environment()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child_environment()["GOMP_SPINCOUNT"] == "7"
