"""The kill matrix: which process of which layout is killed at which moment, and how an engine is brought to that moment."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any

import psutil
from engine_processes import processes_of

from nbengine import AsyncLLM, SamplingParams
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Progress
from nbengine.runtime.connection import list_connections
from nbengine.sampling_params import RequestOutputKind

NAME = "victim"
NUM_STREAMS = 4
LONG_PROMPT = {"prompt_token_ids": [7, 11, 13] * 250}
SHORT_PROMPT = {"prompt_token_ids": [7]}
STREAM = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
CUT_SHORT = (NBEngineError, asyncio.CancelledError)
"""The errors with which a call that was under way may end."""


@dataclass(frozen=True)
class Layout:
    """An engine's processes. `ranks_are_independent`: it goes on when one of its engine cores dies."""

    options: Mapping[str, Any]
    num_cores: int = 1
    num_workers: int = 0
    """Worker processes of each engine core; 0: it computes by itself."""
    ranks_are_independent: bool = False
    other_size: int | None = None
    """The number of engine cores to which it may be scaled."""

    def start(self, progress: Callable[[Progress], None] | None = None) -> AsyncLLM:
        """Start the engine; returns when it is ready."""
        options = {"max_model_len": 1024, "num_gpu_blocks_override": 256, "dtype": "float32"}
        return AsyncLLM(**options | dict(self.options), name=NAME, progress=progress)


LAYOUTS = {
    "one process": Layout({"model": "random-tiny"}),
    "tp2": Layout({"model": "random-tiny", "tensor_parallel_size": 2}, num_workers=2),
    "pp2": Layout({"model": "random-tiny", "pipeline_parallel_size": 2}, num_workers=2),
    "dp2": Layout(
        {"model": "random-tiny", "data_parallel_size": 2},
        num_cores=2,
        ranks_are_independent=True,
        other_size=1,
    ),
    "dp2 in lock step": Layout(
        {"model": "random-tiny-moe", "data_parallel_size": 2, "enable_expert_parallel": True},
        num_cores=2,
        other_size=1,
    ),
    "dp2 x tp2 in lock step": Layout(
        {"model": "random-tiny-moe", "data_parallel_size": 2, "tensor_parallel_size": 2},
        num_cores=2,
        num_workers=2,
    ),
}
MOMENTS = ("starting", "idle", "prefill", "decode", "aborting", "asleep", "draining", "scaling")
VICTIMS = ("host", "core", "worker", "everything", "client")


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a process, `delay` seconds after a moment has come."""

    layout: str
    moment: str
    victim: str
    rank: int
    """The index among the engine cores, or among the workers of all of them."""
    delay: float

    @property
    def ends_the_engine(self) -> bool:
        """Return whether nothing of the engine can go on."""
        is_one_rank = self.victim in ("core", "worker") and LAYOUTS[self.layout].ranks_are_independent
        # Every rank is needed for an engine to start.
        return not is_one_rank or self.moment == "starting"

    def __str__(self) -> str:
        return f"{self.layout}-{self.moment}-{self.victim} {self.rank}-{self.delay * 1000:.0f} ms"


def kills(number: int, seed: int) -> list[Kill]:
    """A reproducible choice of kills that goes through all layouts, moments and victims in turn.

    The turns of two of them come together in few ways: `every_kill` has all.
    """
    chance = random.Random(seed)
    layouts, moments, victims = (
        cycle(chance.sample(list(names), len(names))) for names in (LAYOUTS, MOMENTS, VICTIMS)
    )
    chosen: list[Kill] = []
    while len(chosen) < number:
        layout, moment, victim = next(layouts), next(moments), next(victims)
        if is_possible(layout, moment, victim):
            chosen.append(_drawn(layout, moment, victim, chance))
    return chosen


def every_kill(seed: int) -> list[Kill]:
    """A kill for each layout, moment and victim that there can be together."""
    chance = random.Random(seed)
    return [_drawn(*each, chance) for each in product(LAYOUTS, MOMENTS, VICTIMS) if is_possible(*each)]


def is_possible(layout: str, moment: str, victim: str) -> bool:
    """Return whether a layout has such a victim, and comes to such a moment."""
    has = LAYOUTS[layout]
    return not (
        (victim == "worker" and not has.num_workers) or (moment == "scaling" and has.other_size is None)
    )


def _drawn(layout: str, moment: str, victim: str, chance: random.Random) -> Kill:
    has = LAYOUTS[layout]
    num_ranks = has.num_cores * (has.num_workers if victim == "worker" else 1)
    return Kill(layout, moment, victim, chance.randrange(num_ranks), chance.choice((0.0, 0.01, 0.05, 0.2)))


def find_victims(kill: Kill) -> list[psutil.Process]:
    """The engine's processes that a kill is for, as far as they have been started."""
    # An engine that was to end may have done so.
    found = [process for info in list_connections() if info.name == NAME for process in processes_of(info)]
    if kill.victim in ("everything", "client"):
        return found
    if kill.victim == "host":
        return found[:1]
    role = f" {kill.victim} "
    of_role = [process for process in found if role in f" {' '.join(process.cmdline())} "]
    return of_role[kill.rank : kill.rank + 1]


