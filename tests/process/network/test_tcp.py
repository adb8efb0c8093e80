"""An engine on a network: its sockets are TCP ports with CURVE, and all else is as on one machine."""

from __future__ import annotations

from process_support.engine_under_test import FAKE_EXECUTOR

from nbengine.config import ParallelConfig


def parallel(**options):
    return ParallelConfig(
        distributed_executor_backend=FAKE_EXECUTOR, data_parallel_address="127.0.0.1", **options
    )


def test_requests_stream_over_tcp(start_engine) -> None:
    engine = start_engine(parallel=parallel())
    client = engine.client().attach()
    client.add("r", [1, 2, 3])
    client.wait_finished("r")
    assert client.tokens("r") == [4, 5, 6, 7, 8, 9, 10, 11]
    assert engine.info.address("host.sock").startswith("tcp://127.0.0.1:")
    client.leave()


def test_what_two_cores_do_is_published_over_tcp(start_engine) -> None:
    engine = start_engine(parallel=parallel())
    client = engine.client().attach()
    socket = client.subscribe()
    client.add("r", [1], max_tokens=4)
    client.wait_finished("r")
    idle = client.read_stats(socket, lambda s: not s.engines_running and s.engines[0].step_counter > 0)
    assert idle.engines[0].num_free_blocks == 64
    client.leave()
