"""A process of an engine that stands: a word soon, recovery if it moves again, and else a clean end; nothing waits for it for long."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for
from stopping import stop

from nbengine import LLM, AsyncLLM, EngineStalledError, SamplingParams
from nbengine.client.engines.directory import list_engines
from nbengine.client.engines.processes import session_processes
from nbengine.config.progress import ProgressDeadlines
from nbengine.errors import EngineDeadError, InvalidArgumentError, NBEngineError, RequestLostError
from nbengine.ipc.control_messages import Progress
from nbengine.runtime.connection import list_connections
from nbengine.sampling_params import RequestOutputKind

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]
PROMPT = {"prompt_token_ids": [5]}
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
TIMEOUT = 8.0
REPORTED = ProgressDeadlines.of_step_timeout(TIMEOUT).to_report("step")
LEASE = 1.0
SLACK = 30.0
"""For a busy machine."""


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


class held:
    """Holds processes still while the block runs; a test that fails leaves none stopped."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids

    def __enter__(self) -> float:
        stop(*self.pids)
        return time.monotonic()

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            try:
                go_on(pid)
            except ProcessLookupError:
                continue


def quickly(function, *arguments):
    """Return what a call returns, or the error that it raises; check that it takes 2 s at most, apart from the slack."""
    begun = time.monotonic()
    try:
        return function(*arguments)
    except NBEngineError as error:
        return error
    finally:
        assert time.monotonic() - begun < 2 + SLACK / 2


async def test_whichever_process_is_stopped_a_word_comes_soon_nothing_else_waits_and_all_goes_on_or_ends_cleanly(
    start_async: StartAsync, script
) -> None:
    llm = start_async(knobs={"step_seconds": 0.01}, step_timeout=TIMEOUT, bound=False, lease=LEASE)
    info = llm.connection
    other = script(
        "import sys\nfrom nbengine import AsyncLLM\n"
        f"llm = AsyncLLM.attach({llm.name!r})\nprint('attached', flush=True)\nsys.stdin.read()\nllm.detach()"
    )
    assert other.stdout.readline() == "attached\n"
    stream = llm.generate(PROMPT, ENDLESS)
    await anext(stream)
    for name, pid in (("host", info.host_pid), ("core 0", llm.ready.pid)):
        with held(pid) as since:
            wait_for(lambda: llm.stall, "a word", REPORTED + SLACK)
            # It may have had no processor before it was stopped.
            assert time.monotonic() - since >= REPORTED / 4
            assert llm.stall.startswith(f"{name}: no ")
            assert "its process is stopped (SIGSTOP?)" in llm.stall
            (listing,) = quickly(list_engines)
            assert listing.state == "stopped"
            assert isinstance(quickly(AsyncLLM.attach, info.name), EngineStalledError)
            # A core that runs answers, when it gets a processor.
            _, silent = quickly(llm.stats_within, 0.3 if name == "core 0" else 10.0)
            assert silent == ([0] if name == "core 0" else [])
            with pytest.raises(EngineStalledError, match=f"{name}: no .*its process is stopped"):
                await llm.check_health(0.3)
        wait_for(lambda: llm.stall is None, "the recovery", 2 * SLACK)
        await llm.check_health(10.0)
        if name == "host":
            # It has heard nothing for longer than a lease lasts and a core may stand.
            log = Path(info.log_path).read_text()
            assert "the host did not run for" in log
            assert "without progress" not in log
    assert (await anext(stream)).outputs
    await stream.aclose()
    with held(other.pid):
        await llm.check_health()
        (listing,) = quickly(list_engines)
        assert (listing.state, listing.num_clients) == ("ready", 2)
        quickly(AsyncLLM.attach, llm.name).detach()
    other.communicate(timeout=100)
    assert other.returncode == 0
    with held(llm.ready.pid) as since:
        wait_for(lambda: llm.death, "the end", TIMEOUT + 2 * SLACK)
        assert time.monotonic() - since >= TIMEOUT * 2 / 3
    said = re.search(
        r"engine core 0 made no progress for (\d+) s, .*; its process is stopped", str(llm.death)
    )
    assert said is not None
    assert int(said[1]) >= TIMEOUT
    wait_for(lambda: not session_processes(info), "the end of all processes")
    with pytest.raises(EngineDeadError):
        await llm.check_health()


