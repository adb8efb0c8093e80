"""`%engine status` and `ps`: what their tables say of engines that only pretend."""

from __future__ import annotations

import os
import re
import threading

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.ipc.control_messages import WorkerInfo
from nbengine.magics.engines.reports import started_sentence
from nbengine.magics.session import AttachedEngine
from nbengine.metrics.stats import EngineStats, WorkerStats
from nbengine.runtime.connection import write_connection
from tests.unit.magics.conftest import FakeBackend, FakeClient, RecordingPublisher

Capture = pytest.CaptureFixture[str]


def test_status_shows_topology_requests_blocks_and_reuse(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine status").raise_error()
    printed = capsys.readouterr().out
    for expected in (
        "random-tiny (default)",
        "TP 1 × PP 1 × DP 1",
        "2 running, 1 waiting",
        "16 of 64 in use (25%), 7 cached",
        "50 of 200 prompt tokens reused (25%)",
        "1,234, 0 preemptions",
        engine.connection.log_path,
    ):
        assert expected in printed


def test_status_says_where_prometheus_is_answered_if_it_is(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine status").raise_error()
    assert "metrics" not in capsys.readouterr().out
    engine.connection.metrics_address = "http://127.0.0.1:9400/metrics"
    write_connection(engine.connection)
    engine.connection.metrics_address = ""
    shell.run_cell("%engine status").raise_error()
    assert re.search(r"metrics +http://127.0.0.1:9400/metrics", capsys.readouterr().out)


def test_status_of_one_worker_adds_its_memory_and_step_to_the_engines(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.stats.workers = [WorkerStats(0, 3 << 20, 9, 0.00321)]
    shell.run_cell("%engine status").raise_error()
    rows = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["topology"].startswith("TP 1 × PP 1 × DP 1, 1 worker, ")
    assert (rows["memory"], rows["last step"]) == ("3 MiB", "3.2 ms")
    engine.stats.workers = [WorkerStats(0, 3 << 20)]
    shell.run_cell("%engine status").raise_error()
    assert "last step" not in capsys.readouterr().out


def test_status_has_a_row_for_each_of_several_workers(
    kernel_shell: InteractiveShell, backend: FakeBackend
) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    kernel_shell.run_cell("%engine start random-tiny --tp 2 --pp 2").raise_error()
    publisher.messages.clear()
    engine = backend.clients["random-tiny"]
    engine.ready.workers = [
        WorkerInfo(
            rank,
            rank % 2,
            rank // 2,
            500 + rank,
            f"cuda:{rank}",
            5 << 20,
            7 << 20,
            8 * (rank // 2),
            8,
            kernels="cpu, products with AVX2",
        )
        for rank in range(3)
    ]
    write_connection(engine.connection)
    engine.stats.workers = [WorkerStats(rank, rank << 30, 1000, 0.25 * rank) for rank in range(4)]
    kernel_shell.run_cell("%engine status").raise_error()
    (shown,) = publisher.outputs()
    own, of_workers = shown["text/plain"].split("\n\n")
    assert "TP 2 × PP 2 × DP 1, 4 workers, " in own
    assert "last step" not in own
    assert re.search(r"^kernels +cpu, products with AVX2$", own, re.MULTILINE)
    header, *rows = [re.split("  +", line) for line in of_workers.splitlines()]
    assert len(header) == 10
    assert rows[2] == [
        "2",
        "TP0 PP1",
        "502",
        "cuda:2",
        "8–15",
        "5 MiB",
        "7 MiB",
        "2 GiB",
        "1,000",
        "500.0 ms",
    ]
    assert rows[3] == ["3", "TP1 PP1", "3 GiB", "1,000", "750.0 ms"], (
        "of a worker that has not said who it is"
    )
    assert shown["text/html"].count("<table>") == 2
    assert '<td style="text-align:left">cuda:1</td>' in shown["text/html"]


def test_status_has_a_row_for_each_of_several_engine_cores(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --dp 3").raise_error()
    engine = backend.clients["random-tiny"]
    engine.connection.ready[1].pid = 4711
    engine.connection.ready[1].incarnation = 2
    write_connection(engine.connection)
    for stats in engine.engine_stats:
        stats.workers = [WorkerStats(0, 3 << 20, 9, 0.00321)]
    engine.engine_stats[0].num_running_reqs = engine.engine_stats[0].num_waiting_reqs = 0
    engine.engine_stats[1].is_paused = True
    del engine.engine_stats[2]
    capsys.readouterr()
    shell.run_cell("%engine status").raise_error()
    own, of_cores = capsys.readouterr().out.strip().split("\n\n")
    rows = dict(re.split("  +", line, maxsplit=1) for line in own.splitlines())
    assert rows["topology"].startswith("TP 1 × PP 1 × DP 3, 3 workers, ")
    assert rows["requests"] == "2 running, 1 waiting"
    assert "last step" not in rows
    assert [re.split("  +", line) for line in of_cores.splitlines()] == [
        [
            *["CORE", "PID", "STATE", "RUNNING", "WAITING", "KV BLOCKS", "CACHED", "REUSED", "STEPS"],
            *["PREEMPTED", "MEMORY", "LAST STEP", "RESTARTS"],
        ],
        [
            "0",
            str(os.getpid()),
            "idle",
            "0",
            "0",
            "16 of 64 in use (25%)",
            "7",
            "25%",
            "1,234",
            "0",
            "3 MiB",
            "3.2 ms",
            "0",
        ],
        [
            *[
                "1",
                "4711",
                "paused: `%engine resume` goes on",
                "2",
                "1",
                "16 of 64 in use (25%)",
                "7",
                "25%",
                "1,234",
            ],
            *["0", "3 MiB", "3.2 ms", "2"],
        ],
        ["2", "starting"],
    ]


def test_status_of_workers_of_several_engine_cores_says_whose_they_are(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --dp 2 --tp 2").raise_error()
    for stats in backend.clients["random-tiny"].engine_stats:
        stats.workers = [WorkerStats(rank, 1 << 20, 9, 0.25) for rank in range(2)]
    capsys.readouterr()
    shell.run_cell("%engine status").raise_error()
    _, of_cores, of_workers = capsys.readouterr().out.strip().split("\n\n")
    assert "2 MiB" in of_cores
    assert [line.split()[1:3] for line in of_workers.splitlines()[1:]] == [
        ["DP0", "TP0"],
        ["DP0", "TP1"],
        ["DP1", "TP0"],
        ["DP1", "TP1"],
    ]


def test_what_a_worker_says_of_itself_is_dead_html(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    engine.ready.workers = [WorkerInfo(rank, rank, 0, 5, "<script>", 1, 1, 0, 0) for rank in range(2)]
    write_connection(engine.connection)
    engine.stats.workers = [WorkerStats(0), WorkerStats(1)]
    kernel_shell.run_cell("%engine status").raise_error()
    (shown,) = publisher.outputs()
    assert "<script>" not in shown["text/html"]
    assert "&lt;script&gt;" in shown["text/html"]


def test_tables_have_an_html_form_in_a_notebook(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    kernel_shell.run_cell("%engine status").raise_error()
    kernel_shell.run_cell("%engine ps").raise_error()
    status, ps = publisher.outputs()
    assert "<th" in status["text/html"]
    assert "2 running" in status["text/html"]
    assert "random-tiny" in ps["text/html"]
    assert "random-tiny" in ps["text/plain"]


def test_ps_lists_all_engines_and_says_which_are_dead(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --name second")
    shell.run_cell("%engine detach second")
    backend.clients["second"].die()
    capsys.readouterr()
    shell.run_cell("%engine ps").raise_error()
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "ready" in rows["random-tiny"]
    assert rows["random-tiny"].endswith("default")
    assert " dead " in rows["second"]


def test_status_of_an_engine_that_stands_says_so_and_shows_what_answers(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.silent = (0,)
    engine.stall = "core 0: no progress for 42 s, in step 1,234"
    shell.run_cell("%engine status").raise_error()
    rows = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["progress"] == "core 0 does not answer; core 0: no progress for 42 s, in step 1,234"
    assert "requests" not in rows
    assert rows["log"] == engine.connection.log_path
    engine.silent, engine.stall = (), None
    shell.run_cell("%engine status").raise_error()
    assert "progress" not in capsys.readouterr().out


def test_status_asks_all_engines_at_once_so_that_none_waits_for_another_that_is_stuck(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --name second")
    capsys.readouterr()
    all_asked = threading.Barrier(2)

    def answer_when_all_are_asked(timeout: float) -> tuple[EngineStats, list[int]]:
        all_asked.wait(10)
        return EngineStats(), [0]

    for client in backend.clients.values():
        client.stats_within = answer_when_all_are_asked  # type: ignore[method-assign]
    shell.run_cell("%engine status").raise_error()
    printed = capsys.readouterr().out
    assert printed.count("core 0 does not answer") == 2
    assert printed.index("random-tiny") < printed.index("second")


def test_start_and_status_say_whose_layers_run_unless_they_are_nbengines(
    kernel_shell: InteractiveShell, backend: FakeBackend
) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    kernel_shell.run_cell("%engine start random-tiny").raise_error()
    client = backend.clients["random-tiny"]
    shown = {}
    for name in ("", "OPTForCausalLM of transformers 5.23.0"):
        client.ready.workers = [WorkerInfo(0, 0, 0, 500, "cpu", 1, 1, 0, 8, implementation=name)]
        write_connection(client.connection)
        publisher.messages.clear()
        kernel_shell.run_cell("%engine status").raise_error()
        (status,) = publisher.outputs()
        shown[name] = started_sentence(AttachedEngine(client), 1.0), status["text/plain"]
    (plain, plain_status), (sentence, status_text) = shown.values()
    assert "layers" not in plain + plain_status
    told = "; its layers are OPTForCausalLM of transformers 5.23.0's, which take longer than nbengine's own"
    assert sentence == plain + told
    assert re.search(r"^layers +OPTForCausalLM of transformers 5.23.0 .slower", status_text, re.MULTILINE)
