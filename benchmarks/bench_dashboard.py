"""Measure what watching costs an engine: the time of its steps with followers of its trace.

    python benchmarks/bench_dashboard.py [--json PATH] [--streams N] [--step-us US] [--seconds S]

A model of a fixed step time, one step at a time so that nothing is hidden behind it, has `--streams` requests
that decode. The interval of a step is the time between a stream's first and last token, a token. Followers
are processes that rebuild the engine's state, as a dashboard's thread does: none, one, ten, one that was
stopped (SIGSTOP) and one that is killed in the middle; the sides alternate, and the ratio is the median of
neighbouring rounds.

"recording" is the time that the scheduler's own thread spends on it: microseconds of a step of 64 or 256
decoding requests, without and with somebody who wants to know, steps of both in turn; "mirror" is what a
follower spends on such a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench_scheduler import VOCAB_SIZE, make_request, make_scheduler, sample, settle
from common import alternate, median_ratio, parser, report

from nbengine import AsyncLLM, RequestOutputKind, SamplingParams
from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.metrics.trace import TraceBatch, TraceSnapshot
from nbengine.runtime.connection import engine_file, read_connection
from nbengine.scheduler.scheduler import Scheduler
from nbengine.scheduler.trace_stream import TraceStream

LIMIT = 1.02
"""The most that the step time with followers may be, as a multiple of the step time without."""
PROMPT_TOKENS = 128
MOST_FOLLOWERS = 10
STEPS_A_BATCH = 20


def follow(path: str) -> int:
    """Run a follower's process: it follows while it is told to, one line a command."""
    info = read_connection(Path(path))
    while sys.stdin.readline():
        with StatsSubscriber(info, trace=True) as subscriber:
            mirror = TraceMirror(0)
            while not select.select([sys.stdin], [], [], 0)[0]:
                message = subscriber.poll(0.05)
                if isinstance(message, TraceBatch | TraceSnapshot):
                    if mirror.seq is None:
                        print("begun", flush=True)
                    mirror.apply(message)
        print(len(mirror.steps), flush=True)
        sys.stdin.readline()
    return 0


