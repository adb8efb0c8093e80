"""An engine that computes several steps at once gives the tokens of one that computes one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_tokens, save_tokenizer

from nbengine import LLM, RequestOutputKind, SamplingParams
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.engine.core.core import EngineCore
from nbengine.engine.core.step_pace import StepPace
from nbengine.errors import RequestError
from nbengine.models.further_steps import FurtherSteps
from nbengine.models.step_output import StepOutput
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.worker.batch.sampling_batch import MOST_ENDS
from nbengine.worker.batch.steps_at_once import MOST_STEPS
from tests.unit.models.test_prepared_groups import MODELS as GROUPED

PROMPTS = [random_tokens(length, 1) for length in (37, 5, 34, 16, 39)]
BLOCKS = 200
Make = Callable[..., LLM]
DENSE = "16 bits"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 32}),
    DENSE: ("Qwen3", {"head_dim": 32}),
    **{
        name: GROUPED[name]
        for name in (
            *("gemma2", "gemma3", "gemma4", "olmo2", "glm4", "qwen3.5", "lfm2", "granite 4"),
            *("qwen2 moe", "gpt-oss"),
        )
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path, random_model: Any) -> Iterator[Make]:
    """Make an engine whose steps take no time, as far as it knows."""
    engines: list[LLM] = []

    def make(name: str = "llama", *, at_once: bool = True, num_blocks: int = BLOCKS) -> LLM:
        directory = tmp_path / name
        rounding: dict[str, Any] = {"quantization": "int8"} if name != DENSE else {"dtype": "bfloat16"}
        if not directory.exists():
            kind, settings = MODELS[name]
            random_model(kind, **settings).save_pretrained(directory)
            save_tokenizer(directory)
        llm = LLM(
            str(directory),
            **rounding,
            block_size=8,
            max_model_len=128,
            num_gpu_blocks_override=num_blocks,
            multiprocess=False,
        )
        engines.append(llm)
        core = core_of(llm)
        assert core.model_executor.most_steps == MOST_STEPS
        core._pace = EverySize() if at_once else StepPace(1)
        return llm

    yield make
    for llm in engines:
        llm.shutdown()


class EverySize(StepPace):
    """A pace that allows most steps at any speed of the machine."""

    def __init__(self) -> None:
        super().__init__(MOST_STEPS)
        self.took(1e-6, 1)

    def took(self, seconds: float, steps: int) -> None:
        super().took(1e-6, 1)


def core_of(llm: LLM) -> EngineCore:
    core: EngineCore = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    return core


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of a request that each plan has brought."""
    found: list[int] = []
    whole = EngineCore.step

    def step(core: EngineCore) -> Any:
        before = core.scheduler.step_counter
        outcome = whole(core)
        found.append(core.scheduler.step_counter - before)
        return outcome

    monkeypatch.setattr(EngineCore, "step", step)
    return found


def tokens_of(llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    core_of(llm).scheduler.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy(**params: Any) -> SamplingParams:
    usual = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **{**usual, **params})


@pytest.mark.parametrize(("name", "num_blocks"), [*((name, BLOCKS) for name in MODELS), ("llama", 18)])
def test_answers_are_those_of_one_step_at_a_time(
    name: str, make: Make, sizes: list[int], num_blocks: int
) -> None:
    one = make(name, at_once=False, num_blocks=num_blocks)
    expected = tokens_of(one, greedy())
    assert set(sizes) == {1}
    several = make(name, num_blocks=num_blocks)
    assert tokens_of(several, greedy()) == expected
    # States are not left behind in the middle of steps at once.
    assert max(sizes) == MOST_STEPS if name not in ("qwen3.5", "lfm2", "granite 4") else max(sizes) > 1
    preemptions = core_of(several).scheduler.num_preemptions
    assert bool(preemptions) == (num_blocks < BLOCKS)
    # What is found of prompts and answers is the same, too.
    grown = [[*prompt, *answer, 3] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    assert tokens_of(several, greedy(max_tokens=9), grown) == tokens_of(one, greedy(max_tokens=9), grown)
    if num_blocks == BLOCKS:
        hits = [core_of(llm).scheduler.make_stats().prefix_cache_hits for llm in (one, several)]
        assert hits[0] == hits[1] > 0


def test_a_follower_hears_of_each_step_and_of_its_time(make: Make, sizes: list[int]) -> None:
    llm = make()
    core, mirror = core_of(llm), TraceMirror(0)
    core.trace.record(True)
    for message in core.trace.snapshot(time.time(), core.scheduler.make_stats()):
        mirror.apply(message)
    began = time.time()
    tokens_of(llm, greedy(), PROMPTS[:2])
    batch = core.trace.take_batch(time.time(), core.scheduler.make_stats())
    assert batch is not None
    assert mirror.apply(batch)
    assert MOST_STEPS in sizes
    steps = list(mirror.steps)
    assert [step.step for step in steps] == list(range(sum(sizes)))
    assert sum(step.num_sampled for step in steps) == 80
    moments = [moment for step in steps for moment in (step.time, step.time + (step.seconds or 0.0))]
    times = [began, *moments, time.time()]
    assert times == pytest.approx(sorted(times), rel=0, abs=1e-5)
    # Those that were computed at once have times of their own.
    assert all(step.seconds for step in steps)


def test_an_answer_ends_at_its_end_token_and_costs_no_step_more(make: Make, sizes: list[int]) -> None:
    llm = make()
    whole = tokens_of(llm, greedy(), PROMPTS[:1])[0]
    for place in (3, 9, 20, 33):
        end = whole[place]
        first = whole.index(end)
        sizes.clear()
        assert tokens_of(llm, greedy(stop_token_ids=[end]), PROMPTS[:1]) == [whole[: first + 1]]
        assert sum(sizes) == first + 1
    # The others go on.
    together = tokens_of(llm, greedy(stop_token_ids=[whole[9]]))
    assert together[0] == whole[: whole.index(whole[9]) + 1]
    alone = [tokens_of(llm, greedy(stop_token_ids=[whole[9]]), [prompt])[0] for prompt in PROMPTS]
    assert together == alone


def test_a_request_keeps_its_ends_when_another_makes_place(make: Make, sizes: list[int]) -> None:
    llm = make()
    whole = tokens_of(llm, greedy(), PROMPTS[1:2])[0]
    end = max(whole, key=whole.index)
    first = whole.index(end)
    assert first > 2
    sizes.clear()
    for place, params in enumerate((greedy(max_tokens=2), greedy(stop_token_ids=[end]))):
        llm.llm_engine.add_request(f"r{place}", {"prompt_token_ids": PROMPTS[place]}, params)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    # The prompts are computed in one step, which gives the first tokens.
    assert sum(sizes) == first + 1


PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.1},
]
MORE: list[dict[str, Any]] = [
    {"stop_token_ids": list(range(MOST_ENDS + 1))},
    {"logprobs": 1},
    {"min_tokens": 30, "ignore_eos": False, "stop_token_ids": [7, 8, 9, 10, 11]},
    {"repetition_penalty": 1.3, "temperature": 0.5},
    {"frequency_penalty": 1.5},
    {"logit_bias": {5: 1.0}},
]


