"""The end of a worker is put into words, and the cause is found among several ends."""

from __future__ import annotations

import logging
import pickle
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.distributed.layout import RankLayout
from nbengine.errors import (
    EngineStartError,
    InvalidArgumentError,
    ModelLoadError,
    NBEngineError,
    PeerDiedError,
    QueueClosedError,
)
from nbengine.executor.failures import (
    SETTLE_SECONDS,
    FirstCause,
    WorkerFailure,
    WorkerReport,
    choose_cause,
    worker_name,
)

LAYOUTS = [RankLayout(rank % 2, 2, rank // 2, 2) for rank in range(4)]
LOST = [
    RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2034"
    ),
    RuntimeError(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shut down?"
    ),
    RuntimeError(
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting: "
        "remote process exited or there was a network error"
    ),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionResetError(104, "Connection reset by peer"),
    EOFError(),
    PeerDiedError("reader 1 (pid 7) is gone"),
    QueueClosedError("the writer has shut down"),
]
OWN = [
    RuntimeError("CUDA error: peer access is not supported between these two devices"),
    MemoryError(),
    EngineStartError("12 GiB of weights do not fit"),
    ModelLoadError("model.safetensors is truncated"),
    InvalidArgumentError("tensor_parallel_size", 2, "1, 3 or 9"),
]


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Forgetful(Exception):
    """Survives pickling, but not whole."""

    def __init__(self, text: str = "nothing") -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self):
        return Forgetful, ()


def reported(rank: int, error: Exception) -> WorkerFailure:
    return WorkerFailure(LAYOUTS[rank], 100 + rank, WorkerReport.of("execute_model", error))


def ended(rank: int, status: int) -> WorkerFailure:
    return WorkerFailure(LAYOUTS[rank], 100 + rank, status=status)


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_a_report_carries_the_exception_across_processes(error: Exception) -> None:
    report = pickle.loads(pickle.dumps(WorkerReport.of("load_model", raised(error, ValueError("root")))))
    assert type(report.error) is type(error)
    assert str(report.error) == str(error)
    assert report.error.args == error.args
    assert "ValueError: root" in report.traceback
    assert "test_failures.py" in report.traceback
    assert report.description.endswith("root")


@pytest.mark.parametrize("error", [Unpicklable("this", "that"), Forgetful("lost")], ids=repr)
def test_an_exception_that_cannot_travel_is_replaced_by_one_that_says_the_same(error: Exception) -> None:
    report = pickle.loads(pickle.dumps(WorkerReport.of("load_model", error)))
    assert type(report.error) is NBEngineError
    assert str(report.error) == f"{type(error).__name__}: {error}"


def test_an_exception_of_a_class_that_is_not_here_is_replaced_by_one_that_says_the_same() -> None:
    local = type("Local", (Exception,), {"__module__": "no.such.module"})
    report = WorkerReport(
        "start", "Local: text", "", pickle.dumps(ValueError()).replace(b"ValueError", b"NoSuchErrr")
    )
    assert str(report.error) == "Local: text"
    assert str(WorkerReport.of("start", local("text")).error) == "Local: text"


@pytest.mark.parametrize("error", LOST, ids=repr)
def test_a_broken_connection_is_taken_for_a_consequence(error: Exception) -> None:
    assert WorkerReport.of("execute_model", error).is_lost_peer


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_a_failure_of_its_own_is_taken_for_a_cause(error: Exception) -> None:
    assert not WorkerReport.of("execute_model", error).is_lost_peer


def test_a_broken_connection_further_down_counts_too() -> None:
    assert WorkerReport.of("start", raised(NBEngineError("no all-reduce"), LOST[0])).is_lost_peer


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (RankLayout(), "worker 0"),
        (RankLayout(1, 2), "worker 1 (TP1)"),
        (RankLayout(0, 1, 2, 3), "worker 2 (PP2)"),
        (RankLayout(1, 2, 1, 2), "worker 3 (TP1 PP1)"),
    ],
)
def test_a_worker_is_named_by_rank_and_place(layout: RankLayout, name: str) -> None:
    assert worker_name(layout) == name


def test_an_end_is_told_with_rank_pid_and_how() -> None:
    killed = ended(1, -signal.SIGKILL).describe()
    assert killed.startswith("worker 1 (TP1 PP0), pid 101, was killed by signal 9 (SIGKILL)")
    assert ended(2, 3).describe() == "worker 2 (TP0 PP1), pid 102, exited with status 3"
    failed = reported(0, raised(RuntimeError("out of order"), ValueError("root"))).describe()
    assert failed == (
        "worker 0 (TP0 PP0), pid 100, failed in execute_model: RuntimeError: out of order; caused by ValueError: root"
    )


