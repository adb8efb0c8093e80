"""Time msgpack encoding and decoding of the messages that cross the wire each step.

    python benchmarks/bench_serial.py [--json PATH]

Times are microseconds. The message shapes are those of the peer's benchmark: step outputs with one token per
request and the scheduler's stats, and a request with a 1,000-token prompt.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.metrics.stats import SchedulerStats
from nbengine.sampling_params import SamplingParams

REPEATS = 3


def timed(function: Callable[[], Any], calls: int) -> dict[str, float]:
    """Median and 90th percentile of one call, in microseconds."""
    for _ in range(calls // 10):
        function()
    times = []
    for _ in range(REPEATS):
        gc.collect()
        for _ in range(calls):
            start = time.perf_counter_ns()
            function()
            times.append(time.perf_counter_ns() - start)
    times.sort()
    return {
        "median_us": round(statistics.median(times) / 1e3, 2),
        "p90_us": round(times[len(times) * 9 // 10] / 1e3, 2),
    }


def request_id() -> str:
    return f"cmpl-{uuid.uuid4().hex}-0-{uuid.uuid4().hex[:8]}"


def bench_outputs(requests: int, calls: int, rng: random.Random) -> dict[str, Any]:
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
        "message": "EngineCoreOutputs",
        "requests": requests,
        "bytes": len(wire),
        "encode": timed(lambda: encoder.encode_into(message, buffer), calls),
        "decode": timed(lambda: decoder.decode(wire), calls),
    }


def bench_request(prompt_tokens: int, calls: int, rng: random.Random) -> dict[str, Any]:
    request = EngineCoreRequest(
        request_id=request_id(),
        prompt_token_ids=[rng.randrange(3, 49000) for _ in range(prompt_tokens)],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True),
        arrival_time=time.time(),
        external_req_id=request_id(),
    )
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder[EngineCoreRequest](EngineCoreRequest)
    wire = bytes(encoder.encode(request)[0])
    if decoder.decode(wire).prompt_token_ids != request.prompt_token_ids:
        raise SystemExit("the request did not survive the round trip")
    return {
        "message": "EngineCoreRequest",
        "prompt_tokens": prompt_tokens,
        "bytes": len(wire),
        "encode": timed(lambda: encoder.encode(request), calls),
        "decode": timed(lambda: decoder.decode(wire), calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=2000, help="timed calls, three times over")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    rng = random.Random(3)
    results = [bench_outputs(requests, arguments.calls, rng) for requests in (1, 32, 256)]
    results.append(bench_request(1000, arguments.calls, rng))
    for result in results:
        size = result.get("requests", result.get("prompt_tokens"))
        encode, decode = result["encode"]["median_us"], result["decode"]["median_us"]
        print(f"{result['message']:18} {size:5}  encode {encode:7.2f} µs  decode {decode:7.2f} µs")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
