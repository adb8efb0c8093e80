"""Time msgpack encoding and decoding of the messages that cross the wire each step.

    python benchmarks/bench_serial.py [--json PATH] [--only outputs|request]

Times are microseconds. The message shapes are those of the peer's benchmark: step outputs with one token per
request and the scheduler's stats, and a request with a 1,000-token prompt.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

from common import parser, report

from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.metrics.stats import SchedulerStats
from nbengine.sampling_params import RequestOutputKind, SamplingParams


def timed(name: str, function: Callable[[], Any], calls: int, rounds: int) -> dict[str, float]:
    """Median and 90th percentile of one call, in microseconds."""
    for _ in range(calls // 10):
        function()
    times = []
    for _ in range(rounds):
        gc.collect()
        for _ in range(calls):
            start = time.perf_counter_ns()
            function()
            times.append(time.perf_counter_ns() - start)
    times.sort()
    return {
        f"{name} µs": round(statistics.median(times) / 1e3, 2),
        f"{name} 90th µs": round(times[len(times) * 9 // 10] / 1e3, 2),
    }


def request_id() -> str:
    return f"cmpl-{uuid.uuid4().hex}-0-{uuid.uuid4().hex[:8]}"


def bench_outputs(requests: int, calls: int, rounds: int, rng: random.Random) -> dict[str, Any]:
    outputs = [EngineCoreOutput(request_id(), [rng.randrange(3, 49000)]) for _ in range(requests)]
    message = EngineCoreOutputs(
        outputs=outputs, scheduler_stats=SchedulerStats(num_running_reqs=requests), timestamp=time.monotonic()
    )
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder[EngineCoreOutputs](EngineCoreOutputs)
    wire = bytes(encoder.encode(message)[0])
    if [o.new_token_ids for o in decoder.decode(wire).outputs] != [o.new_token_ids for o in outputs]:
        raise SystemExit("the step outputs did not survive the round trip")
    buffer = bytearray()
    return {
        "message": f"EngineCoreOutputs, {requests} requests",
        "bytes": len(wire),
        **timed("encode", lambda: encoder.encode_into(message, buffer), calls, rounds),
        **timed("decode", lambda: decoder.decode(wire), calls, rounds),
    }


def bench_request(prompt_tokens: int, calls: int, rounds: int, rng: random.Random) -> dict[str, Any]:
    request = EngineCoreRequest(
        request_id=request_id(),
        prompt_token_ids=[rng.randrange(3, 49000) for _ in range(prompt_tokens)],
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        ),
        arrival_time=time.time(),
        external_req_id=request_id(),
    )
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder[EngineCoreRequest](EngineCoreRequest)
    wire = bytes(encoder.encode(request)[0])
    if decoder.decode(wire).prompt_token_ids != request.prompt_token_ids:
        raise SystemExit("the request did not survive the round trip")
    return {
        "message": f"EngineCoreRequest, {prompt_tokens} tokens",
        "bytes": len(wire),
        **timed("encode", lambda: encoder.encode(request), calls, rounds),
        **timed("decode", lambda: decoder.decode(wire), calls, rounds),
    }


def main() -> None:
    """One row a message."""
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=2000, help="timed calls of each round")
    options.add_argument("--only", choices=("outputs", "request"), help="this message alone")
    options.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256], help="in a step's outputs")
    options.set_defaults(rounds=3)
    arguments = options.parse_args()
    rng = random.Random(3)
    rows = []
    if arguments.only != "request":
        rows += [bench_outputs(count, arguments.calls, arguments.rounds, rng) for count in arguments.requests]
    if arguments.only != "outputs":
        rows.append(bench_request(1000, arguments.calls, arguments.rounds, rng))
    report("messages", rows, arguments.json)


if __name__ == "__main__":
    main()
