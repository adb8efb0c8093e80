"""An engine of several workers, each seen from the notebook."""

from __future__ import annotations

import re

import psutil
from engine_processes import processes_of
from notebook_support.kernel import Kernel

from nbengine.runtime.connection import list_connections


def test_each_worker_of_an_engine_is_seen_from_its_start_to_its_end(
    kernel: Kernel, clean_afterwards: None
) -> None:
    started = kernel.run("%engine start random-tiny --tp 2 --num-blocks 256 --dtype float32")
    assert len(started.outputs) == 1
    lines = started.text.splitlines()
    load = next(number for number, line in enumerate(lines) if "✓ load" in line)
    assert "2 of 2 workers" in lines[load]
    assert [line.split()[:2] for line in lines[load + 1 : load + 3]] == [["✓", "TP0"], ["✓", "TP1"]]
    assert "2 workers on cpu float32" in started.text

    kernel.run("%generate --temperature 0 --max-tokens 20 --raw hello")
    (info,) = list_connections()
    workers = info.ready[0].workers
    processes = processes_of(info)
    assert {worker.pid for worker in workers} < {process.pid for process in processes}
    assert len(processes) == 4

    def look() -> tuple[dict[str, str], list[list[str]]]:
        (status,) = kernel.run("%engine status").outputs
        lines = status["data"]["text/plain"].split("\n\n")[1].splitlines()[1:]
        return status["data"], [re.split("  +", line) for line in lines]

    # The worker whose answer nobody waits for may still be at the end of the last step.
    kernel.pump(lambda: [row[8] for row in look()[1]] == ["20", "20"], "20 steps of both workers")
    status, rows = look()
    assert "TP 2 × PP 1 × DP 1, 2 workers, 4 processes" in status["text/plain"]
    for row, worker in zip(rows, workers, strict=True):
        assert row[:5] == [str(worker.rank), f"TP{worker.rank}", str(worker.pid), "cpu", "0–1"]
        assert re.fullmatch(r"[\d.]+ (MiB|GiB)", row[7])
        assert row[8] == rows[0][8] == "20"
        assert re.fullmatch(r"[\d.]+ ms", row[9])
        assert f'<td style="text-align:left">{worker.pid}</td>' in status["text/html"]

    assert "rank 1 takes calls" in kernel.run("%engine logs --rank 1").text
    assert "rank must be one of 0, 1, got 2" in kernel.run_any("%engine logs --rank 2").text
    assert "ready: engine core 0" in kernel.run("%engine logs").text
    assert re.search(rf" {info.host_pid} +4 ", kernel.run("%engine ps").text)

    assert "4 processes are gone" in kernel.run("%engine stop").text
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert list_connections() == []
