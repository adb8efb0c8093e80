"""An allocation that fails in a step ends the request that asked for what was to be allocated; all others get what they get
without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nbengine.config import EngineConfig
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.sampling import penalties, sampler
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.output import (
    CachedRequestData,
    Fault,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from nbengine.worker.batch import pooler, prompt_logprobs
from nbengine.worker.batch.allocation import Allocations, is_out_of_memory
from nbengine.worker.model_runner import ModelRunner
from tests.unit.worker import test_stages as stages
from tests.unit.worker.test_stages import Arrival, Engine, Result, check, divided, five_layers, prompt_of

__all__ = ["five_layers"]

OTHERS = [Arrival(kind, kind, 2 * place) for place, kind in enumerate(stages.KINDS) if kind != "aborted"]
ROOM_COLUMNS = 64
ROOM_STATES = 21
DIFFERENT = list(range(80))


def asking(**extras: Any) -> SamplingParams:
    return SamplingParams(temperature=0, seed=0, max_tokens=6, ignore_eos=True, **extras)


def growing(**extras: Any) -> SamplingParams:
    return SamplingParams(temperature=3.0, seed=1, max_tokens=60, ignore_eos=True, **extras)


DOOMED: dict[str, tuple[list[int], SamplingParams | None, str]] = {
    "begins prompt logprobs": (prompt_of(40, 1), asking(prompt_logprobs=6), "prompt_logprobs=6"),
    "computes prompt logprobs": (prompt_of(40, 2), asking(prompt_logprobs=7), "prompt_logprobs=7"),
    "hands over prompt logprobs": (prompt_of(55, 2), asking(prompt_logprobs=1), "prompt_logprobs=1"),
    "many logprobs": (prompt_of(9, 3), asking(logprobs=9), "logprobs=9"),
    "penalties at once": (DIFFERENT, asking(repetition_penalty=1.5), "repetition_penalty=1.5"),
    "penalties in mid-run": (prompt_of(30, 4), growing(repetition_penalty=1.2), "repetition_penalty=1.2"),
    "states": (prompt_of(50, 5), None, "the task encode"),
    "mean": (prompt_of(60, 6), None, "the task embed"),
}


def fail(room: Callable[..., bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with no more memory than for what there is `room` for."""

    def with_little_memory(*args: Any, **options: Any) -> Any:
        if not room(*args):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return function(*args, **options)

    return with_little_memory


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave too little memory for what the doomed ask for."""
    seams: list[tuple[object, str, Callable[..., bool]]] = [
        (prompt_logprobs.PromptLogprobs, "_begin", lambda _, new, num_top: num_top != 6),
        (prompt_logprobs, "compute_logprobs", lambda logits, targets, num_top: num_top < 7),
        (prompt_logprobs, "LogprobsLists", lambda ids, logprobs, ranks: len(ranks) < 50),
        (sampler, "compute_logprobs", lambda logits, token_ids, num_top: num_top < 9),
        (penalties.F, "pad", lambda part, extra: part.shape[1] + extra[1] <= ROOM_COLUMNS),
        (pooler, "_finished_states", lambda states, params: len(states) < 50),
        (torch, "segment_reduce", lambda states, _: len(states) <= ROOM_STATES),
    ]
    for owner, name, room in seams:
        monkeypatch.setattr(owner, name, fail(room, getattr(owner, name)))


@pytest.fixture(autouse=True)
def doomed_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (prompt, params, _) in DOOMED.items():
        monkeypatch.setitem(stages.KINDS, name, (prompt, params))
    whole = stages.request_of

    def request_of(arrival: Arrival) -> EngineCoreRequest:
        wire = whole(arrival)
        if arrival.kind == "states":
            wire.pooling_params = PoolingParams(task="encode")
        return wire

    monkeypatch.setattr(stages, "request_of", request_of)


@pytest.fixture(scope="module")
def expected(five_layers: EngineConfig) -> dict[str, Result]:
    """Compute the results of one rank, one step at a time, with room for all, and nobody doomed."""
    return Engine(five_layers, 400).run(OTHERS)


@pytest.mark.parametrize("pp_size", [1, 3])
def test_who_asks_for_too_much_ends_and_the_others_get_what_they_get_without(
    five_layers: EngineConfig, expected: dict[str, Result], scarce: None, pp_size: int
) -> None:
    engine = Engine(divided(five_layers, 1, pp_size), 120, seed=pp_size)
    doomed = [Arrival(kind, kind, 3 * place) for place, kind in enumerate(DOOMED)]
    found = engine.run([*OTHERS, *doomed])
    check({name: result for name, result in found.items() if name in expected}, expected)
    for kind, (_, _, asked) in DOOMED.items():
        assert f"does not have enough memory for {asked} with " in (found[kind].error or ""), kind
    assert 8 < len(found["penalties in mid-run"].tokens) < 60
    assert engine.scheduler.make_stats().num_free_blocks == 120


def test_what_is_too_much_for_all_together_may_be_done_for_each(
    five_layers: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every feature of the sampler at once, with room for one row at a time."""
    arrivals = [
        Arrival(f"{kind} {n}", kind)
        for kind in ("penalties", "constraints", "logprobs", "biased")
        for n in "ab"
    ]
    # Its log probabilities tell whether the logits that a row begins with are the model's.
    biased = asking(logit_bias=dict.fromkeys(range(100), 3.0), presence_penalty=1.0, logprobs=2)
    monkeypatch.setitem(stages.KINDS, "biased", (prompt_of(6, 7), biased))
    expected = Engine(five_layers, 400).run(arrivals)
    allow_one_row(monkeypatch)
    check(Engine(five_layers, 400).run(arrivals), expected)


