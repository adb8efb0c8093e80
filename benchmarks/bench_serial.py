"""Time msgpack encoding and decoding of the messages that cross the wire each step.

    python benchmarks/bench_serial.py [--json PATH] [--only outputs|request|tensors]

Times are microseconds. The message shapes are those of the peer's benchmark: step outputs with one token per
request and the scheduler's stats, and a request with a 1,000-token prompt. Tensors travel between two
processes, over the engine's kind of sockets: in a frame of the message, or through shared memory.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import uuid
from collections.abc import Callable
from multiprocessing import Process
from pathlib import Path
from typing import Any

import zmq
from common import alternate, median_ratio, parser, report

from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.shm_tensors import ShmTensorReceiver, ShmTensorSender
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import SchedulerStats
from nbengine.runtime.directories import EngineDirectories
from nbengine.sampling_params import RequestOutputKind, SamplingParams


def timed(name: str, function: Callable[[], Any], calls: int, rounds: int) -> dict[str, float]:
    """Return the median and 90th percentile of one call, in microseconds."""
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


def bench_tensor(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Measure the time until the other process holds the tensor and has said so, and the part in which the
    sender is busy."""
    import torch

    tensor = torch.randn(num_bytes // 4)
    directories = EngineDirectories.make()
    run_dir, tensor_dir = Path(directories.run_dir), Path(directories.tensor_dir)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = make_socket(context, f"ipc://{run_dir}/in", zmq.ROUTER, bind=True)
    answers = make_socket(context, f"ipc://{run_dir}/out", zmq.PULL, bind=True)
    child = Process(target=receive_tensors, args=(run_dir, tensor_dir))
    child.start()
    try:
        peer, _ = sender.recv_multipart()
        placed = ShmTensorSender(tensor_dir, 1, threshold=1)
        encoders = (MsgpackEncoder(), MsgpackEncoder(oob_tensor_consumer=placed))
        busy: list[list[float]] = [[], []]

        def round_trip(side: int) -> float:
            start = time.perf_counter_ns()
            sender.send_multipart((peer, *encoders[side].encode(tensor)), copy=False)
            busy[side].append(time.perf_counter_ns() - start)
            answers.recv()
            return float(time.perf_counter_ns() - start)

        figures = alternate(rounds, lambda: round_trip(0), lambda: round_trip(1), warmup=5)
        sender.send_multipart((peer, b""))
        placed.close()
    finally:
        child.join()
        context.destroy(linger=0)
        directories.remove()
    row: dict[str, Any] = {"tensor": f"{num_bytes >> 10} KiB"}
    for name, times, sending in zip(("frame", "shared memory"), figures, busy, strict=True):
        row[f"{name} µs"] = round(statistics.median(times) / 1e3, 1)
        row[f"{name}, sender µs"] = round(statistics.median(sending) / 1e3, 1)
    row["shared memory / frame"] = round(median_ratio(figures[1], figures[0]), 2)
    return row


def receive_tensors(run_dir: Path, tensor_dir: Path) -> None:
    """Run the other process: decode what comes, until an empty message."""
    import torch  # noqa: F401 (importing it is no part of the first round)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = make_socket(context, f"ipc://{run_dir}/in", zmq.DEALER, bind=False)
    answers = make_socket(context, f"ipc://{run_dir}/out", zmq.PUSH, bind=False)
    decoder = MsgpackDecoder[Any](oob_tensor_provider=ShmTensorReceiver(tensor_dir))
    receiver.send(b"")
    while (frames := receiver.recv_multipart(copy=False))[0].bytes:
        decoder.decode(frames)
        answers.send(b"")
    context.destroy(linger=0)


def main() -> None:
    """Measure one row for each message."""
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=2000, help="timed calls of each round")
    options.add_argument("--tensor-rounds", type=int, default=200, help="tensors of each size and way")
    options.add_argument(
        "--only", choices=("outputs", "request", "tensors"), help="measure this kind of row alone"
    )
    options.add_argument(
        "--requests", type=int, nargs="+", default=[1, 32, 256], help="requests in a step's outputs"
    )
    options.set_defaults(rounds=3)
    arguments = options.parse_args()
    rng = random.Random(3)
    kinds = (arguments.only,) if arguments.only else ("outputs", "request", "tensors")
    rows, tensors = [], []
    if "outputs" in kinds:
        rows += [bench_outputs(count, arguments.calls, arguments.rounds, rng) for count in arguments.requests]
    if "request" in kinds:
        rows.append(bench_request(1000, arguments.calls, arguments.rounds, rng))
    if "tensors" in kinds:
        tensors = [bench_tensor(kib << 10, arguments.tensor_rounds) for kib in (64, 256, 1024, 4096, 16384)]
        report("tensors between two processes", tensors, None)
    report("messages", rows, arguments.json, tensors=tensors)


if __name__ == "__main__":
    main()
