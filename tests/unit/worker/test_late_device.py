"""Steps on a device that lags behind by as much as it likes: the same tokens, and what was cached is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nbengine.engine.core.core import EngineCore
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.models.checkpoints.tiny import random_tiny
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.step_output import StepOutput
from nbengine.sampling import logits as logits_module
from nbengine.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams
from nbengine.scheduler.output import GrammarOutput, SchedulerOutput
from nbengine.worker import model_runner as runner_module
from nbengine.worker import worker as worker_module
from nbengine.worker.batch.async_output import CudaTransfer
from nbengine.worker.model_runner import ModelRunner
from tests.unit.worker.late_device import DEVICE, LateDevice, LateTensor

CPU = torch.device("cpu")
MAX_MODEL_LEN, CHUNK = 192, 16


class LateModel:
    """A model whose forward pass and logits are a late device's kernels, one each."""

    def __init__(self, model: DecoderForCausalLM, late: LateDevice) -> None:
        self._model = model
        self._late = late
        self.config, self.shard, self.lm_head = model.config, model.shard, model.lm_head
        self.layout = model.layout
        self.dtype = self.hidden_dtype = model.dtype
        self.product_instructions = None
        self.device = DEVICE
        self.warm_up = model.warm_up

    def embed(self, input_ids: LateTensor) -> LateTensor:
        result = self._late.new((len(input_ids), self.config.hidden_size), self.dtype)
        return self._late.compute(lambda: self._model.embed(input_ids.memory), result)

    def step(
        self,
        input_ids: LateTensor,
        positions: LateTensor,
        kv_caches: list[LateTensor],
        attn: AttentionMetadata,
        inputs_embeds: LateTensor | None = None,
        further: None = None,
    ) -> StepOutput:
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        attention = replace(attn, **{name: getattr(attn, name).memory for name in names})
        caches = [cache.memory for cache in kv_caches]
        embeds = None if inputs_embeds is None else inputs_embeds.memory
        result = self._late.new((len(input_ids), self.config.hidden_size), self.dtype)
        hidden = self._late.compute(
            lambda: self._model.forward(input_ids.memory, positions.memory, caches, attention, embeds), result
        )
        return StepOutput(hidden)

    def compute_logits(self, hidden: LateTensor) -> LateTensor:
        result = self._late.new((len(hidden), self.config.vocab_size), self.dtype)
        return self._late.compute(lambda: self._model.compute_logits(hidden.memory), result)


class LateRunner(ModelRunner):
    """The runner of a GPU, on a late device."""

    late: LateDevice

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int, num_slots: int = 0) -> None:
        with torch.inference_mode(), self.late:
            super().initialize_kv_cache(num_blocks, max_model_len, num_slots)

    def execute_model(self, plan: SchedulerOutput) -> Any:
        with self.late:
            return super().execute_model(plan)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Any:
        with self.late:
            return super().sample_tokens(grammar_output)


class InlineExecutor(UniProcExecutor):
    """Makes each call at once, on the caller's thread: it is the device alone that is late."""

    num_steps = 1

    def _call(self, call: Callable[[], Any], *, non_block: bool = False) -> Any:
        if not non_block:
            return call()
        future: Future[Any] = Future()
        future.set_result(call())
        return future

    @property
    def max_concurrent_batches(self) -> int:
        return self.num_steps


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("models"), seed=0)


MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCore]:
    cores: list[EngineCore] = []
    select = runner_module.select_kernels

    def make(late: LateDevice | None = None, *, ahead: bool = False, num_steps: int = 1) -> EngineCore:
        def runner(config: EngineConfig, model: Any, device: Any, dtype: Any, *_: Any) -> ModelRunner:
            if late is None:
                return ModelRunner(config, model, device, dtype)
            LateRunner.late = late
            transfer = CudaTransfer if ahead else None
            return LateRunner(config, LateModel(model, late), DEVICE, dtype, transfer)

        # Kept by device: one and the same here, but for what stands behind it.
        logits_module._addends.cache_clear()
        monkeypatch.setattr(worker_module, "ModelRunner", runner)
        monkeypatch.setattr(runner_module, "select_kernels", lambda _, *dtypes: select(CPU, *dtypes))
        if late is not None:
            monkeypatch.setattr(torch, "Event", late.event)
        config = EngineConfig(
            model=ModelConfig(
                "random-tiny",
                device="cpu",
                dtype="float32",
                directory=str(directory),
                weights=(str(directory / "model.safetensors"),),
                max_model_len=MAX_MODEL_LEN,
            ),
            cache=CacheConfig(block_size=4, num_gpu_blocks_override=150),
            scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=CHUNK, async_scheduling=ahead),
        )
        monkeypatch.setattr(InlineExecutor, "num_steps", num_steps)
        cores.append(EngineCore(config, InlineExecutor))
        return cores[-1]

    yield make
    logits_module._addends.cache_clear()
    for core in cores:
        core.shutdown()