@dataclass
class Scene:
    """An engine that is brought to a moment, with what is going on in it.

    `reached` is called when the moment has come: at the start of an engine on the thread that starts it, otherwise on
    the event loop.
    """

    kill: Kill
    reached: Callable[[], None]
    engine: AsyncLLM | None = None
    streams: list[asyncio.Task[None]] = field(default_factory=list)
    others: list[asyncio.Future[Any]] = field(default_factory=list)
    """Calls that are under way."""

    def start(self) -> None:
        """Start the engine; the moment of a start comes with one of its messages."""
        layout = LAYOUTS[self.kill.layout]
        if self.kill.moment != "starting":
            self.engine = layout.start()
            return
        messages = iter(range(100))
        fatal = round(self.kill.delay * 20)

        def on_progress(progress: Progress) -> None:
            # The first messages come before there is a process.
            if list_connections() and next(messages) == fatal:
                self.reached()

        self.engine = layout.start(on_progress)

    async def play(self) -> None:
        """Go on from a started engine to the moment."""
        await getattr(self, f"_{self.kill.moment}")()
        self.reached()

    async def _starting(self) -> None:
        """Do nothing: the start was over before that many messages had come."""

    async def _idle(self) -> None:
        await self._stream_to_the_end()

    async def _prefill(self) -> None:
        self._open(LONG_PROMPT)
        await asyncio.sleep(0)

    async def _decode(self) -> None:
        await asyncio.gather(*(event.wait() for event in self._open(SHORT_PROMPT)))

    async def _aborting(self) -> None:
        await self._decode()
        for stream in self.streams[::2]:
            stream.cancel()

    async def _asleep(self) -> None:
        assert self.engine is not None
        await self.engine.sleep()

    async def _draining(self) -> None:
        await self._decode()
        self._call(lambda engine: engine.shutdown(drain=True))

    async def _scaling(self) -> None:
        await self._decode()
        size = LAYOUTS[self.kill.layout].other_size
        assert size is not None
        self._call(lambda engine: engine.scale_blocking(size))

    def _open(self, prompt: Mapping[str, list[int]]) -> list[asyncio.Event]:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        self.streams += [asyncio.create_task(self._read(prompt, event)) for event in begun]
        return begun

    async def _read(self, prompt: Mapping[str, list[int]], begun: asyncio.Event) -> None:
        assert self.engine is not None
        try:
            async for _ in self.engine.generate(dict(prompt), STREAM):
                begun.set()
        finally:
            begun.set()

    async def _stream_to_the_end(self) -> None:
        self._open(SHORT_PROMPT)
        await asyncio.gather(*self.streams)
        self.streams.clear()

    def _call(self, function: Callable[[AsyncLLM], Any]) -> None:
        assert self.engine is not None
        loop = asyncio.get_running_loop()
        self.others.append(loop.run_in_executor(None, function, self.engine))


async def _be_the_client(kill: Kill) -> None:
    def say() -> None:
        print("now", flush=True)

    scene = Scene(kill, say)
    scene.start()
    await scene.play()
    # It is killed here; a bound engine must not outlive it.
    await asyncio.gather(*scene.streams, *scene.others, return_exceptions=True)
    await asyncio.Event().wait()


def wait_a_moment(seconds: float) -> None:
    """Let a random time pass: nothing is waited for."""
    threading.Event().wait(seconds)


def victims_that_live(kill: Kill) -> Iterator[psutil.Process]:
    """Send SIGKILL, and give what got it."""
    for victim in find_victims(kill):
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
            yield victim


if __name__ == "__main__":
    asyncio.run(_be_the_client(Kill(sys.argv[1], sys.argv[2], "client", 0, float(sys.argv[3]))))
