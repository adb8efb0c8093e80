"""Requests as they come off the wire."""

from __future__ import annotations

import numpy as np
import pytest

from nbengine.errors import RequestError
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.kv_cache.prefix import BlockHasher
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.request import Request, RequestStatus


def test_a_request_keeps_what_the_wire_says_and_hashes_its_full_blocks() -> None:
    params = SamplingParams(max_tokens=3)
    wire = EngineCoreRequest(
        "r1", list(range(10)), params, arrival_time=4.5, priority=2, client_index=7, cache_salt="s"
    )
    request = Request.from_engine_core_request(wire, BlockHasher(4))
    assert (request.request_id, request.client_index, request.priority, request.arrival_time) == (
        "r1",
        7,
        2,
        4.5,
    )
    assert request.sampling_params is params
    assert request.status is RequestStatus.WAITING
    assert request.num_prompt_tokens == request.num_tokens == 10
    expected: list[bytes] = []
    BlockHasher(4).extend(expected, list(range(10)), (("cache_salt", "s"),))
    assert request.block_hashes == expected


def test_the_prompt_is_not_changed_by_what_is_sampled() -> None:
    prompt = [1, 2, 3]
    request = Request.from_engine_core_request(EngineCoreRequest("r", prompt, SamplingParams()), None)
    request.all_token_ids.append(4)
    assert prompt == request.prompt_token_ids == [1, 2, 3]
    assert request.block_hashes == []


def test_a_prompt_of_embeddings_has_zeros_for_tokens_and_is_hashed_by_its_content() -> None:
    def hashes(embeds: np.ndarray, block_size: int = 4) -> list[bytes]:
        wire = EngineCoreRequest("r", None, SamplingParams(), prompt_embeds=embeds)
        request = Request.from_engine_core_request(
            wire, BlockHasher(block_size), memoryview(embeds).cast("B")
        )
        assert request.prompt_token_ids == request.all_token_ids == [0] * len(embeds)
        assert request.num_prompt_tokens == len(embeds)
        assert request.prompt_embeds is embeds
        return request.block_hashes

    embeds = np.arange(60, dtype=np.float32).reshape(10, 6)
    other = embeds.copy()
    other[5, 3] += 1
    assert len(hashes(embeds)) == 2
    assert hashes(embeds.copy()) == hashes(embeds)
    assert hashes(embeds[:8]) == hashes(embeds)
    assert hashes(other)[0] == hashes(embeds)[0]
    assert hashes(other)[1] != hashes(embeds)[1]


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (EngineCoreRequest("r", [1], None), "either sampling_params or pooling_params must be given"),
        (EngineCoreRequest("r", [1], SamplingParams(), PoolingParams()), "either sampling_params or pooling"),
    ],
)
def test_a_kind_of_request_that_is_not_available_is_refused(wire: EngineCoreRequest, said: str) -> None:
    with pytest.raises(RequestError, match=f"request r: {said}"):
        Request.from_engine_core_request(wire, None)
