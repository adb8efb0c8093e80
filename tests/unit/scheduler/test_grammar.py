"""Requests with a grammar: whose masks a step needs, how grammars advance, and how they end requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import FinishReason
from nbengine.scheduler.grammar import Grammar
from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler
from tests.unit.scheduler.short_histories import ABORTED, add, answer, step

EOS = 9
WORD = 7


class CountingGrammar:
    """Takes words until `limit`, and the end at any time."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.accepted: list[int] = []
        self.error = ""

    def accept_tokens(self, token_ids: list[int]) -> bool:
        self.accepted += token_ids
        if self.accepted.count(WORD) > self.limit:
            self.error = f"more than {self.limit} words"
        return not self.error

    def is_terminated(self) -> bool:
        return EOS in self.accepted

    def is_free(self, num_unknown: int) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        return False


class Masks:
    """A mask row is how many tokens its grammar has accepted."""

    def fill_bitmasks(self, grammars: Sequence[Grammar]) -> NDArray[np.int32]:
        return np.array([[len(g.accepted)] for g in grammars if isinstance(g, CountingGrammar)], np.int32)


def make_scheduler(num_blocks: int = 64, **config: Any) -> Scheduler:
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **config}),
        CacheConfig(block_size=4),
        num_blocks,
        max_model_len=64,
        grammar_masks=Masks(),
    )


def add_structured(scheduler: Scheduler, name: str, length: int, limit: int = 100, **params: Any) -> Request:
    """Add a request as `preprocess_add_request` does, with its grammar before the scheduler sees it."""
    elsewhere = make_scheduler()
    request = add(elsewhere, name, length, **{"eos_token_id": EOS, **params})
    request.grammar = CountingGrammar(limit)
    scheduler.add_request(request)
    return request


def masks(scheduler: Scheduler, plan: SchedulerOutput) -> dict[str, int]:
    output = scheduler.get_grammar_bitmask(plan)
    return {} if output is None else dict(zip(output.req_ids, output.bitmask[:, 0].tolist(), strict=True))


def test_masks_are_built_for_requests_with_a_grammar_that_get_a_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "free", 2)
    plan = scheduler.schedule()
    assert scheduler.get_grammar_bitmask(plan) is None
    answer(scheduler, plan)
    add_structured(scheduler, "short", 3)
    add_structured(scheduler, "long", 9)
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen.append(masks(scheduler, plan))
        answer(scheduler, plan)
    assert seen == [{"short": 0}, {"short": 1, "long": 0}, {"short": 2, "long": 1}, {"short": 3, "long": 2}]


def test_a_request_aborted_while_the_model_runs_needs_no_mask_and_advances_no_grammar() -> None:
    scheduler = make_scheduler()
    gone, stays = (add_structured(scheduler, name, 2) for name in ("gone", "stays"))
    plan = scheduler.schedule()
    scheduler.finish_requests("gone", ABORTED)
    assert masks(scheduler, plan) == {"stays": 0}
    answer(scheduler, plan)
    assert (gone.grammar.accepted, stays.grammar.accepted) == ([], [WORD])  # type: ignore[union-attr]


def test_a_grammar_outlasts_preemption() -> None:
    scheduler = make_scheduler(num_blocks=5)
    older = add_structured(scheduler, "older", 6, max_tokens=10)
    younger = add_structured(scheduler, "younger", 6, max_tokens=10)
    preempted = []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        preempted += plan.preempted_req_ids
        outputs = {"older": older, "younger": younger}
        expected = {
            name: request.num_output_tokens
            for name, request in outputs.items()
            if name in plan.num_scheduled_tokens and request.num_computed_tokens >= request.num_tokens
        }
        assert masks(scheduler, plan) == expected
        answer(scheduler, plan)
    assert "younger" in preempted
    for request in (older, younger):
        assert request.grammar is not None
        assert request.grammar.accepted == request.output_token_ids == [WORD] * 10  # type: ignore[attr-defined]


def test_a_refused_token_ends_its_request_alone_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler()
    add_structured(scheduler, "bad", 2, limit=1)
    add_structured(scheduler, "good", 2, limit=3)
    step(scheduler)
    _, outputs = step(scheduler)
    assert outputs["bad"].finish_reason is FinishReason.ERROR
    assert outputs["bad"].error == "structured_outputs: more than 1 words"
    assert outputs["bad"].new_token_ids == []
    assert outputs["good"].finish_reason is None
    assert "request bad: structured_outputs: more than 1 words" in caplog.text
    assert list(scheduler.requests) == ["good"]
    assert scheduler.schedule().finished_req_ids == {"bad"}
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("params", "token", "reason", "stop_reason"),
    [
        ({}, EOS, FinishReason.STOP, None),
        ({"ignore_eos": True}, EOS, FinishReason.STOP, None),
        ({"stop_token_ids": [8]}, 8, FinishReason.STOP, 8),
        ({"max_tokens": 1}, WORD, FinishReason.LENGTH, None),
        ({"max_tokens": 1, "ignore_eos": True}, EOS, FinishReason.STOP, None),
        ({}, WORD, None, None),
    ],
)
def test_what_ends_a_request_with_a_grammar(
    params: dict[str, Any], token: int, reason: FinishReason | None, stop_reason: int | None
) -> None:
    scheduler = make_scheduler()
    add_structured(scheduler, "r", 2, **params)
    _, outputs = step(scheduler, token)
    assert (outputs["r"].finish_reason, outputs["r"].stop_reason) == (reason, stop_reason)


def test_an_end_that_a_failed_grammar_left_as_the_only_token_is_an_error() -> None:
    scheduler = make_scheduler()
    request = add_structured(scheduler, "r", 2, limit=0)
    assert isinstance(request.grammar, CountingGrammar)
    request.grammar.error = "gave up"
    _, outputs = step(scheduler, EOS)
    assert (outputs["r"].finish_reason, outputs["r"].error) == (
        FinishReason.ERROR,
        "structured_outputs: gave up",
    )


def test_a_grammar_without_anything_to_build_its_masks_is_an_error() -> None:
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(block_size=4), 8, max_model_len=16)
    add_structured(scheduler, "r", 2, max_tokens=4)
    with pytest.raises(NBEngineError, match="nothing to build their masks"):
        scheduler.get_grammar_bitmask(scheduler.schedule())
