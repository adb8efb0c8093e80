"""A request ends with the first token that ends it, of which only what belongs to the answer is kept."""

from __future__ import annotations

from typing import Any

import pytest

from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from nbengine.scheduler.stop import append_tokens, token_limit

EOS = 2
STOPPED, CAPPED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
WAITING = RequestStatus.WAITING


def make_request(max_model_len: int = 100, **params: Any) -> Request:
    sampling_params = SamplingParams(**{"max_tokens": 8, "eos_token_id": EOS, **params})
    request = Request("r", [5, 5, 5], sampling_params)
    request.max_total_tokens = token_limit(3, sampling_params, max_model_len)
    return request


@pytest.mark.parametrize(
    ("params", "sampled", "kept", "status", "stop_reason"),
    [
        ({}, [7, 8], [7, 8], WAITING, None),
        ({}, [7, EOS, 8], [7, EOS], STOPPED, None),
        ({"ignore_eos": True}, [7, EOS, 8], [7, EOS, 8], WAITING, None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [7, EOS], [7, EOS], STOPPED, EOS),
        ({"stop_token_ids": [EOS, 9]}, [EOS], [EOS], STOPPED, None),
        ({"stop_token_ids": [9, 8]}, [7, 8, 9], [7, 8], STOPPED, 8),
        ({"eos_token_id": None}, [EOS], [EOS], WAITING, None),
        ({"max_tokens": 2}, [7, 8, 9], [7, 8], CAPPED, None),
        ({"max_tokens": 2}, [7, EOS], [7, EOS], STOPPED, None),
        ({"min_tokens": 3}, [EOS, EOS, EOS, 7], [EOS, EOS, EOS], STOPPED, None),
        ({"min_tokens": 3, "stop_token_ids": [9]}, [9, 9, 7], [9, 9, 7], WAITING, None),
        ({"max_model_len": 5}, [7, 8, 9], [7, 8], CAPPED, None),
        ({"max_model_len": 5, "max_tokens": None}, [7, 8, 9], [7, 8], CAPPED, None),
        ({"max_model_len": 5, "min_tokens": 6}, [EOS, EOS, 9], [EOS, EOS], CAPPED, None),
        ({"max_tokens": None}, [7] * 97, [7] * 97, CAPPED, None),
    ],
)
def test_the_first_token_that_ends_a_request_is_its_last(
    params: dict[str, Any],
    sampled: list[int],
    kept: list[int],
    status: RequestStatus,
    stop_reason: int | None,
) -> None:
    at_once = make_request(**params)
    assert append_tokens(at_once, sampled) == kept
    one_by_one = make_request(**params)
    for token in kept:
        assert one_by_one.status is WAITING
        append_tokens(one_by_one, [token])
    for request in (at_once, one_by_one):
        assert request.output_token_ids == kept
        assert request.num_tokens == len(request.all_token_ids) == 3 + len(kept)
        assert request.num_output_tokens == len(kept)
        assert request.status is status
        assert (request.status in FINISH_REASONS) == (status is not WAITING)
        assert request.stop_reason == stop_reason