class Follower:
    """A follower's process, seen from outside."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, __file__, "--follow", str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def _say(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        return self.process.stdout.readline()

    def begin(self) -> None:
        """Have the process follow; return when it does."""
        if self._say() != "begun\n":
            raise SystemExit("a follower got nothing")

    def end(self) -> int:
        """Have the process stop following; return the number of steps of which it has heard."""
        return int(self._say())

    def kill(self) -> None:
        """Kill the process without a word."""
        self.process.kill()
        self.process.wait()


class Rig:
    """The engine, its load, and followers that wait to be told."""

    def __init__(self, llm: AsyncLLM, streams: int, tokens: int) -> None:
        self._llm, self._streams, self._tokens = llm, streams, tokens
        self._path = engine_file(Path(llm.connection.run_dir))
        self._pool = [self._new() for _ in range(MOST_FOLLOWERS)]
        self._serial = itertools.count(1)
        self._half = 0.0
        """The seconds of half a round, as of the latest one."""

    def _new(self) -> Follower:
        return Follower(self._path)

    async def _stream(self) -> float:
        prompt = [3 + next(self._serial) % 200 for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(
            temperature=0, max_tokens=self._tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        first, count = 0.0, 0
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params):
            first = first or time.perf_counter()
            count += len(output.outputs[0].token_ids)
        return (time.perf_counter() - first) / (count - 1) * 1e6

    def load(self, meanwhile: Callable[[], None] | None = None) -> float:
        """Return the microseconds between two steps; `meanwhile` happens when half of the time has passed."""

        async def run() -> float:
            streams = [asyncio.create_task(self._stream()) for _ in range(self._streams)]
            if meanwhile is not None:
                await asyncio.sleep(self._half)
                meanwhile()
            return statistics.median(await asyncio.gather(*streams))

        start = time.perf_counter()
        interval = asyncio.run(run())
        self._half = (time.perf_counter() - start) / 2
        return interval

    def with_followers(self, count: int) -> float:
        """Return the interval with `count` followers that keep up."""
        for follower in self._pool[:count]:
            follower.begin()
        interval = self.load()
        heard = [follower.end() for follower in self._pool[:count]]
        # The last batch may still be on its way.
        if heard and min(heard) < 0.9 * self._tokens:
            raise SystemExit(f"of {self._tokens} steps followers heard of {heard}")
        return interval

    def with_frozen(self) -> float:
        """Return the interval with a follower that stands still from the beginning."""
        follower = self._pool[0]
        follower.begin()
        follower.process.send_signal(signal.SIGSTOP)
        interval = self.load()
        follower.process.send_signal(signal.SIGCONT)
        follower.end()
        return interval

    def with_killed(self) -> float:
        """Return the interval with a follower that dies in the middle."""
        follower = self._pool.pop()
        follower.begin()
        interval = self.load(follower.kill)
        self._pool.append(self._new())
        return interval

    def close(self) -> None:
        """End the followers."""
        for follower in self._pool:
            follower.kill()


@contextlib.contextmanager
def rig(arguments: Any) -> Iterator[Rig]:
    """Run an engine whose model takes `--step-us` for a step."""
    os.environ["NBENGINE_BENCH_STEP_SECONDS"] = str(arguments.step_us / 1e6)
    llm = AsyncLLM(
        "random-tiny",
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=arguments.streams,
        num_gpu_blocks_override=20_000,
        async_scheduling=False,
        distributed_executor_backend="fake_executor:SerialDeviceExecutor",
    )
    watched: Rig | None = None
    try:
        watched = Rig(llm, arguments.streams, int(arguments.seconds / arguments.step_us * 1e6))
        yield watched
    finally:
        if watched is not None:
            watched.close()
        llm.shutdown()


def measure_engine(arguments: Any) -> list[dict[str, Any]]:
    """Measure a row for each kind of audience."""
    with rig(arguments) as watched:
        sides: dict[str, Callable[[], float]] = {
            "nobody": watched.load,
            "1": lambda: watched.with_followers(1),
            "10": lambda: watched.with_followers(MOST_FOLLOWERS),
            "1 stopped": watched.with_frozen,
            "1 killed": watched.with_killed,
        }
        figures = alternate(arguments.rounds, *sides.values())
    return [
        {
            "followers": name,
            "step µs": statistics.median(intervals),
            "ratio": median_ratio(intervals, figures[0]),
            "limit": LIMIT if name != "nobody" else "",
        }
        for name, intervals in zip(sides, figures, strict=True)
    ]


# The cost of a step, in one process.


def decoding(count: int) -> Scheduler:
    """Make a scheduler of `count` requests that decode."""
    rng = random.Random(7)
    params = SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True)
    scheduler = make_scheduler(count, 8192)
    for number in range(count):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS + number % 16)]
        scheduler.add_request(make_request(f"r{number}", prompt, params, scheduler))
    while not scheduler.running or any(request.num_output_tokens == 0 for request in scheduler.running):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, sample(plan, rng))
    return scheduler


def step_us(scheduler: Scheduler, rng: random.Random) -> float:
    """Return the microseconds that the scheduler takes for a step."""
    begin = time.perf_counter_ns()
    plan = scheduler.schedule()
    planned = time.perf_counter_ns()
    output = sample(plan, rng)
    answered = time.perf_counter_ns()
    scheduler.update_from_output(plan, output)
    return (planned - begin + time.perf_counter_ns() - answered) / 1e3


def measure_recording(count: int, steps: int) -> dict[str, Any]:
    """Measure what recording and following a step of `count` requests cost."""
    rng = random.Random(1)
    alone, watched = decoding(count), decoding(count)
    stream = TraceStream(watched)
    stream.record(True)
    messages = [msgspec.msgpack.encode(each) for each in stream.snapshot(time.time(), watched.make_stats())]
    settle()
    figures: tuple[list[float], list[float]] = ([], [])
    for number in range(steps):
        for side, scheduler in enumerate((alone, watched)):
            figures[side].append(step_us(scheduler, rng))
        if number % STEPS_A_BATCH == STEPS_A_BATCH - 1:
            batch = stream.take_batch(time.time(), watched.make_stats())
            messages.append(msgspec.msgpack.encode(batch))
    plain, recorded = (statistics.median(side) for side in figures)
    return {
        "requests": count,
        "step µs": plain,
        "recording µs": recorded - plain,
        "bytes": sum(map(len, messages[1:])) / steps,
        "mirror µs": mirror_us(messages),
    }


def mirror_us(messages: Sequence[bytes]) -> float:
    """Return the microseconds of a step's part of these messages, decoding included."""
    decoder = msgspec.msgpack.Decoder(TraceBatch | TraceSnapshot)
    mirror = TraceMirror(0)
    mirror.apply(decoder.decode(messages[0]))
    start = time.process_time()
    for message in messages[1:]:
        if not mirror.apply(decoder.decode(message)):
            raise SystemExit("a batch is missing")
    return (time.process_time() - start) / len(mirror.steps) * 1e6


def main() -> int:
    """Measure the engine with its audience, then the parts by themselves."""
    if sys.argv[1:2] == ["--follow"]:
        return follow(sys.argv[2])
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--step-us", type=float, default=5000, help="microseconds of a step of the model")
    options.add_argument("--seconds", type=float, default=2.0, help="seconds of each round")
    options.add_argument("--steps", type=int, default=2000, help="steps of the parts by themselves")
    arguments = options.parse_args()
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows = measure_engine(arguments)
    parts = [measure_recording(count, arguments.steps) for count in (64, 256)]
    report("recording and following a step", parts, None)
    report("an engine that is followed", rows, arguments.json, parts=parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
