"""A tiny model, transformers' view of it, and a scheduler that makes adversarial plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nbengine.ipc.messages import LogprobsLists
from nbengine.models.checkpoints.tiny import random_tiny
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.loading import load_model
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from nbengine.worker.model_runner import ModelRunner
from tests.support.shared_kernels import kernels_are_compiled_once

__all__ = ["kernels_are_compiled_once"]

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_NUM_SEQS, MAX_TOKENS, NUM_BLOCKS, MAX_MODEL_LEN = 8, 64, 60, 96

Logits = Callable[[list[int]], Tensor]
Runner = Callable[..., ModelRunner]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is tiny, and other processes may want the cores."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(previous)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("models"), seed=0)


@pytest.fixture(scope="session")
def tiny_config(tiny_directory: Path) -> EngineConfig:
    weights = (str(tiny_directory / "model.safetensors"),)
    return EngineConfig(
        model=ModelConfig(
            "random-tiny",
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            directory=str(tiny_directory),
            weights=weights,
        ),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS),
    )


@pytest.fixture
def new_runner(tiny_config: EngineConfig) -> Runner:
    """Make a runner of random-tiny, or of another model."""
    tiny = load_model(tiny_config.model, torch.device("cpu"), torch.float32)

    def make(
        model: DecoderForCausalLM = tiny,
        config: EngineConfig = tiny_config,
        kv_dtype: torch.dtype | None = None,
    ) -> ModelRunner:
        runner = ModelRunner(config, model, torch.device("cpu"), kv_dtype or model.dtype)
        runner.initialize_kv_cache(NUM_BLOCKS, MAX_MODEL_LEN)
        return runner

    return make


@pytest.fixture(scope="session")
def oracle(tiny_directory: Path) -> Logits:
    """Logits after every token of a sequence, recomputed from nothing by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        tiny_directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits(token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0]

    return logits


