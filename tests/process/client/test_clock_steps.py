"""A step of the wall clock is no death: engine, leases, links, `reap` and `ps` stay as they were.

The clock is moved for one process at a time, where psutil and the standard library read it. A time namespace does not
move the time of day, and `settimeofday` would move it for everybody on the machine.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from process_support.engine_under_test import wait_for

from nbengine import AsyncLLM
from nbengine.client.engines.directory import ReapReport, list_engines, reap
from nbengine.client.engines.processes import session_processes

StartAsync = Callable[..., AsyncLLM]
Script = Callable[[str], subprocess.Popen[str]]

BEHIND = """
import time
import psutil
now, boot = time.time, psutil.boot_time()
time.time = lambda: now() - 3600
psutil._psplatform.boot_time = lambda: boot - 3600

from nbengine import AsyncLLM, SamplingParams
from nbengine.client.engines.directory import list_engines, reap
import asyncio

async def read():
    # Several looks of the host at this process.
    sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    return [output async for output in llm.generate({"prompt_token_ids": [5]}, sampling)][-1]

llm = AsyncLLM.attach("stepped")
print(len(asyncio.run(read()).outputs[0].token_ids), llm.engine_core.client_index)
llm.detach()
print([(engine.info.name, engine.state) for engine in list_engines()], reap().dead)
"""


def test_neither_a_step_of_the_clock_nor_a_client_with_another_clock_changes_anything(
    start_async: StartAsync, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbengine.client.link.host_link.WATCH_INTERVAL", 0.01)
    llm = start_async(name="stepped", knobs={"step_seconds": 0.01})
    behind = script(BEHIND)
    out, err = behind.communicate(timeout=60)
    assert err == ""
    # All of its tokens, under its first lease.
    assert out.splitlines() == ["80 2", "[('stepped', 'ready')] []"]
    link, processes = llm.engine_core.link, session_processes(llm.connection)
    now, boot = time.time, psutil.boot_time()
    for step in (3600, 1, -1, -3600):
        monkeypatch.setattr(time, "time", lambda step=step: now() + step)
        monkeypatch.setattr(psutil._psplatform, "boot_time", lambda step=step: boot + step)
        next_look = link._next_look
        wait_for(lambda then=next_look: link._next_look > then + 0.05, "several looks at the engine")
        assert reap() == ReapReport()
        (listing,) = list_engines()
        assert (listing.state, listing.num_clients) == ("ready", 1)
        assert session_processes(llm.connection) == processes
        assert llm.call_utility_blocking("ping", timeout=60) == "pong"