def test_each_row_alone_has_its_own_grammar(
    new_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_one_row(monkeypatch)
    params = {"a": asking(), "b": asking(repetition_penalty=1.5), "c": asking()}
    news = [NewRequestData(name, [1, 2], params[name], [place], 0) for place, name in enumerate("abc")]
    plan = SchedulerOutput(news, CachedRequestData(), dict.fromkeys("abc", 2), 6, set())
    masks = np.zeros((2, -(-258 // 32)), np.int32)
    masks[0, 41 // 32], masks[1, 7 // 32] = 1 << 41 % 32, 1 << 7 % 32
    runner = new_runner()
    assert runner.execute_model(plan) is None
    output = runner.sample_tokens(GrammarOutput(["c", "b"], masks))
    assert output.faults is None
    assert output.sampled_token_ids[1:] == [[7], [41]]


def allow_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave memory for one row at a time, the lack of which shows after logits have been changed in place."""
    in_place = penalties.PenaltyTable.apply

    def penalise(table: penalties.PenaltyTable, logits: torch.Tensor, rows: penalties.PenaltyRows) -> None:
        in_place(table, logits, rows)
        if len(logits) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(penalties.PenaltyTable, "apply", penalise)


def test_memory_errors_are_told_from_all_others_on_whichever_device() -> None:
    for allocate in (lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: np.empty(1 << 60, np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid"))
    assert not is_out_of_memory(None)


def test_only_a_shortage_is_survived_and_only_where_no_other_rank_samples_the_same() -> None:
    with pytest.raises(RuntimeError, match="a bug"), Allocations().attempt():
        raise RuntimeError("a bug")
    with pytest.raises(MemoryError), Allocations(is_alone=False).attempt():
        raise MemoryError


def test_a_fault_is_written_once_and_beside_those_that_are_there() -> None:
    allocations = Allocations()
    assert allocations.each(lambda items: np.empty(1 << 50 + max(items)) if max(items) else 0, [0, 9]) == [9]
    allocations.starve("b")
    output = ModelRunnerOutput(["a", "b"], [[1], [2]], faults={"a": Fault.NOT_FINITE})
    allocations.put_faults(output)
    assert output.faults == {"a": Fault.NOT_FINITE, "b": Fault.OUT_OF_MEMORY}
    later = ModelRunnerOutput(["b"], [[3]])
    allocations.put_faults(later)
    assert later.faults is None
