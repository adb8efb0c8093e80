"""An allocation that fails in a step ends the request that asked for what was to be allocated; all others get what they get
without it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
import torch
from parallel_support import ThreadCommunicator, ThreadGroup, ThreadWorld
from torch.utils._python_dispatch import TorchDispatchMode

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import ParallelState
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.models.step_output import StepOutput
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
from nbengine.worker.batch import allocation, pooler, prompt_logprobs
from nbengine.worker.batch.allocation import Allocations, Attempt, is_out_of_memory
from nbengine.worker.batch.row_by_row import StepLogits
from nbengine.worker.batch.sampling_batch import RowTokens, SamplingBatch
from nbengine.worker.model_runner import ModelRunner
from tests.support.thorough import amount
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


class Rank(threading.local):
    """The place of the rank whose thread asks, in its stage."""

    number = 0


RANK = Rank()


def fail(room: Callable[..., bool], function: Callable[..., Any], poor: set[int]) -> Callable[..., Any]:
    """Return `function` with no more memory than for what there is `room` for, on the `poor` ranks."""

    def with_little_memory(*args: Any, **options: Any) -> Any:
        if RANK.number in poor and not room(*args):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return function(*args, **options)

    return with_little_memory


def make_scarce(monkeypatch: pytest.MonkeyPatch, poor: set[int]) -> None:
    """Leave too little memory for what the doomed ask for on the ranks of a stage that are `poor`."""
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
        monkeypatch.setattr(owner, name, fail(room, getattr(owner, name), poor))


@pytest.fixture(autouse=True)
def numbered_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = stages.Ranks._serve

    def serve_with_number(ranks: stages.Ranks, parallel: ParallelState) -> None:
        RANK.number = parallel.layout.tp_rank
        serve(ranks, parallel)

    monkeypatch.setattr(stages.Ranks, "_serve", serve_with_number)


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


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "poor"), [(1, 1, {0}), (1, 3, {0}), (2, 1, {0}), (2, 1, {1}), (2, 2, {0, 1})]
)
def test_who_asks_for_too_much_ends_and_the_others_get_what_they_get_without(
    five_layers: EngineConfig,
    expected: dict[str, Result],
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    pp_size: int,
    poor: set[int],
) -> None:
    make_scarce(monkeypatch, poor)
    engine = Engine(divided(five_layers, tp_size, pp_size), 120, seed=pp_size)
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


def test_of_several_lists_of_penalties_that_outgrow_the_memory_at_once_each_ends_and_the_rest_goes_on(
    five_layers: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No column is there for the longest list of those that stay, either."""
    kept = ["greedy", "logprobs", "penalties"]
    others = [Arrival(kind, kind) for kind in kept]
    expected = Engine(five_layers, 400).run(others)
    prompt = list(range(ROOM_COLUMNS - 20))
    monkeypatch.setitem(stages.KINDS, "long", (prompt, growing(repetition_penalty=1.2)))
    make_scarce(monkeypatch, {0})
    found = Engine(five_layers, 400).run([*others, *(Arrival(f"long {n}", "long") for n in range(3))])
    check({kind: found[kind] for kind in kept}, expected)
    for n in range(3):
        assert "does not have enough memory for repetition_penalty=1.2" in (found[f"long {n}"].error or "")
        assert found[f"long {n}"].tokens


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


def test_only_a_shortage_is_survived() -> None:
    with pytest.raises(RuntimeError, match="a bug"), Allocations().attempt():
        raise RuntimeError("a bug")


def test_several_ranks_do_not_survive_what_was_counted_and_pay_nothing_for_it() -> None:
    def step(parallel: ParallelState) -> None:
        with Allocations(parallel.tp).attempt(is_counted=True):
            parallel.tp.all_gather(torch.zeros(3))
        with pytest.raises(MemoryError), Allocations(parallel.tp).attempt(is_counted=True):
            raise MemoryError
        assert isinstance(parallel.tp, ThreadCommunicator)
        assert parallel.tp.calls == [("all_gather", (3,))]

    ThreadWorld(2).run(step)


def test_an_exchange_that_has_begun_is_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = ThreadGroup.exchange

    def short_of_memory(group: ThreadGroup, rank: int, *args: Any) -> list[torch.Tensor]:
        if rank == 1:
            raise MemoryError("in the exchange")
        return exchange(group, rank, *args)

    def step(parallel: ParallelState) -> None:
        with Allocations(parallel.tp).attempt():
            parallel.tp.all_gather(torch.zeros(3))

    monkeypatch.setattr(ThreadGroup, "exchange", short_of_memory)
    with pytest.raises(MemoryError, match="in the exchange"):
        ThreadWorld(2).run(step)