@dataclass
class Tracked:
    """A request as the driver knows it; `num_computed` is None while it waits (new or preempted)."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int | None = None
    was_preempted: bool = False
    embeds: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class Driver:
    """Stands in for the scheduler: makes valid plans at random, checks the form of each answer, and keeps
    what was sampled. `chaos` of 0 runs everything at once in whole prompts, without preemption; `chunk` is the most
    tokens a request gets in a step."""

    def __init__(
        self, runner: ModelRunner, seed: int = 0, chaos: float = 0.0, chunk: int = MAX_TOKENS
    ) -> None:
        self.runner = runner
        self.random = Random(seed)
        self.chaos = chaos
        self.chunk = chunk
        self.logprobs: dict[str, list[LogprobsLists]] = {}
        self.prompt_logprobs: dict[str, LogprobsLists] = {}
        self.requests: dict[str, Tracked] = {}
        self.done: dict[str, Tracked] = {}
        self.free = list(range(NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.finished: set[str] = set()
        self.num_preemptions = 0
        self.max_batch = 0

    def add(self, req_id: str, prompt: list[int], params: SamplingParams, max_tokens: int = 8) -> None:
        self.requests[req_id] = Tracked(prompt, params, max_tokens)

    def add_embeds(self, req_id: str, embeds: Tensor, params: SamplingParams, max_tokens: int = 8) -> None:
        self.requests[req_id] = Tracked([0] * len(embeds), params, max_tokens, embeds=embeds)

    def run(self) -> dict[str, list[int]]:
        """Step until all requests have their tokens; outputs by request id."""
        for _ in range(2000):
            if not self.requests:
                return {req_id: request.output for req_id, request in self.done.items()}
            self.step()
        raise AssertionError("the requests do not end")

    def step(self) -> None:
        plan = self._plan()
        output = self.runner.execute_model(plan)
        if plan.total_num_scheduled_tokens:
            assert output is None
            output = self.runner.sample_tokens()
        assert output is not None
        self._take(plan, output)

    def abort(self, req_id: str) -> None:
        self._end(req_id)

    def _plan(self) -> SchedulerOutput:
        cached = CachedRequestData()
        plan = SchedulerOutput([], cached, {}, 0, self.finished)
        self.finished = set()
        for req_id, request in self.requests.items():
            if request.num_computed is not None and self._happens(0.3):
                self._preempt(req_id, request, plan)
        budget = MAX_TOKENS
        for req_id, request in self._shuffled():
            if req_id in plan.preempted_req_ids or self._happens(0.3):
                continue
            new = request.num_tokens - (request.num_computed or 0)
            if self._happens(0.7):
                new = self.random.randint(1, new)
            new = min(new, budget, self.chunk)
            if new and self._schedule(req_id, request, new, plan):
                budget -= new
        plan.total_num_scheduled_tokens = MAX_TOKENS - budget
        self.max_batch = max(self.max_batch, len(plan.num_scheduled_tokens))
        return plan

    def _schedule(self, req_id: str, request: Tracked, new: int, plan: SchedulerOutput) -> bool:
        cached = plan.scheduled_cached_reqs
        start = request.num_computed or 0
        running = sum(r.num_computed is not None for r in self.requests.values())
        missing = -(-(start + new) // 4) - len(request.blocks)
        if missing > len(self.free) or (request.num_computed is None and running == MAX_NUM_SEQS):
            return False
        blocks = [self.free.pop() for _ in range(missing)]
        request.blocks += blocks
        if request.num_computed is None and not request.was_preempted:
            plan.scheduled_new_reqs.append(
                NewRequestData(
                    req_id,
                    request.prompt,
                    request.params,
                    request.blocks.copy(),
                    0,
                    prompt_embeds=request.embeds,
                )
            )
        else:
            cached.req_ids.append(req_id)
            cached.new_block_ids.append(blocks or None)
            cached.num_computed_tokens.append(start)
            if request.num_computed is None:
                cached.resumed_req_ids.add(req_id)
        request.num_computed = start + new
        plan.num_scheduled_tokens[req_id] = new
        return True

    def _preempt(self, req_id: str, request: Tracked, plan: SchedulerOutput) -> None:
        self._release(request)
        request.num_computed = None
        request.was_preempted = True
        self.num_preemptions += 1
        plan.preempted_req_ids.add(req_id)

    def _take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        assert sorted(output.req_ids) == sorted(plan.num_scheduled_tokens)
        for req_id, new_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = self.requests[req_id]
            assert len(new_ids) == (request.num_computed == request.num_tokens)
            self._take_logprobs(req_id, request, output, bool(new_ids))
            request.output += new_ids
            if len(request.output) == request.max_tokens:
                self._end(req_id)

    def _take_logprobs(
        self, req_id: str, request: Tracked, output: ModelRunnerOutput, got_token: bool
    ) -> None:
        found = (output.logprobs or {}).get(req_id)
        assert (found is not None) == (got_token and request.params.logprobs is not None)
        if found is not None:
            self.logprobs.setdefault(req_id, []).append(found)
        prompt = (output.prompt_logprobs or {}).get(req_id)
        is_first = got_token and not request.output
        assert (prompt is not None) == (is_first and request.params.prompt_logprobs is not None)
        if prompt is not None:
            self.prompt_logprobs[req_id] = prompt

    def _end(self, req_id: str) -> None:
        self.done[req_id] = request = self.requests.pop(req_id)
        self._release(request)
        self.finished.add(req_id)

    def _release(self, request: Tracked) -> None:
        self.free += request.blocks
        self.random.shuffle(self.free)
        request.blocks = []

    def _shuffled(self) -> list[tuple[str, Tracked]]:
        items = list(self.requests.items())
        if self.chaos:
            self.random.shuffle(items)
        return items

    def _happens(self, probability: float) -> bool:
        return self.random.random() < probability * self.chaos


@pytest.fixture
def driver(new_runner: Runner) -> Callable[..., Driver]:
    """Make a driver, with a runner of its own unless one is given."""
    return lambda seed=0, chaos=0.0, runner=None, chunk=MAX_TOKENS: Driver(
        runner or new_runner(), seed, chaos, chunk
    )