@dataclass
class Answers:
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    vectors: dict[str, Any] = field(default_factory=dict)
    num_cached: int = 0

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answers)
        return self.tokens == other.tokens and all(
            np.allclose(vector, other.vectors[name], atol=1e-5) for name, vector in self.vectors.items()
        )


def sampling(max_tokens: int = 4, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def history(seed: int) -> list[tuple[int, EngineCoreRequest]]:
    """Requests, each with the number of the step that it comes before: long prompts that begin alike, many of them alone
    for a while, one given as embeddings, and one to embed."""
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    stems = [[random.randrange(4, 250) for _ in range(150)] for _ in range(2)]
    requests: list[tuple[int, EngineCoreRequest]] = []
    step = 0
    for number in range(11):
        prompt = [*random.choice(stems)[: random.randint(1, 150)], random.randrange(4, 250)]
        params = sampling(random.randint(1, 12), **random.choice(options(number)))
        request = EngineCoreRequest(f"r{number}", prompt, params)
        if number == 4:
            request.prompt_token_ids = None
            request.prompt_embeds = torch.randn(len(prompt), 64, generator=generator)
            request.sampling_params = sampling()
        if number == 7:
            request.sampling_params, request.pooling_params = (
                None,
                PoolingParams(task="embed", pooling="mean"),
            )
        requests.append((step, request))
        step += random.choice([0, 1, 3, 14, 14])
    return requests


def options(number: int) -> list[dict[str, Any]]:
    """Everything that has something copied to the device."""
    return [
        {},
        {},
        {"temperature": 0.8, "seed": number, "logprobs": 2},
        {"temperature": 1.1, "seed": number, "top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"prompt_logprobs": 1, "logit_bias": {9: 2.0, 10: -3.0}},
        {"bad_words_token_ids": [[5, 6], [9]], "allowed_token_ids": list(range(3, 200))},
        {"stop_token_ids": list(range(0, 250, 9)), "min_tokens": 1},
        {"structured_outputs": StructuredOutputsParams(regex="[ab]{1,9}"), "eos_token_id": 1},
    ]


def run(core: EngineCore, requests: list[tuple[int, EngineCoreRequest]], abort: str | None = None) -> Answers:
    """Step until everything has ended; the request `abort` is aborted six steps after it came."""
    waiting = requests.copy()
    answers = Answers()
    number, aborts_at = 0, -1
    while waiting or core.has_work():
        while waiting and (waiting[0][0] <= number or not core.has_work()):
            request = copy(waiting.pop(0)[1])
            core.add_request(*core.preprocess_add_request(request))
            if request.request_id == abort:
                aborts_at = number + 6
        if number == aborts_at:
            core.abort_for_client(0, [abort])
        outputs, executed = core.step_fn()
        core.post_step(executed)
        number += 1
        for output in chain.from_iterable(batch.outputs for batch in outputs.values()):
            assert output.error is None
            answers.num_cached += output.num_cached_tokens
            answers.tokens[output.request_id] += output.new_token_ids
            if output.pooling_output is not None:
                answers.vectors[output.request_id] = output.pooling_output
    answers.tokens.pop(abort, None)
    return answers


@pytest.mark.parametrize(
    ("seed", "haste", "modes"),
    [
        (0, 0.0, [(False, 1), (True, 2)]),
        (1, 0.003, [(False, 3), (True, 2)]),
        (2, 0.03, [(False, 1), (True, 3)]),
    ],
)
def test_a_device_that_lags_behind_gives_the_tokens_of_one_that_does_not(
    make_core: MakeCore, seed: int, haste: float, modes: list[tuple[bool, int]]
) -> None:
    requests, abort = history(seed), f"r{seed}"
    expected = run(make_core(), requests, abort)
    assert len(expected.vectors) == 1
    for ahead, num_steps in modes:
        late = LateDevice(seed, haste)
        found = run(make_core(late, ahead=ahead, num_steps=num_steps), requests, abort)
        assert found == expected, (ahead, num_steps)
        assert found.num_cached > 100
        assert late.most_undone > 50
        assert late.num_waits


@pytest.mark.parametrize("ahead", [False, True])
def test_a_lone_long_prompt_leaves_nothing_wrong_in_the_prefix_cache(
    make_core: MakeCore, ahead: bool
) -> None:
    prompt = [4 + 7 * place % 240 for place in range(170)]
    requests = [(step, EngineCoreRequest(name, prompt, sampling())) for step, name in ((0, "a"), (99, "b"))]
    core = make_core(LateDevice(0, haste=0), ahead=ahead, num_steps=1 + ahead)
    found = run(core, requests)
    assert found == run(make_core(), requests)
    assert found.tokens["a"] == found.tokens["b"]
    assert found.num_cached > 100
