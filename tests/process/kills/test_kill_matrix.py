"""kill -9 of any process of any layout at any moment: no hang, an error soon, and nothing of the engine is left.

`HYPOTHESIS_PROFILE=thorough` makes 200 kills and holds the errors to the two seconds that are promised.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from process_support.engine_under_test import SUPPORT_PATH, wait_for
from process_support.kill_matrix import (
    CUT_SHORT,
    LAYOUTS,
    MOMENTS,
    SHORT_PROMPT,
    STREAM,
    VICTIMS,
    Kill,
    Scene,
    every_kill,
    kills,
    victims_that_live,
    wait_a_moment,
)
from process_support.raw_client import DEADLINE

from nbengine.client.engines.processes import session_processes
from nbengine.errors import EngineDeadError, EngineStartError, RequestLostError
from nbengine.runtime.connection import ConnectionInfo, connection_file, list_connections
from tests.support.thorough import THOROUGH, amount

MOST_KILLS = [*every_kill(seed=3), *kills(3, seed=3)]
KILLS = amount(kills(8, seed=4), thorough=MOST_KILLS)
HANG = 20.0
"""Seconds after which what was to end is taken to hang, on however busy a machine."""
PROMISE = 2.0

pytestmark = pytest.mark.timeout(180)


def test_the_kills_go_through_every_layout_and_every_victim_and_moment() -> None:
    for seen in (KILLS, MOST_KILLS):
        assert {kill.layout for kill in seen} == set(LAYOUTS)
        assert {kill.moment for kill in seen} == set(MOMENTS)
        assert {kill.victim for kill in seen} == set(VICTIMS)


def test_the_thorough_kills_are_two_hundred_and_leave_out_nothing_that_can_be_together() -> None:
    assert len(MOST_KILLS) == 200
    seen = {(kill.layout, kill.moment, kill.victim) for kill in MOST_KILLS}
    for layout, moment, victim in product(LAYOUTS, MOMENTS, VICTIMS):
        without_workers = layout in ("one process", "dp2", "dp2 in lock step")
        can_be = (victim != "worker" or not without_workers) and (
            moment != "scaling" or layout in ("dp2", "dp2 in lock step")
        )
        assert ((layout, moment, victim) in seen) is can_be


class Killer:
    """Carries out a kill once, and remembers when and what."""

    def __init__(self, kill: Kill) -> None:
        self.kill = kill
        self.info: ConnectionInfo | None = None
        self.killed_at: float | None = None
        self.num_killed = 0

    def strike(self) -> None:
        if self.killed_at is not None:
            return
        self.find_engine()
        if self.kill.moment != "starting":
            wait_a_moment(self.kill.delay)
        self.killed_at = time.monotonic()
        self.num_killed = len(list(victims_that_live(self.kill)))

    def find_engine(self) -> None:
        """Remember the engine while it is there for certain: one that drains may have ended before the kill."""
        if self.info is None:
            (self.info,) = list_connections()

    def check_promise(self) -> None:
        assert self.killed_at is not None
        if THOROUGH and self.kill.moment != "draining":
            assert time.monotonic() - self.killed_at < PROMISE


def check_nothing_left(info: ConnectionInfo) -> None:
    wait_for(lambda: not session_processes(info), "the end of the engine's processes", HANG)
    for directory in filter(None, (info.run_dir, info.tensor_dir)):
        wait_for(lambda path=Path(directory): not path.exists(), f"the end of {directory}", HANG)
    wait_for(lambda: not connection_file(info.name).exists(), "the end of the connection file", HANG)


async def check_streams(scene: Scene, killer: Killer) -> None:
    """Check that every stream ends: with all of its tokens, or the engine's death, or that of its rank."""
    answers = await asyncio.wait_for(asyncio.gather(*scene.streams, return_exceptions=True), HANG)
    if scene.streams:
        killer.check_promise()
    allowed: tuple[type[Exception], ...] = (EngineDeadError,)
    if not scene.kill.ends_the_engine:
        # The other rank may be on its way out, too, and the engine ends with the last one.
        is_last = scene.kill.moment in ("scaling", "draining")
        allowed = (RequestLostError, EngineDeadError) if is_last else (RequestLostError,)
    for answer in answers:
        assert answer is None or isinstance(answer, (*allowed, asyncio.CancelledError)), repr(answer)
        if isinstance(answer, EngineDeadError) and killer.num_killed and scene.kill.moment != "draining":
            assert "SIGKILL" in answer.cause
    await asyncio.wait_for(asyncio.gather(*scene.others, return_exceptions=True), HANG)
    for other in scene.others:
        assert other.exception() is None or isinstance(other.exception(), CUT_SHORT), other


