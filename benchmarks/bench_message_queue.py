"""Measure what it costs to tell workers about a step and to hear from them, without a step.

    python benchmarks/bench_message_queue.py [--json PATH] [--readers 1 2] [--reply one all]

The queues are wired as the executor does it: one queue carries the call of `execute_model` with the
scheduler's output, a decoding step of 32 requests, to every worker; each worker has its own queue for its
answer, a model runner's output. A round trip ends when the answer of the first worker ("one", as
`execute_model` asks for), or of all, has been read. Workers are processes that compute nothing. `idle` is the
processor time of a worker that has waited for a second, and goes on to, in percent of a core.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench_scheduler import VOCAB_SIZE, make_request, make_scheduler, sample, settle
from common import parser, report

from nbengine.errors import QueueTimeoutError
from nbengine.ipc.queues.message_queue import Handle, MessageQueue
from nbengine.runtime.directories import SHARED_MEMORY
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tests.tools.scratch import shared_memory_prefix

NUM_REQUESTS = 32
WARMUP = 200
READY_SECONDS = 30.0
SETTLE_SECONDS = 1.0
IDLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Directories:
    """The private directories for the rings and for the sockets."""

    shared_memory: str
    sockets: str

    def queue(self, num_readers: int) -> MessageQueue:
        return MessageQueue(num_readers, directory=self.shared_memory, socket_directory=self.sockets)


@contextmanager
def directories() -> Iterator[Directories]:
    shared = str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix=shared_memory_prefix(), dir=shared) as memory,
        tempfile.TemporaryDirectory(prefix="nb-") as sockets,
    ):
        yield Directories(memory, sockets)


def worker(rank: int, calls: Handle, where: Directories, pipe: Connection) -> None:
    """Answer calls until None comes; then wait idly, and send what that took of a core."""
    with (
        closing(MessageQueue.create_from_handle(calls, rank)) as inbox,
        closing(where.queue(1)) as outbox,
    ):
        pipe.send(outbox.export_handle())
        inbox.wait_until_ready(READY_SECONDS)
        outbox.wait_until_ready(READY_SECONDS)
        answer = pipe.recv()
        settle()
        while (call := inbox.dequeue()) is not None:
            reply_rank = call[3]
            if reply_rank is None or reply_rank == rank:
                outbox.enqueue((True, answer))
        idle_wait(inbox, SETTLE_SECONDS)
        before, start = time.process_time(), time.perf_counter()
        idle_wait(inbox, IDLE_SECONDS)
        pipe.send((time.process_time() - before) / (time.perf_counter() - start))


def idle_wait(queue: MessageQueue, seconds: float) -> None:
    try:
        queue.dequeue(seconds)
    except QueueTimeoutError:
        return
    raise SystemExit("a message came to a worker that should have been idle")


def decoding_step() -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """Make a step in which every request computes one token, and its output."""
    rng = random.Random(1)
    scheduler = make_scheduler(256, 8192)
    params = SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(128 + index % 16)]
        scheduler.add_request(make_request(f"cmpl-{index:032x}-0-{index:08x}", prompt, params, scheduler))
    for _ in range(3):
        plan = scheduler.schedule()
        output = sample(plan, rng)
        scheduler.update_from_output(plan, output)
    if plan.total_num_scheduled_tokens != NUM_REQUESTS:
        raise SystemExit("this is no decoding step")
    return plan, output


def round_trips(num_readers: int, reply: str, steps: int) -> dict[str, Any]:
    """Measure the microseconds of a round trip and of the sending in it, and a waiting reader's share of a
    core, in percent."""
    plan, answer = decoding_step()
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        where = stack.enter_context(directories())
        calls = stack.enter_context(closing(where.queue(num_readers)))
        pipes = []
        for rank in range(num_readers):
            pipe, theirs = context.Pipe()
            process = context.Process(target=worker, args=(rank, calls.export_handle(), where, theirs))
            process.start()
            stack.callback(process.join)
            pipes.append(pipe)
        answers = [MessageQueue.create_from_handle(pipe.recv(), 0) for pipe in pipes]
        for queue in answers:
            stack.callback(queue.close)
        calls.wait_until_ready(READY_SECONDS)
        for queue, pipe in zip(answers, pipes, strict=True):
            queue.wait_until_ready(READY_SECONDS)
            pipe.send(answer)
        call = ("execute_model", (plan,), {}, 0 if reply == "one" else None)
        trips, sendings = _time(calls, answers[:1] if reply == "one" else answers, call, steps)
        calls.enqueue(None)
        idle = max(pipe.recv() for pipe in pipes)
    trips.sort()
    return {
        "readers": num_readers,
        "reply": reply,
        "round trip µs": _us(statistics.median(trips)),
        "90th µs": _us(trips[len(trips) * 9 // 10]),
        "enqueue µs": _us(statistics.median(sendings)),
        "idle %": round(idle * 100, 2),
    }


def _time(
    calls: MessageQueue, answers: list[MessageQueue], call: object, steps: int
) -> tuple[list[int], list[int]]:
    trips, sendings = [], []
    settle()
    for number in range(WARMUP + steps):
        start = time.perf_counter_ns()
        calls.enqueue(call)
        sent = time.perf_counter_ns()
        for queue in answers:
            queue.dequeue()
        end = time.perf_counter_ns()
        if number >= WARMUP:
            trips.append(end - start)
            sendings.append(sent - start)
    gc.unfreeze()
    return trips, sendings


def _us(nanoseconds: float) -> float:
    return round(nanoseconds / 1e3, 2)


def main() -> None:
    """Measure one row for each number of readers and way of replying: the round whose round trip is the
    median."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=3000)
    options.add_argument("--readers", type=int, nargs="+", default=[1, 2])
    options.add_argument("--reply", choices=("one", "all"), nargs="+", default=["one", "all"])
    arguments = options.parse_args()
    rows = []
    for readers in arguments.readers:
        for reply in arguments.reply if readers > 1 else arguments.reply[:1]:
            rounds = [round_trips(readers, reply, arguments.steps) for _ in range(arguments.rounds)]
            rounds.sort(key=lambda row: row["round trip µs"])
            row = rounds[len(rounds) // 2]
            rows.append(row | {"idle %": max(one["idle %"] for one in rounds)})
    report("message queue", rows, arguments.json)


if __name__ == "__main__":
    main()
