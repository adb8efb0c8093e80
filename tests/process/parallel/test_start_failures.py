"""An engine of several real workers that cannot start names the first cause, and leaves nothing of any
rank."""

from __future__ import annotations

import socket

import pytest

from nbengine import LLM
from nbengine.errors import EngineStartError


def test_a_meeting_place_that_is_taken_is_the_cause_and_the_next_start_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        method = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineStartError, match=r"distributed_init_method='tcp:.*in use"):
            LLM("random-tiny", tensor_parallel_size=2, distributed_init_method=method)
    with LLM("random-tiny", tensor_parallel_size=2, num_gpu_blocks_override=64) as llm:
        assert len(llm.stats().engines[0].workers) == 2


def test_a_kv_cache_that_no_rank_has_room_for_is_refused_with_the_numbers() -> None:
    with pytest.raises(EngineStartError, match=r"the KV cache does not fit on cpu \(2 workers together\)"):
        LLM("random-tiny", pipeline_parallel_size=2, kv_cache_memory_bytes=1 << 50)