def check_death(scene: Scene) -> None:
    """Check that the client knows of the death, and says so to each caller."""
    assert scene.engine is not None
    wait_for(lambda: scene.engine.engine_core.standing.is_dead, "the news of the end", HANG)
    with pytest.raises(EngineDeadError):
        scene.engine.submit(SHORT_PROMPT, STREAM)


async def check_that_it_goes_on(scene: Scene) -> None:
    """Check that an engine that has lost one of its independent ranks takes requests as before."""
    assert scene.engine is not None
    table = scene.engine.engine_core.cores.router.table
    if scene.kill.victim == "core" and scene.kill.moment != "scaling":
        rank = scene.kill.rank
        wait_for(lambda: rank in table.usable and table.usable[rank].incarnation, "the next start", 2 * HANG)
    wait_for(lambda: table.all_usable, "all ranks", 2 * HANG)
    if scene.kill.moment == "asleep":
        await scene.engine.wake_up()
    tokens = [output async for output in scene.engine.generate(SHORT_PROMPT, STREAM)]
    assert tokens[-1].outputs[0].finish_reason == "length"


async def play(kill: Kill) -> ConnectionInfo:
    """Play a scene in which this process is the client."""
    killer = Killer(kill)
    scene = Scene(kill, killer.strike)
    cause = start(scene)
    if scene.engine is None:
        killer.check_promise()
        assert "SIGKILL" in cause
    else:
        try:
            killer.find_engine()
            await go_on(scene, killer)
        finally:
            await asyncio.get_running_loop().run_in_executor(None, scene.engine.shutdown)
    assert killer.info is not None
    return killer.info


def start(scene: Scene) -> str:
    """Start the engine; returns why it did not start."""
    try:
        scene.start()
    except EngineStartError as error:
        return error.cause
    return ""


async def go_on(scene: Scene, killer: Killer) -> None:
    """Go on from a started engine to the moment of the kill, and check its consequences."""
    await scene.play()
    await check_streams(scene, killer)
    if scene.kill.ends_the_engine and killer.num_killed:
        check_death(scene)
    elif scene.kill.moment not in ("draining", "scaling"):
        await check_that_it_goes_on(scene)


def kill_the_client(kill: Kill) -> ConnectionInfo:
    """Play a scene in which another process is the client, and kill that."""
    command = [sys.executable, "-m", "process_support.kill_matrix", kill.layout, kill.moment, str(kill.delay)]
    shared = str(Path(__file__).parents[2] / "support")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((SUPPORT_PATH, shared))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as client:
        assert client.stdout is not None
        # Before the moment: when it is known here, an engine that drains may have ended.
        wait_for(list_connections, "the engine", 2 * DEADLINE)
        found = list_connections()
        said = client.stdout.readline()
        wait_a_moment(kill.delay)
        client.kill()
    assert said == b"now\n"
    (info,) = found
    return info


@pytest.mark.parametrize("kill", KILLS, ids=str)
async def test_a_killed_process_leaves_nobody_waiting_and_nothing_behind(kill: Kill) -> None:
    info = kill_the_client(kill) if kill.victim == "client" else await play(kill)
    check_nothing_left(info)
