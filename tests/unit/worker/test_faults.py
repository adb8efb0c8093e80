"""Requests for which a model computes NaN, or that may get no token, end with an error of their own; all others get
what they get without them, however the work is divided and however many steps are in flight."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nbengine.config import EngineConfig
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.models.loading import load_model
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.output import CachedRequestData, Fault, NewRequestData, SchedulerOutput
from nbengine.worker.model_runner import ModelRunner
from tests.unit.worker import test_stages as stages
from tests.unit.worker.conftest import MAX_MODEL_LEN, NUM_BLOCKS
from tests.unit.worker.planted import PLANTER
from tests.unit.worker.test_stages import Arrival, Engine, Result, check, divided, five_layers, prompt_of

__all__ = ["five_layers"]

OTHERS = [Arrival(kind, kind, 2 * place) for place, kind in enumerate(stages.KINDS) if kind != "aborted"]
MODEL = "the model computed NaN or infinity"


def planted(number: int, kind: str, **params: object) -> tuple[list[int], SamplingParams]:
    asked = SamplingParams(max_tokens=14, ignore_eos=True, seed=0, extra_args={"plant": [number, kind]})
    for name, value in params.items():
        setattr(asked, name, value)
    return prompt_of(11 + number, number), asked


DOOMED = {
    "nan in the first token": (planted(0, "nan", temperature=0), f"{MODEL} for token 1 "),
    "nan later": (planted(6, "nan", temperature=0), f"{MODEL} for token 7 "),
    "nan in a draw": (planted(3, "nan", seed=4), f"{MODEL} for token 4 "),
    "infinity": (planted(5, "inf", seed=4, top_p=0.8), f"{MODEL} for token 6 "),
    "infinity, greedy": (planted(2, "inf", temperature=0), f"{MODEL} for token 3 "),
    "nothing": (planted(4, "nothing", temperature=0), "no token is left for token 5 "),
    "nothing, filtered": (planted(2, "nothing", seed=1, top_k=9), "no token is left for token 3 "),
    "nothing in a draw": (
        planted(2, "nothing", seed=1, logit_bias={3: 1.0}),
        "no token is left for token 3 ",
    ),
    # Their keys and values are NaN as well, in blocks that others get later.
    "poisoned": ((None, SamplingParams(temperature=0, seed=0)), f"{MODEL} for token 1 "),
    "poisoned pooling": ((None, None), f"{MODEL} for this prompt"),
}


@pytest.fixture(autouse=True)
def doomed_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (request, _) in DOOMED.items():
        monkeypatch.setitem(stages.KINDS, name, request)
    whole = stages.request_of

    def request_of(arrival: Arrival) -> EngineCoreRequest:
        wire = whole(arrival)
        if "poisoned" in arrival.kind:
            wire.prompt_embeds[7, 5] = torch.nan
        return wire

    monkeypatch.setattr(stages, "request_of", request_of)


@pytest.fixture(scope="module")
def expected(five_layers: EngineConfig) -> dict[str, Result]:
    """Compute the results of one rank, one step at a time, with room for all, and nobody doomed."""
    return Engine(five_layers, 400).run(OTHERS)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_the_others_get_what_they_get_without_them(
    five_layers: EngineConfig, expected: dict[str, Result], tp_size: int, pp_size: int
) -> None:
    rng = random.Random(tp_size + pp_size)
    doomed = [Arrival(f"{kind} {n}", kind, rng.randrange(25)) for kind in DOOMED for n in range(2)]
    config = divided(five_layers, tp_size, pp_size, max_num_batched_tokens=24, max_num_seqs=6)
    config = replace(config, model=replace(config.model, logits_processors=(PLANTER,)))
    engine = Engine(config, 26, seed=tp_size * pp_size)
    found = engine.run([*OTHERS, *doomed])
    check({name: result for name, result in found.items() if name in expected}, expected)
    for arrival in doomed:
        result, (request, message) = found[arrival.name], DOOMED[arrival.kind]
        assert message in (result.error or ""), arrival.name
        assert result.pooled is None
        plant = request[1].extra_args if request[1] is not None else None
        assert len(result.tokens) == (plant["plant"][0] if plant else 0)
    assert all(found[name].error is None for name in expected)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.make_stats().num_free_blocks == 26


def test_what_a_failed_request_has_computed_is_not_found_by_the_next(five_layers: EngineConfig) -> None:
    config = replace(five_layers, model=replace(five_layers.model, logits_processors=(PLANTER,)))
    engine = Engine(config, 60)
    found = engine.run([Arrival("doomed", "nan later")])
    assert found["doomed"].error is not None
    assert engine.scheduler.make_stats().num_cached_blocks == 0
    engine.scheduler.check_integrity()


class Spoiled:
    """A model whose logits have NaN at one row of its next call."""

    def __init__(self, model: object, row: int) -> None:
        self._model = model
        self._row = row

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)
        row, self._row = self._row, -1
        if row >= 0:
            logits[row, 9] = np.nan
        return logits


def test_nan_in_a_prompts_log_probabilities_is_a_fault_of_that_request_alone(
    tiny_config: EngineConfig,
) -> None:
    cpu = torch.device("cpu")
    model = load_model(tiny_config.model, cpu, torch.float32)
    # The prompts' logits are computed after those that are sampled from: rows 0 to 4 are the first prompt's.
    runner = ModelRunner(tiny_config, model, cpu, torch.float32)
    runner._prompt_logprobs._compute_logits = Spoiled(model, 6).compute_logits
    runner.initialize_kv_cache(NUM_BLOCKS, MAX_MODEL_LEN)
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    news = [
        NewRequestData(name, prompt_of(6, 1), params, [2 * i, 2 * i + 1], 0) for i, name in enumerate("abc")
    ]
    plan = SchedulerOutput(news, CachedRequestData(), dict.fromkeys("abc", 6), 18, set())
    assert runner.execute_model(plan) is None
    output = runner.sample_tokens()
    assert output.faults == {"b": Fault.NOT_FINITE}
    assert output.prompt_logprobs.keys() == {"a", "c"}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 0, 1]


@pytest.mark.parametrize("task", ["embed", "encode"])
def test_nan_in_one_pooled_prompt_is_a_fault_of_that_request_alone(
    task: str, tiny_config: EngineConfig
) -> None:
    cpu = torch.device("cpu")
    runner = ModelRunner(tiny_config, load_model(tiny_config.model, cpu, torch.float32), cpu, torch.float32)
    runner.initialize_kv_cache(NUM_BLOCKS, MAX_MODEL_LEN)
    params = PoolingParams(task=task, pooling="mean" if task == "embed" else None, normalize=True)
    embeds = torch.zeros(6, 64)
    embeds[2, 1] = torch.inf
    news = [
        NewRequestData(name, [5] * 6, None, [2 * i, 2 * i + 1], 0, params) for i, name in enumerate("abc")
    ]
    news[1].prompt_embeds = embeds
    plan = SchedulerOutput(news, CachedRequestData(), dict.fromkeys("abc", 6), 18, set())
    assert runner.execute_model(plan) is None
    output = runner.sample_tokens()
    assert output.faults == {"b": Fault.NOT_FINITE}
    assert output.pooler_output.keys() == {"a", "c"}