def test_what_keeps_an_engine_from_starting_stays_what_it_was() -> None:
    load = reported(1, ModelLoadError("model.safetensors is truncated")).start_error("")
    assert type(load) is ModelLoadError
    assert str(load) == "model.safetensors is truncated"
    argument = reported(1, InvalidArgumentError("tensor_parallel_size", 2, "1, 3 or 9")).start_error("")
    assert (argument.argument, argument.value, argument.allowed) == ("tensor_parallel_size", 2, "1, 3 or 9")


def test_what_may_differ_between_workers_names_the_worker() -> None:
    memory = reported(1, EngineStartError("too little memory")).start_error("last line")
    assert (type(memory), memory.cause) == (EngineStartError, "worker 1 (TP1 PP0): too little memory")
    assert memory.log_tail == "last line"
    bug = reported(1, RuntimeError("bug")).start_error("tail")
    assert bug.cause == "worker 1 (TP1 PP0), pid 101, failed in execute_model: RuntimeError: bug"
    death = ended(0, -signal.SIGSEGV).start_error("tail")
    assert death.cause == "at the start, worker 0 (TP0 PP0), pid 100, was killed by signal 11 (SIGSEGV)"


def test_only_what_was_not_raised_on_purpose_has_its_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    WorkerReport.of("sleep", raised(EngineStartError("no memory"))).log("worker 0")
    assert not caplog.text
    WorkerReport.of("sleep", raised(RuntimeError("bug"))).log("worker 0")
    assert "worker 0 failed in sleep" in caplog.text
    assert "Traceback" in caplog.text


CERTAIN = [
    reported(3, RuntimeError("bug")),
    reported(3, EngineStartError("no memory")),
    ended(3, -signal.SIGKILL),
    ended(3, -signal.SIGSEGV),
]
CONSEQUENCES = [reported(rank, error) for rank, error in enumerate(LOST[:3])]


@pytest.mark.parametrize("cause", CERTAIN, ids=lambda failure: failure.describe()[:60])
@given(order=st.permutations(range(4)))
def test_one_that_failed_by_itself_is_the_cause_whatever_was_heard_first(cause: WorkerFailure, order) -> None:
    failures = [*CONSEQUENCES, cause]
    assert choose_cause([failures[i] for i in order]) is cause


def test_an_abort_or_exit_may_be_a_consequence_but_less_likely_than_a_lost_connection() -> None:
    aborted, exited = ended(1, -signal.SIGABRT), ended(2, 1)
    assert choose_cause([aborted, CERTAIN[2]]) is CERTAIN[2]
    assert choose_cause([exited, CERTAIN[0]]) is CERTAIN[0]
    assert choose_cause([CONSEQUENCES[0], aborted]) is aborted


def test_among_equals_the_first_is_the_cause() -> None:
    assert choose_cause([ended(2, -9), ended(1, -9)]).layout.rank == 2
    assert choose_cause(CONSEQUENCES) is CONSEQUENCES[0]


def test_a_certain_cause_is_known_at_once() -> None:
    first = FirstCause()
    assert first.time_left(0.0) is None
    assert first.decide(0.0) is None
    first.add(CERTAIN[0], 5.0)
    assert first.decide(5.0) is CERTAIN[0]


def test_after_a_lost_connection_the_cause_is_waited_for() -> None:
    first = FirstCause()
    first.add(CONSEQUENCES[0], 10.0)
    assert first.decide(10.0) is None
    assert first.time_left(10.25) == SETTLE_SECONDS - 0.25
    first.add(ended(3, -signal.SIGKILL), 10.5)
    assert first.decide(10.5).layout.rank == 3


def test_without_a_better_one_the_first_lost_connection_is_the_cause_in_the_end() -> None:
    first = FirstCause()
    first.add(CONSEQUENCES[1], 10.0)
    first.add(CONSEQUENCES[0], 10.9)
    assert first.decide(10.9) is None
    assert first.decide(10.0 + SETTLE_SECONDS) is CONSEQUENCES[1]
    assert first.time_left(99.0) == 0.0


def test_a_workers_own_report_stands_against_its_exit_status() -> None:
    first = FirstCause()
    first.add(CONSEQUENCES[0], 0.0)
    first.add(ended(0, -signal.SIGKILL), 0.1)
    assert first.decide(0.2) is None