async def test_a_step_that_never_ends_ends_its_rank_with_the_stack_and_the_rank_comes_back(
    start_async: StartAsync, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    llm = start_async(
        knobs={"step_seconds": 0.01, "hold": str(hold)}, step_timeout=3.0, data_parallel_size=2, bound=False
    )
    stream = llm.generate(PROMPT, ENDLESS, data_parallel_rank=1)
    await anext(stream)
    hold.touch()
    with pytest.raises(RequestLostError, match=r"engine core 1 made no progress for [34] s, in step \d"):
        async for _ in stream:
            pass
    hold.unlink()
    log = Path(llm.connection.log_path).read_text()
    assert "wait_while_held" in log
    wait_for(lambda: len(llm.connection.ready) == 2 and llm.connection.ready[1].incarnation == 1, "rank 1")
    await llm.check_health()


async def test_one_attaches_to_a_core_that_lets_nobody_else_have_the_interpreter_and_waits_only_for_answers(
    start_async: StartAsync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hog = tmp_path / "hog"
    llm = start_async(knobs={"step_seconds": 0.03, "hog": str(hog)}, bound=False)
    stream = llm.generate(PROMPT, ENDLESS)
    await anext(stream)
    monkeypatch.setattr("nbengine.client.link.ready_wait.ATTACH_PATIENCE", 0.3)
    seconds, begun = 4.0, time.monotonic()
    (tmp_path / "new").write_text(str(int(seconds * 1e6)))
    (tmp_path / "new").rename(hog)
    wait_for(lambda: not hog.exists(), "the step")
    other = AsyncLLM.attach(llm.name)
    assert time.monotonic() - begun < seconds
    answer = [out async for out in other.generate(PROMPT, SamplingParams(max_tokens=2))][-1]
    assert time.monotonic() - begun >= seconds
    assert answer.outputs[0].token_ids == [6, 7]
    other.detach()
    await stream.aclose()


def test_a_start_says_that_its_host_is_stopped_and_goes_on_with_it(start_async: StartAsync) -> None:
    said: list[str] = []
    stopped: list[int] = []

    def on_progress(progress: Progress) -> None:
        running = list_connections()
        if running and not stopped:
            stopped.append(running[0].host_pid)
            stop(*stopped)
        if "SIGSTOP?" in progress.detail:
            said.append(progress.detail)
            go_on(stopped[0])

    try:
        llm = start_async(progress=on_progress, knobs={"load_seconds": 0.2}, step_timeout=TIMEOUT)
    finally:
        for pid in stopped:
            go_on(pid)
    assert [re.sub(r"\d+ s", "N s", each) for each in said] == [
        "no answer for N s, its process is stopped (SIGSTOP?)"
    ]
    wait_for(lambda: llm.stall is None, "the recovery", 2 * SLACK)


async def test_a_client_that_looks_on_can_let_an_engine_go_on(start_async: StartAsync) -> None:
    llm = start_async()
    await llm.pause_generation()
    await llm.sleep()
    llm.go_on_soon()
    answer = [out async for out in llm.generate(PROMPT, SamplingParams(max_tokens=2))][-1]
    assert answer.outputs[0].token_ids == [6, 7]
    assert not await llm.is_sleeping()
    assert not await llm.is_paused()


def test_health_checks_refuse_a_bound_that_is_none(start_llm: StartLLM) -> None:
    llm: LLM = start_llm()
    llm.check_health()
    for timeout in (0, -1, float("nan"), "soon", True):
        with pytest.raises(InvalidArgumentError, match="timeout"):
            llm.check_health(timeout)
    llm.sleep(1)
    llm.check_health()
    llm.pause_generation()
    llm.check_health(5)
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        llm.check_health()
