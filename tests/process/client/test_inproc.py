"""The engine in this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nbengine import LLM, SamplingParams
from nbengine.errors import EngineDeadError, InvalidArgumentError, RequestError, UtilityError
from nbengine.ipc.messages import EngineCoreRequest

StartLLM = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture
def start(start_llm: StartLLM) -> StartLLM:
    return lambda **options: start_llm(multiprocess=False, **options)


def test_it_generates_without_processes_or_sockets(start: StartLLM, private_socket_dir: Path) -> None:
    before = set(private_socket_dir.iterdir())
    llm = start()
    outputs = llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": [50]}], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[6, 7, 8, 9, 10], [51, 52, 53, 54, 55]]
    assert set(private_socket_dir.iterdir()) == before
    (engine,) = llm.stats().engines
    assert engine.num_free_blocks == engine.num_blocks
    with pytest.raises(UtilityError, match="nonsense"):
        llm.llm_engine.call_utility("nonsense")


def test_a_refusal_comes_as_an_error_of_that_request(start: StartLLM) -> None:
    engine = start().llm_engine
    bad = EngineCoreRequest("bad", [10_000], GREEDY.clone(), external_req_id="bad")
    engine.output_processor.add_request(bad, None)
    engine.engine_core.add_request(bad)
    assert engine.step() == []
    with pytest.raises(RequestError, match="10000"):
        engine.step()


def test_an_interrupt_takes_effect_between_steps(start: StartLLM) -> None:
    llm = start(knobs={"step_seconds": 0.02})
    steps = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]

    def interrupt_when_running() -> None:
        while not steps.has_unfinished_requests():
            threading.Event().wait(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_when_running)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            {"prompt_token_ids": [5]}, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False
        )
    interrupter.join()
    (output,) = llm.generate({"prompt_token_ids": [7]}, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == [8, 9, 10, 11, 12]
    (engine,) = llm.stats().engines
    assert engine.num_free_blocks == engine.num_blocks
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failing_step_ends_the_engine_with_the_models_error(start: StartLLM) -> None:
    llm = start(knobs={"fail_at_token": 8})
    with pytest.raises(EngineDeadError, match="the model broke at token 8") as caught:
        llm.generate({"prompt_token_ids": [5]}, GREEDY, use_tqdm=False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineDeadError, match="the model broke"):
        llm.generate({"prompt_token_ids": [5]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("data_parallel_size", 2),
        ("data_parallel_backend", "ray"),
        ("data_parallel_address", "127.0.0.1"),
    ],
)
def test_one_process_refuses_what_needs_several(option: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{option} must be .* with multiprocess=False"):
        LLM("random-tiny", multiprocess=False, **{option: value})