@pytest.mark.parametrize("place", ["before the exchange", "after the exchange"])
def test_no_rank_goes_on_where_one_has_failed(place: str) -> None:
    def step(parallel: ParallelState) -> tuple[bool, list[str]]:
        reached = []
        with Allocations(parallel.tp).attempt() as attempt:
            for name in ("before the exchange", "after the exchange"):
                if name == place and parallel.layout.tp_rank == 1:
                    raise MemoryError
                parallel.tp.all_gather(torch.zeros(3))
                reached.append(name)
        # Nothing of the attempt is left in the way of what all do next.
        parallel.tp.all_gather(torch.zeros(4))
        return attempt.failed, reached

    reached = [] if place == "before the exchange" else ["before the exchange"]
    assert ThreadWorld(2).run(step) == [(True, reached)] * 2


def test_logits_are_computed_again_by_all_ranks_whichever_have_taken_them() -> None:
    def step(parallel: ParallelState) -> int:
        hidden = StepOutput(torch.zeros(2, 3))
        logits = StepLogits(parallel.tp.all_gather, hidden, None, 2)
        if parallel.layout.tp_rank == 0:
            logits.take()
        logits.again()
        assert isinstance(parallel.tp, ThreadCommunicator)
        return len(parallel.tp.calls)

    assert ThreadWorld(2).run(step) == [2, 2]


def test_penalties_that_one_rank_has_no_room_for_stay_in_no_ranks_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill = penalties.PenaltyTable._fill

    def step(parallel: ParallelState) -> tuple[bool, int]:
        RANK.number = parallel.layout.tp_rank
        tokens = RowTokens(np.zeros((2, 50), np.int32), np.full(2, 9), np.full(2, 9))
        batch = SamplingBatch(tokens, 300, torch.device("cpu"), allocations=Allocations(parallel.tp))
        return batch.add(0, asking(repetition_penalty=1.5), 1), len(batch._penalties)

    monkeypatch.setattr(penalties.PenaltyTable, "_fill", fail(lambda *_: False, fill, {1}))
    assert ThreadWorld(2).run(step) == [(False, 0)] * 2


class OneFailure(TorchDispatchMode):
    """A lack of memory for one operation of torch, the one that has the number `at` among those of all attempts
    of one rank."""

    def __init__(self, rank: int, at: int) -> None:
        super().__init__()
        self.rank, self.at, self.count = rank, at, 0
        self.attempt: Attempt | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What fails in an exchange ends the engine.
        if self.attempt is not None and self.attempt._survives:
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return function(*args, **(kwargs or {}))


def allocate_with(failure: OneFailure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attempts of the failure's rank go through it."""

    class Counted(Attempt):
        def __enter__(self) -> Self:
            super().__enter__()
            if RANK.number == failure.rank:
                failure.attempt = self
                failure.__enter__()
            return self

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> bool:
            if RANK.number == failure.rank:
                failure.__exit__(kind, error, trace)
            return super().__exit__(kind, error, trace)

    monkeypatch.setattr(allocation, "Attempt", Counted)


def test_whichever_operation_of_whichever_rank_lacks_memory_all_ranks_stay_alike(
    five_layers: EngineConfig, expected: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads' group compares the calls, `Ranks.output` the outputs of the ranks. One that lacks memory once
    ends those for whom it was needed, or nobody where they are tried again alone."""
    asking = {"penalties", "logprobs", "pooled"}

    def run(failure: OneFailure) -> dict[str, Result]:
        with monkeypatch.context() as patch:
            allocate_with(failure, patch)
            engine = Engine(divided(five_layers, 2, 1), 400)
            found = engine.run(OTHERS)
        assert engine.scheduler.make_stats().num_free_blocks == 400
        return found

    whole = OneFailure(1, 0)
    check(run(whole), expected)
    assert whole.count > 500, "it is within reach of what attempts do"
    chosen = random.Random(5).sample(range(1, whole.count + 1), amount(4, thorough=300))
    num_ended = 0
    for place in chosen:
        found = run(OneFailure(place % 2, place))
        ended = {name for name, result in found.items() if result.error is not None}
        assert ended <= asking, place
        assert all("does not have enough memory for" in (found[name].error or "") for name in ended)
        kept = [name for name in found if name not in ended]
        check({name: found[name] for name in kept}, {name: expected[name] for name in kept})
        num_ended += len(ended)
    assert num_ended < len(chosen) * len(asking)


def test_a_fault_is_written_once_and_beside_those_that_are_there() -> None:
    allocations = Allocations()
    kept: list[object] = []

    def work(items: list[int]) -> list[int]:
        np.empty(1 << 50 + max(items) if max(items) else 0)
        return items

    assert allocations.each(work, [0, 9], kept.append) == [9]
    assert kept == [[0]]
    allocations.starve("b")
    output = ModelRunnerOutput(["a", "b"], [[1], [2]], faults={"a": Fault.NOT_FINITE})
    allocations.put_faults(output)
    assert output.faults == {"a": Fault.NOT_FINITE, "b": Fault.OUT_OF_MEMORY}
    later = ModelRunnerOutput(["b"], [[3]])
    allocations.put_faults(later)
    assert later.faults is None
