"""Unfinished pooling requests in the frontend: one outcome each, for its own caller."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from nbengine.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidArgumentError,
    RefusedArgumentError,
    RequestAbortedError,
)
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.outputs.pooling_state import PoolingFuture
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from nbengine.sampling_params import PoolingParams

DATA = np.arange(4, dtype=np.float32)


def processor_with(**waiting: PoolingFuture | None) -> OutputProcessor:
    processor = OutputProcessor(None)
    for name, future in waiting.items():
        request = EngineCoreRequest(f"{name}-1", [1, 2], None, PoolingParams(), external_req_id=name)
        processor.pooling.add(request, "text", future)
    return processor


def answer(request_id: str, **changes: Any) -> EngineCoreOutput:
    fields = {"finish_reason": FinishReason.STOP, "pooling_output": DATA, "num_cached_tokens": 1, **changes}
    return EngineCoreOutput(request_id, [], **fields)


def test_a_result_goes_to_the_caller_that_steps_unless_someone_waits_for_it() -> None:
    future: PoolingFuture = Future()
    processor = processor_with(a=None, b=future)
    assert processor.get_num_unfinished_requests() == 2
    processed = processor.process_outputs([answer("a-1"), answer("b-1"), answer("unknown")])
    (output,) = processed.pooling_outputs
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("a", "text", [1, 2])
    assert (output.finished, output.num_cached_tokens) == (True, 1)
    assert output.outputs.data is DATA
    assert future.result(0).request_id == "b"
    assert processor.get_num_unfinished_requests() == 0
    assert processed.request_outputs == []


def test_a_refusal_fails_its_request_alone() -> None:
    future: PoolingFuture = Future()
    processor = processor_with(a=None, b=future, c=None)
    refused = {"finish_reason": FinishReason.ERROR, "pooling_output": None, "error": "too long"}
    processed = processor.process_outputs(
        [answer("a-1", **refused, argument="x"), answer("b-1", **refused, is_unavailable=True)]
    )
    (error,) = processed.errors
    assert isinstance(error, RefusedArgumentError)
    assert (str(error), error.argument) == ("request a: too long", "x")
    with pytest.raises(EngineUnavailableError, match="request b: too long"):
        future.result(0)
    assert processor.unfinished_ids() == ["c-1"]


@pytest.mark.parametrize("request_id", ["a", "a-1"])
def test_an_abort_by_either_id_tells_the_waiting_and_drops_what_comes_later(request_id: str) -> None:
    future: PoolingFuture = Future()
    processor = processor_with(a=future, b=None)
    assert processor.abort_requests([request_id]) == ["a-1"]
    with pytest.raises(RequestAbortedError, match="request a was aborted"):
        future.result(0)
    assert processor.process_outputs([answer("a-1")]).pooling_outputs == []
    assert processor.abort_requests([request_id]) == []


def test_the_end_of_the_engine_fails_all_of_them() -> None:
    futures: list[PoolingFuture] = [Future(), Future()]
    processor = processor_with(a=futures[0], b=futures[1], c=None)
    processor.fail_requests(EngineDeadError("gone"))
    for future in futures:
        with pytest.raises(EngineDeadError, match="gone"):
            future.result(0)
    assert processor.get_num_unfinished_requests() == 0


def test_a_future_that_its_reader_has_cancelled_takes_nothing() -> None:
    future: PoolingFuture = Future()
    processor = processor_with(a=future)
    assert future.cancel()
    assert processor.process_outputs([answer("a-1")]).pooling_outputs == []
    assert processor.get_num_unfinished_requests() == 0


def test_an_internal_id_in_use_is_refused() -> None:
    processor = processor_with(a=None)
    with pytest.raises(InvalidArgumentError, match="unused by unfinished requests"):
        processor.pooling.add(EngineCoreRequest("a-1", [1], None, PoolingParams()), None)