@pytest.mark.parametrize("params", PLAIN, ids=lambda params: " ".join(params))
def test_tokens_may_be_drawn(make: Make, sizes: list[int], params: dict[str, Any]) -> None:
    asked = greedy(**params)
    answers = tokens_of(make(), asked)
    assert max(sizes) == MOST_STEPS
    assert answers == tokens_of(make(at_once=False), asked)
    assert answers != tokens_of(make(), greedy())


def test_requests_that_differ_in_what_they_draw_share_their_steps(make: Make, sizes: list[int]) -> None:
    found = []
    for at_once in (True, False):
        llm, ends = make(at_once=at_once), {}
        for place, prompt in enumerate(PROMPTS):
            params = greedy(**[{}, *PLAIN][place])
            llm.llm_engine.add_request(f"r{place}", {"prompt_token_ids": prompt}, params)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.finished:
                    ends[output.request_id] = list(output.outputs[0].token_ids)
        found.append(ends)
    assert found[0] == found[1]
    assert len(found[0]) == len(PROMPTS)
    assert max(sizes) == MOST_STEPS


@pytest.mark.parametrize("params", MORE, ids=lambda params: " ".join(params))
def test_who_asks_for_more_gets_one_step_at_a_time(
    make: Make, sizes: list[int], params: dict[str, Any]
) -> None:
    asked = greedy(**params)
    answers = tokens_of(make(), asked)
    assert set(sizes) == {1}
    assert answers == tokens_of(make(at_once=False), asked)
    assert len(set(map(tuple, answers))) == len(answers)


def test_the_steps_end_when_there_is_something_else_to_do(make: Make, sizes: list[int]) -> None:
    llm = make()
    expected = tokens_of(llm, greedy(), PROMPTS[:1])
    assert sizes[1:3] == [MOST_STEPS] * 2
    sizes.clear()
    core = core_of(llm)
    whole = core.scheduler.schedule

    def schedule(*allowed: Any) -> SchedulerOutput:
        core.model_executor.interrupt()
        return whole(*allowed)

    core.scheduler.schedule = schedule  # type: ignore[method-assign]
    assert tokens_of(llm, greedy(), PROMPTS[:1]) == expected
    assert set(sizes) == {1}
    core.scheduler.schedule = whole  # type: ignore[method-assign]
    sizes.clear()
    assert tokens_of(llm, greedy(), PROMPTS[:1]) == expected
    assert max(sizes) == MOST_STEPS


def test_what_is_not_finite_in_a_later_step_fails_its_request_alone(make: Make) -> None:
    llm = make()
    expected = tokens_of(llm, greedy())
    runner = core_of(llm).model_executor._worker.model_runner  # type: ignore[attr-defined]
    whole = runner._stage.forward
    answers: list[ModelRunnerOutput] = []

    def forward(inputs: Any, kv_caches: Any, further: FurtherSteps | None = None) -> StepOutput:
        output = whole(inputs, kv_caches, further)
        if further is None or answers:
            return output
        assert further.taken == MOST_STEPS - 1
        logits = output.logits.clone()
        logits[2, 7] = torch.nan
        return StepOutput(output.hidden, logits)

    def sample_tokens(*arguments: Any) -> ModelRunnerOutput:
        output = type(runner).sample_tokens(runner, *arguments)
        if output.faults:
            answers.append(output)
        return output

    runner._stage.forward, runner.sample_tokens = forward, sample_tokens
    with pytest.raises(RequestError, match="NaN or infinity for token 9 "):
        tokens_of(llm, greedy())
    (answer,) = answers
    assert answer.sampled_token_ids[2] == expected[2][1:MOST_STEPS]
    assert answer.sampled_token_ids[0] == expected[0][1 : MOST_STEPS + 1]
    runner._stage.forward = whole
    assert tokens_of(llm, greedy()) == expected
