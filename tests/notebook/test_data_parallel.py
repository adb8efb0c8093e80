"""Several real engine cores in a notebook: ranks by name, what each does, more and fewer of them, and one that is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from notebook_support.kernel import Cell, Kernel

LONG = "--num-blocks 1024 --max-model-len 16000 --hf-overrides '{\"max_position_embeddings\": 16384}'"
"""For an answer that takes many seconds, however fast the machine is."""
DENSE = f"%engine start random-tiny --dp 2 {LONG} -o llm"
MOE = f"%engine start random-tiny-moe --dp 2 {LONG} -o llm"
ASK = "%%generate {flags} -o answer --temperature 0 --max-tokens {tokens} --set ignore_eos=True\nhello\n"
SECONDS = 60.0

pytestmark = pytest.mark.timeout(240)


def ask(kernel: Kernel, flags: str = "", tokens: int = 8) -> Cell:
    return kernel.run(ASK.format(flags=flags, tokens=tokens), SECONDS)


def core_rows(kernel: Kernel) -> dict[str, list[str]]:
    """The rows of the engine cores in `%engine status`, by rank."""
    *_, cores = kernel.run("%engine status").text.strip().split("\n\n")
    rows = [re.split("  +", line) for line in cores.splitlines()[1:]]
    return {row[0]: row for row in rows}


def wait_for_row(kernel: Kernel, rank: str, what: Callable[[list[str]], bool]) -> list[str]:
    """Ask for the status until a rank's row is as wanted."""
    row: list[str] = []

    def is_so() -> bool:
        nonlocal row
        row = core_rows(kernel)[rank]
        return what(row)

    kernel.pump(is_so, f"rank {rank} in the status", SECONDS)
    return row


def test_independent_ranks_answer_join_leave_and_come_back(kernel: Kernel, clean_afterwards: None) -> None:
    started = kernel.run(DENSE, SECONDS)
    assert "2 of 2 engine cores" in started.text
    assert re.search(r"✓ DP1 +\d", started.text)
    for rank in (1, 0):
        assert f"rank {rank}" in ask(kernel, f"-t {rank}").text
        assert kernel.value("answer.metrics.data_parallel_ranks") == (rank,)
    assert kernel.run_any(ASK.format(flags="-t 2", tokens=8)).text.endswith("have the ranks 0, 1\n")
    assert core_rows(kernel).keys() == {"0", "1"}

    # A rank joins and leaves while a cell streams.
    kernel.run(ASK.format(flags="-a", tokens=1500).replace("answer", "long"))
    assert "3 engine cores on cpu" in kernel.run("%engine scale --dp 3", SECONDS).text
    assert "rank 2" in ask(kernel, "-t 2").text
    assert "was scaled in" in kernel.run("%engine scale --dp 2", SECONDS).text
    assert kernel.value("len(long.result(60).token_ids)") == 1500
    assert kernel.run_any("%engine scale --dp 0").text == (
        "UsageError: %engine scale: data_parallel_size must be at least 1, got 0\n"
    )

    # One is killed: the notebook goes on with the other, and later with both.
    pid = int(wait_for_row(kernel, "0", lambda row: row[1].isdecimal())[1])
    cell = kernel.start(ASK.format(flags="-t 0", tokens=15000))
    kernel.pump(lambda: bool(cell.text), "the first words of the cell")
    os.kill(pid, signal.SIGKILL)
    kernel.finish(cell, SECONDS)
    assert "engine core 0" in cell.text
    assert "SIGKILL" in cell.text
    assert "Traceback" not in cell.text
    assert "rank 1" in ask(kernel, "-t 1").text
    row = wait_for_row(kernel, "0", lambda row: row[-1] == "1")
    assert row[1] != str(pid)
    assert "rank 0" in ask(kernel, "-t 0").text
    kernel.run("%engine stop", SECONDS)


def test_waves_of_ranks_in_lock_step_are_seen_and_a_dead_rank_ends_them(
    kernel: Kernel, clean_afterwards: None
) -> None:
    kernel.run(MOE, SECONDS)

    # One rank has all the work: the other one takes dummy steps for it, in the same wave. It is the first: ranks publish
    # the last steps of a wave after its end, perhaps not before the next one begins.
    kernel.run(
        "import asyncio\n"
        "from nbengine import SamplingParams\n"
        "params = SamplingParams(max_tokens=300, ignore_eos=True)\n"
        "with llm.record_waves() as recording:\n"
        "    async for _ in llm.generate('hello', params, data_parallel_rank=1): pass\n"
        "    idle, busy = (recording.timeline.total(rank) for rank in (0, 1))\n"
        "    while busy.steps < 300 or idle.dummy_steps != busy.steps + busy.dummy_steps:\n"
        "        await asyncio.sleep(0.02)\n"
        "        idle, busy = (recording.timeline.total(rank) for rank in (0, 1))\n",
        SECONDS,
    )
    waves = kernel.value("[wave.number for wave in recording.timeline.waves]")
    # The wave that it has begun may be over before the request itself has come, which begins the next one.
    assert waves in ([0], [0, 1])
    idle, busy = (
        kernel.value(
            f"(recording.timeline.total({rank}).steps, recording.timeline.total({rank}).dummy_steps)"
        )
        for rank in (0, 1)
    )
    assert idle[0] == 0
    assert busy[0] >= 300
    assert idle[1] == busy[0] + busy[1]

    ask(kernel)
    expected = kernel.value("answer.token_ids")
    wait_for_row(kernel, "0", lambda row: row[2] == "paused")
    kernel.run(ASK.format(flags="-a -t 0", tokens=400).replace("answer", "later"))
    panel = kernel.run("%engine waves --seconds 1", SECONDS)
    (output,) = panel.outputs
    assert set(output["data"]) == {"text/plain", "text/html", "image/svg+xml"}
    assert "in lock step" in output["data"]["text/plain"]
    assert "<svg " in output["data"]["text/html"]
    kernel.value("len(later.result(60).token_ids)")

    # Without one of them the others cannot go on.
    pid = int(wait_for_row(kernel, "1", lambda row: row[1].isdecimal())[1])
    cell = kernel.start(ASK.format(flags="-t 0", tokens=15000))
    kernel.pump(lambda: bool(cell.text), "the first words of the cell")
    os.kill(pid, signal.SIGKILL)
    kernel.finish(cell, SECONDS)
    assert cell.outputs[-1]["ename"] == "EngineDeadError"
    (shown,) = cell.outputs[-1]["traceback"]
    cause = shown.partition("EngineDeadError: ")[2]
    assert "engine core 1" in cause
    assert "\n" not in cause
    kernel.run(MOE, SECONDS)
    ask(kernel)
    assert kernel.value("answer.token_ids") == expected
    kernel.run("%engine stop", SECONDS)
