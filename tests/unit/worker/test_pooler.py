"""The pooler gives rows of its accumulator to requests that run, with nothing of a former owner in them."""

from __future__ import annotations

import numpy as np
import torch

from nbengine.sampling_params import PoolingParams
from nbengine.scheduler.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from nbengine.worker.batch.allocation import Allocations
from nbengine.worker.batch.pooler import PooledStep, Pooler

MEAN = PoolingParams(task="embed", pooling="mean", normalize=False)


def plan(
    new: dict[str, int] | None = None, resumed: tuple[str, ...] = (), ended: str = "", preempted: str = ""
) -> SchedulerOutput:
    """A plan that computes these requests from their first token on."""
    return SchedulerOutput(
        [NewRequestData(name, [0] * count, None, [], 0, MEAN) for name, count in (new or {}).items()],
        CachedRequestData(list(resumed), set(resumed), [None] * len(resumed), [0] * len(resumed)),
        {},
        0,
        set(ended),
        set(preempted),
    )


def results_of(step: PooledStep) -> dict[str, np.ndarray]:
    output = ModelRunnerOutput([], [])
    step.put_results(output, Allocations())
    assert output.pooler_output is not None
    return output.pooler_output


def pooled(pooler: Pooler, **states: list[float]) -> dict[str, list[float]]:
    """Make one step in which each request has these hidden states of one dimension."""
    hidden = torch.tensor([value for values in states.values() for value in values])[:, None]
    step = pooler.pool(hidden, list(states), {name: len(values) for name, values in states.items()})
    return {} if step is None else {name: data.tolist() for name, data in results_of(step).items()}


def test_a_preempted_request_gives_its_row_up_and_begins_again() -> None:
    pooler = Pooler(1, 1, torch.device("cpu"), None)
    pooler.update(plan(new={"a": 3}))
    assert pooled(pooler, a=[5.0, 6.0]) == {}
    # A more urgent request takes the only row.
    pooler.update(plan(new={"b": 2}, preempted="a"))
    assert pooled(pooler, b=[1.0, 2.0]) == {"b": [1.5]}
    pooler.update(plan(resumed=("a",), ended="b"))
    assert pooled(pooler, a=[5.0, 6.0]) == {}
    cached = CachedRequestData(["a"], set(), [None], [2])
    pooler.update(SchedulerOutput([], cached, {}, 0, set()))
    assert pooled(pooler, a=[10.0]) == {"a": [7.0]}
    pooler.update(plan(ended="a"))
    assert pooler.is_idle


def test_requests_that_are_not_pooled_and_padding_count_for_nothing() -> None:
    pooler = Pooler(2, 1, torch.device("cpu"), None)
    pooler.update(plan(new={"a": 1, "b": 2}))
    hidden = torch.tensor([9.0, 1.0, 9.0, 3.0, 5.0, 9.0])[:, None]
    step = pooler.pool(hidden, ["x", "a", "y", "b"], {"x": 1, "a": 1, "y": 1, "b": 2})
    assert step is not None
    results = results_of(step)
    assert {name: data.tolist() for name, data in results.items()} == {"a": [1.0], "b": [4.0]}
    assert all(data.dtype == np.float32 for data in results.values())
