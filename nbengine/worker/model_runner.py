"""The model runner: a plan in, the sampled tokens out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.kernels.dispatch import select_kernels
from nbengine.kernels.huge_pages import zeros_in_huge_pages
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.decoder_classifier import DecoderForSequenceClassification
from nbengine.sampling.logits import TokenMask
from nbengine.sampling.logits_processor import create_logits_processors
from nbengine.sampling.logprobs import LogprobRows
from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.rows import ALL_ROWS, rows_of, upload
from nbengine.sampling.sampler import Sampler, SamplerOutput
from nbengine.sampling_params import MAX_LOGPROBS
from nbengine.scheduler.output import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from nbengine.units import size
from nbengine.worker.async_output import StartTransfer, TokensInFlight, fill_output
from nbengine.worker.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.worker.input_batch import InputBatch
from nbengine.worker.pipeline_stage import PipelineStage
from nbengine.worker.pooler import PooledStep, Pooler
from nbengine.worker.prompt_logprobs import PromptLogprobs
from nbengine.worker.step_inputs import StagingBuffer, StepInputBuilder, StepInputs


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """What `execute_model` leaves for `sample_tokens`."""

    inputs: StepInputs
    logits: Tensor | None
    """[requests that get a token, vocabulary]; None when there are none."""
    prompts_done: list[str]
    """Requests whose prompt log probabilities are complete with this step."""
    pooled: PooledStep | None


class ModelRunner:
    """Owns the batch, the KV cache and the sampler, and runs the model on them.

    On a GPU nothing is waited for in a step but the copy of the sampled token ids, and with async scheduling
    not even that: the step after it may come before that copy.

    Every rank executes every plan. Those of the last pipeline stage all sample the same tokens of the same logits;
    those of other stages make none, and take the tokens from later plans.
    """

    # Made by initialize_kv_cache, which knows their sizes.
    _num_blocks: int
    _kv_caches: list[Tensor]
    _batch: InputBatch
    _builder: StepInputBuilder
    _uniform: StagingBuffer
    _pooler: Pooler

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderForCausalLM,
        device: torch.device,
        dtype: torch.dtype,
        start_transfer: StartTransfer | None = None,
        parallel: ParallelState = SINGLE,
    ) -> None:
        """With `start_transfer`, tokens are on their way to the host when `sample_tokens` returns."""
        self._config = config
        self._model = model
        self._device = device
        self._dtype = dtype
        self._kernels = select_kernels(device, dtype)
        self._stage = PipelineStage(model, parallel)
        self._processors = create_logits_processors(config, device) if self._stage.is_last else []
        self._sampler = Sampler(self._processors)
        self._prompt_logprobs = PromptLogprobs(model.compute_logits, model.config.vocab_size, device)
        self._state: ExecuteModelState | None = None
        self._start_transfer = start_transfer
        self._in_flight: TokensInFlight | None = None

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate `num_blocks` KV blocks, and the batch for requests of up to `max_model_len` tokens.

        Raises:
            EngineStartError: the allocation failed.
        """
        scheduler = self._config.scheduler
        block_size = self._config.cache.block_size
        self._num_blocks = num_blocks
        self._kv_caches = self._new_kv_caches(num_blocks)
        model, shard = self._model.config, self._model.shard
        self._kernels.warm_up(shard.num_heads, shard.num_kv_heads, model.head_dim, block_size)
        self._model.warm_up()
        self._batch = self._new_batch(max_model_len)
        self._builder = StepInputBuilder(
            self._batch,
            self._kernels,
            max_num_tokens=scheduler.max_num_batched_tokens,
            block_size=block_size,
            device=self._device,
            pad_single=self._device.type == "cpu" and self._dtype.itemsize == 2,
        )
        self._uniform = StagingBuffer(scheduler.max_num_seqs, torch.float64, self._device)
        if self._start_transfer is not None:
            self._in_flight = TokensInFlight(self._batch, self._device, self._start_transfer)
        head = self._model if isinstance(self._model, DecoderForSequenceClassification) else None
        self._pooler = Pooler(scheduler.max_num_seqs, model.hidden_size, self._device, head)

    def release_kv_cache(self) -> None:
        """Free the KV cache; no step with tokens can be executed until `restore_kv_cache`."""
        self._kv_caches = []

    def restore_kv_cache(self) -> None:
        """Allocate an empty KV cache of the same size again.

        Raises:
            EngineStartError: the allocation failed.
        """
        self._kv_caches = self._new_kv_caches(self._num_blocks)

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Bring the batch up to date and run the forward pass.

        Returns:
            None: call `sample_tokens` for the outcome. A plan without tokens gives an empty output at once.

        Raises:
            NBEngineError: the step before has not been sampled.
        """
        if self._state is not None:
            raise NBEngineError("execute_model: the step before has not been sampled")
        if self._in_flight is not None:
            self._in_flight.prepare(plan.finished_req_ids, plan.preempted_req_ids)
        self._batch.update(plan)
        if self._stage.is_last:
            self._pooler.update(plan)
            self._prompt_logprobs.update(plan)
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        inputs = self._builder.build(plan)
        if self._in_flight is not None:
            self._in_flight.fill(inputs)
        hidden = self._stage.forward(inputs, self._kv_caches)
        if hidden is None:
            self._state = ExecuteModelState(inputs, None, [], None)
            return None
        logits = None
        if len(inputs.sampled):
            rows = hidden if inputs.logits_index is None else hidden[inputs.logits_index]
            logits = self._model.compute_logits(rows)[: len(inputs.sampled)]
        prompts_done = self._prompt_logprobs.collect(plan, inputs.req_ids, hidden)
        pooled = None
        if not self._pooler.is_idle:
            pooled = self._pooler.pool(hidden, inputs.req_ids, plan.num_scheduled_tokens)
        self._state = ExecuteModelState(inputs, logits, prompts_done, pooled)
        return None

    @torch.inference_mode()
    def sample_tokens(
        self, grammar_output: GrammarOutput | None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the step that `execute_model` left waiting, and append its tokens to the batch.

        The output of a stage that does not sample is empty.

        Raises:
            NBEngineError: there is none.
        """
        state, self._state = self._state, None
        if state is None:
            raise NBEngineError("sample_tokens: no step waits to be sampled")
        if not self._stage.is_last:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        inputs = state.inputs
        output = ModelRunnerOutput(inputs.req_ids, [[] for _ in inputs.req_ids])
        output.prompt_logprobs = self._prompt_logprobs.take(state.prompts_done)
        if state.pooled is not None:
            output.pooler_output = state.pooled.results()
        if state.logits is None:
            return output
        sampled, wanted = self._sample(state.logits, inputs.sampled_rows, grammar_output)
        if self._in_flight is not None:
            return self._in_flight.start(inputs, sampled, wanted, output)
        # The one thing that is waited for on a GPU.
        sampled = replace(sampled, token_ids=sampled.token_ids.cpu())
        self._batch.append(inputs.sampled_rows, sampled.token_ids.numpy())
        fill_output(output, inputs, sampled, wanted)
        return output

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Compute this rank's share of the experts for the tokens that other engine cores have in a step."""
        self._stage.forward_nothing()

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Run the largest step there can be on dummy data, for its memory use: forward pass, logits, sampling.

        The KV cache takes part with one block, so that next to nothing of it is counted.
        """
        scheduler = self._config.scheduler
        num_tokens = scheduler.max_num_batched_tokens
        num_reqs = min(scheduler.max_num_seqs, num_tokens)
        counts = np.full(num_reqs, num_tokens // num_reqs, np.int32)
        counts[-1] += num_tokens % num_reqs
        attention = self._dummy_attention(counts)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        hidden = self._stage.forward_alone(positions, self._new_kv_caches(1), attention)
        if hidden is None or self._model.lm_head is None:
            return
        logits = self._model.compute_logits(hidden[:num_reqs])
        metadata = SamplingMetadata.build(
            temperature=np.ones(num_reqs, np.float32),
            top_k=np.zeros(num_reqs, np.int64),
            top_p=np.full(num_reqs, 0.9),
            min_p=np.zeros(num_reqs, np.float32),
            vocab_size=self._model.config.vocab_size,
            device=self._device,
        )
        logprobs = LogprobRows(ALL_ROWS, list(range(num_reqs)), [MAX_LOGPROBS] * num_reqs)
        uniform = torch.zeros(num_reqs, dtype=torch.float64, device=self._device)
        Sampler()(logits, replace(metadata, logprobs=logprobs), uniform).token_ids.cpu()

    def _dummy_attention(self, counts: NDArray[np.int32]) -> AttentionMetadata:
        """Metadata of requests without context that all read block 0 and write nothing."""
        block_size = self._config.cache.block_size
        block_table = np.zeros((len(counts), -(-int(counts.max()) // block_size)), np.int32)
        metadata = build_attention_metadata(
            counts, counts, block_table, block_size=block_size, kernels=self._kernels, device=self._device
        )
        metadata.slot_mapping.fill_(-1)
        return metadata

    def _new_batch(self, max_model_len: int) -> InputBatch:
        max_num_seqs = self._config.scheduler.max_num_seqs
        try:
            return InputBatch(
                max_num_seqs,
                max_model_len,
                self._config.cache.block_size,
                self._model.config.vocab_size,
                device=self._device,
                processors=self._processors,
                seed=self._config.model.seed,
                sampled=self._stage.is_last,
            )
        except MemoryError as error:
            raise EngineStartError(
                f"could not make room for max_num_seqs={max_num_seqs} requests of max_model_len={max_model_len} tokens; "
                f"lower one of them: {error}"
            ) from error

    def _new_kv_caches(self, num_blocks: int) -> list[Tensor]:
        shard = self._model.shard
        block_size, head_dim = self._config.cache.block_size, self._model.config.head_dim
        shape = (2, num_blocks, shard.num_kv_heads, block_size, head_dim)
        try:
            if self._device.type == "cpu":
                return [zeros_in_huge_pages(shape, self._dtype) for _ in shard.layers]
            return [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in shard.layers]
        except (MemoryError, OSError, RuntimeError) as error:
            num_bytes = shard.num_layers * math.prod(shape) * self._dtype.itemsize
            raise EngineStartError(
                f"could not allocate a KV cache of {size(num_bytes)} ({num_blocks} blocks) on {self._device}; "
                f"lower kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization: {error}"
            ) from error

    def _sample(
        self, logits: Tensor, rows: NDArray[np.int64], grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, LogprobRows | None]:
        batch = self._batch.sampling
        metadata = batch.metadata(rows)
        uniform = None
        if metadata.random:
            self._uniform.array[: len(rows)] = batch.uniforms(rows)
            uniform = self._uniform.tensor(len(rows))
        constraints = batch.constraints(rows, self._grammar_mask(grammar_output, rows))
        output = self._sampler(logits, metadata, uniform, constraints)
        batch.append_on_device(output.token_ids)
        return output, metadata.logprobs

    def _grammar_mask(
        self, grammar_output: GrammarOutput | None, rows: NDArray[np.int64]
    ) -> TokenMask | None:
        if grammar_output is None or not grammar_output.req_ids:
            return None
        row_of = self._batch.row_of
        wanted = np.fromiter(
            map(row_of.__getitem__, grammar_output.req_ids), np.int64, len(grammar_output.req_ids)
        )
        order = rows.argsort()
        positions = order[rows[order].searchsorted(wanted)]
        bitmask = upload(grammar_output.bitmask, self._device)
        return TokenMask(rows_of(positions, len(rows), self._device), bitmask)
