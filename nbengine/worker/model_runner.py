"""The model runner: a plan goes in, the sampled tokens come out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.kernels.cpu.huge_pages import can_take_pages
from nbengine.kernels.dispatch import RecurrentKernels, select_kernels, select_recurrent_kernels
from nbengine.kv_cache.specs import make_groups
from nbengine.models.causal_model import CausalModel, Classifier
from nbengine.models.step_output import StepOutput
from nbengine.sampling.logits_processor import create_logits_processors
from nbengine.scheduler.output import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from nbengine.units import size
from nbengine.worker.batch.allocation import Allocations
from nbengine.worker.batch.async_output import StartTransfer, TokensInFlight, fill_output
from nbengine.worker.batch.decode_inputs import DecodeInputs
from nbengine.worker.batch.group_inputs import dummy_metadata
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.pooler import PooledStep, Pooler
from nbengine.worker.batch.prompt_logprobs import PromptLogprobs
from nbengine.worker.batch.row_by_row import StepLogits
from nbengine.worker.batch.static_inputs import StaticInputs
from nbengine.worker.batch.step_inputs import StepInputBuilder, StepInputs
from nbengine.worker.batch.step_sampling import StepSampling
from nbengine.worker.batch.steps_at_once import MOST_STEPS, EarlierSteps, StepsAtOnce
from nbengine.worker.decode_graphs import DecodeGraphs, GraphRecorder
from nbengine.worker.memory.cache_rows import CacheRows
from nbengine.worker.memory.kv_pages import KVPages
from nbengine.worker.memory.layer_caches import RecurrentModel, layer_caches, tensors_among
from nbengine.worker.memory.rehearsal import Rehearsal
from nbengine.worker.pipeline_stage import PipelineStage

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """The state that `execute_model` leaves for `sample_tokens`."""

    inputs: StepInputs
    logits: StepLogits | None
    """The logits of the requests that get a token; None when there are none."""
    prompts_done: list[str]
    """The requests whose prompt log probabilities are complete with this step."""
    pooled: PooledStep | None
    earlier: EarlierSteps | None
    """The steps before the last one; None where there was one alone."""


class ModelRunner:
    """A runner that owns the batch, the KV cache and the sampler, and runs the model on them.

    On a GPU a step waits for nothing but the copy of the sampled token ids, and with async scheduling not
    even for that: the step after it may come before that copy. Only if the device is two steps behind, the
    runner waits until it has read what it was given (`nbengine.worker.batch.staging.StagingBuffer`).

    Every rank executes every plan. Those of the last pipeline stage all sample the same tokens from the same
    logits; those of other stages make none, and take the tokens from later plans.
    """

    # initialize_kv_cache makes these: it knows their sizes.
    _num_blocks: int
    _num_slots: int
    _kv_caches: list[Any]
    """The cache of each layer; layers of different groups share tensors."""
    _batch: InputBatch
    _builder: StepInputBuilder
    _decodes: DecodeInputs | StaticInputs | None = None
    _at_once: StepsAtOnce | None = None
    _sampling: StepSampling
    _pooler: Pooler

    def __init__(
        self,
        config: EngineConfig,
        model: CausalModel,
        device: torch.device,
        kv_dtype: torch.dtype,
        start_transfer: StartTransfer | None = None,
        parallel: ParallelState = SINGLE,
        recorder: GraphRecorder | None = None,
    ) -> None:
        """Keep what the runner works with: `kv_dtype` is the type of the KV cache; with `start_transfer`, tokens
        are on their way to the host when `sample_tokens` returns; with `recorder`, decode steps are recorded as graphs
        where the model allows it."""
        self._config = config
        self._model = model
        self._device = device
        self._kv_dtype = kv_dtype
        self._kernels = select_kernels(device, kv_dtype, model.hidden_dtype)
        self._groups = make_groups(model.config.cache_rules())
        self._cache_rows = CacheRows.of(model.config, model.layout, kv_dtype, self._groups)
        self._recurrent_kernels: RecurrentKernels | None = None
        if self._groups.recurrent is not None:
            self._recurrent_kernels = select_recurrent_kernels(device, model.hidden_dtype)
        self._stage = PipelineStage(model, parallel)
        self._processors = create_logits_processors(config, device) if self._stage.is_last else []
        self._allocations = Allocations(parallel.tp)
        self._prompt_logprobs = PromptLogprobs(
            model.compute_logits, model.config.vocab_size, device, self._allocations
        )
        self._state: ExecuteModelState | None = None
        self._start_transfer = start_transfer
        self._in_flight: TokensInFlight | None = None
        self._kv_pages: KVPages | None = None
        self._graphs: DecodeGraphs | None = None
        if recorder is not None and DecodeGraphs.cover(model):
            self._graphs = DecodeGraphs(model, recorder)

    @property
    def kernels(self) -> str:
        """Name the kernels, and the instructions of products with quantised weights."""
        instructions = self._model.product_instructions
        products = f", products with {instructions}" if instructions else ""
        return self._kernels.name + products + ("" if self._graphs is None else ", decode steps as graphs")

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int, num_slots: int = 0) -> None:
        """Allocate `num_blocks` KV blocks, `num_slots` slots for recurrent state, and the batch for requests of up to
        `max_model_len` tokens.

        Raises:
            EngineStartError: the allocation failed.
        """
        scheduler = self._config.scheduler
        block_size = self._config.cache.block_size
        on_cpu = self._device.type == "cpu"
        pad_single = on_cpu and self._model.dtype.itemsize == 2 and self._model.pads_single_rows
        self._num_blocks = num_blocks
        # A padded row has a state as well.
        self._num_slots = num_slots + (1 if num_slots and pad_single else 0)
        self._kv_caches = self._new_kv_caches(num_blocks, self._num_slots)
        model, shard = self._model.config, self._model.shard
        if model.latent is None:
            self._kernels.warm_up(shard.num_heads, shard.num_kv_heads, model.head_dim, block_size)
        self._model.warm_up(self._kernels, self._kv_caches, scheduler.max_num_batched_tokens)
        if self._recurrent_kernels is not None:
            cast("RecurrentModel", self._model).warm_up_recurrent(self._recurrent_kernels)
        self._batch = self._new_batch(max_model_len)
        self._builder = StepInputBuilder(
            self._batch,
            self._kernels,
            max_num_tokens=scheduler.max_num_batched_tokens,
            block_size=block_size,
            device=self._device,
            pad_single=pad_single,
            groups=self._groups,
            num_slots=self._num_slots,
            recurrent_kernels=self._recurrent_kernels,
        )
        if self._graphs is not None:
            self._decodes = StaticInputs(self._batch, self._kernels, block_size, self._device, self._groups)
        elif on_cpu:
            self._decodes = DecodeInputs(
                self._batch,
                self._kernels,
                block_size,
                pad_single=pad_single,
                groups=self._groups,
                num_slots=self._num_slots,
                recurrent_kernels=self._recurrent_kernels,
            )
            if self._model.goes_on and self._start_transfer is None:
                self._at_once = StepsAtOnce(self._batch)
        self._sampling = StepSampling(self._batch, self._processors, self._allocations, self._device)
        if self._start_transfer is not None:
            self._in_flight = TokensInFlight(self._batch, self._device, self._start_transfer)
        head = self._model if isinstance(self._model, Classifier) else None
        self._pooler = Pooler(
            scheduler.max_num_seqs, model.hidden_size, self._device, head, self._allocations
        )
        # Last, because a thread that maps or frees memory waits while the system clears pages.
        self._take_kv_pages()

    @property
    def most_steps(self) -> int:
        """Return how many steps a plan may ask for at once."""
        return 1 if self._at_once is None or self._processors else MOST_STEPS

    def interrupt(self) -> None:
        """Have steps that are computed at once end soon. Safe on any thread."""
        if self._at_once is not None:
            self._at_once.stop()

    def release_kv_cache(self) -> None:
        """Free the KV cache; no step with tokens can be executed until `restore_kv_cache`."""
        if self._kv_pages is not None:
            self._kv_pages.stop()
        self.forget_graphs()
        self._kv_pages, self._kv_caches = None, []

    def forget_graphs(self) -> None:
        """Record decode steps again: what they read is about to lie elsewhere. A model that has been divided among more
        workers is not recorded any more."""
        if self._graphs is None:
            return
        self._graphs.forget()
        if not DecodeGraphs.cover(self._model):
            self._graphs = self._decodes = None

    @property
    def has_kv_cache(self) -> bool:
        """Tell whether the KV cache is allocated."""
        return bool(self._kv_caches)

    def restore_kv_cache(self) -> None:
        """Allocate an empty KV cache of the same size again, unless it is there.

        Raises:
            EngineStartError: the allocation failed.
        """
        if self.has_kv_cache:
            return
        self._kv_caches = self._new_kv_caches(self._num_blocks, self._num_slots)
        self._take_kv_pages()

    def _take_kv_pages(self) -> None:
        if self._device.type == "cpu" and can_take_pages():
            self._kv_pages = KVPages(tensors_among(self._kv_caches))

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
        decode = self._decodes.build(plan) if self._decodes is not None else None
        inputs = decode or self._builder.build(plan)
        further = None
        if self._at_once is not None and decode is not None and plan.num_steps > 1:
            further = self._at_once.allowed(plan, decode)
        if self._in_flight is not None:
            self._in_flight.fill(inputs)
        with self._kv_pages or _NOTHING:
            if decode is not None and self._graphs is not None:
                step: StepOutput | None = self._graphs.run(decode, self._kv_caches)
            else:
                step = self._stage.forward(inputs, self._kv_caches, further)
        if step is None:
            self._state = ExecuteModelState(inputs, None, [], None, None)
            return None
        earlier = None if further is None or self._at_once is None else self._at_once.take(inputs)
        logits = None
        if len(inputs.sampled):
            count = len(inputs.sampled)
            logits = StepLogits(self._model.compute_logits, step, inputs.logits_index, count)
        prompts_done = self._prompt_logprobs.collect(plan, inputs.req_ids, step.hidden)
        pooled = None
        if not self._pooler.is_idle:
            pooled = self._pooler.pool(step.hidden, inputs.req_ids, plan.num_scheduled_tokens)
        self._state = ExecuteModelState(inputs, logits, prompts_done, pooled, earlier)
        return None

    @torch.inference_mode()
    def sample_tokens(
        self, grammar_output: GrammarOutput | None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the step that `execute_model` left waiting, and append its tokens to the batch.

        The output of a stage that does not sample is empty.

        Raises:
            NBEngineError: no step waits.
        """
        state, self._state = self._state, None
        if state is None:
            raise NBEngineError("sample_tokens: no step waits to be sampled")
        if not self._stage.is_last:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        inputs = state.inputs
        output = ModelRunnerOutput(inputs.req_ids, [[] for _ in inputs.req_ids])
        if state.earlier is not None:
            output.sampled_token_ids, output.step_ends = state.earlier.token_ids, state.earlier.ends
        self._prompt_logprobs.take(state.prompts_done, output)
        if state.pooled is not None:
            state.pooled.put_results(output, self._allocations)
        if state.logits is None:
            self._allocations.put_faults(output)
            return output
        sampled, wanted = self._sampling.sample(state.logits, inputs.sampled_rows, grammar_output)
        self._allocations.put_faults(output)
        if self._in_flight is not None:
            return self._in_flight.start(inputs, sampled, wanted, output)
        if self._device.type != "cpu":
            # This is the one thing for which a GPU's step waits: what comes after it has been computed too.
            sampled = replace(sampled, token_ids=sampled.token_ids.cpu(), masses=sampled.masses.cpu())
        self._batch.append(inputs.sampled_rows, sampled.token_ids.numpy())
        fill_output(output, inputs, sampled, wanted)
        return output

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Compute this rank's share of the experts for the tokens that other engine cores have in a step."""
        self._stage.forward_nothing()

    @torch.inference_mode()
    def profile_run(self, max_model_len: int) -> None:
        """Run the largest step there can be on dummy data, for its memory use: forward pass, logits, prompt
        log probabilities, pooling and sampling, with everything for which requests of up to `max_model_len`
        tokens may ask.

        The KV cache takes part with one block, so that next to nothing of it is counted.
        """
        scheduler = self._config.scheduler
        num_tokens = scheduler.max_num_batched_tokens
        num_reqs = min(scheduler.max_num_seqs, num_tokens)
        counts = np.full(num_reqs, num_tokens // num_reqs, np.int32)
        counts[-1] += num_tokens % num_reqs
        attention = dummy_metadata(
            counts,
            self._groups,
            block_size=self._config.cache.block_size,
            kernels=self._kernels,
            recurrent_kernels=self._recurrent_kernels,
            device=self._device,
        )
        rehearsal = None
        if self._stage.is_last and self._model.has_logits:
            rehearsal = Rehearsal(self._model.config.vocab_size, num_reqs, max_model_len, self._device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        caches = self._new_kv_caches(1, 1 if self._groups.recurrent is not None else 0)
        hidden = self._stage.forward_alone(positions, caches, attention)
        if hidden is None:
            return
        logits = None if rehearsal is None else self._model.compute_logits(hidden[:num_reqs])
        Pooler(num_reqs, hidden.shape[1], self._device, None).rehearse(hidden)
        if rehearsal is not None and logits is not None:
            self._prompt_logprobs.rehearse(hidden)
            rehearsal.sample(logits)

    def graph_bytes(self, max_model_len: int, step_bytes: int) -> int:
        """Return the bytes that recorded steps take beside the largest step, which takes `step_bytes`."""
        if self._graphs is None:
            return 0
        return self._graphs.most_bytes(self._config.scheduler, max_model_len, step_bytes)

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
                allocations=self._allocations,
                num_tables=self._groups.num_tables,
                spreads=self._cache_rows.spreads,
            )
        except MemoryError as error:
            raise EngineStartError(
                f"could not make room for max_num_seqs={max_num_seqs} requests of max_model_len={max_model_len} tokens; "
                f"lower one of them: {error}"
            ) from error

    def _new_kv_caches(self, num_blocks: int, num_slots: int) -> list[Any]:
        shard = self._model.shard
        block_size, config = self._config.cache.block_size, self._model.config
        rows = self._cache_rows
        try:
            return layer_caches(
                self._model,
                self._groups,
                rows,
                self._kv_dtype,
                num_blocks=num_blocks,
                block_size=block_size,
                num_slots=num_slots,
            )
        except (MemoryError, OSError, RuntimeError) as error:
            numbers = config.cache_parts * num_blocks * block_size * rows.widest
            num_bytes = self._groups.num_tensors(shard.layers) * numbers * self._kv_dtype.itemsize
            slots = f", {num_slots} slots for recurrent state" if num_slots else ""
            raise EngineStartError(
                f"could not allocate a KV cache of {size(num_bytes)} ({num_blocks} blocks{slots}) on {self._device}; "
                f"lower kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization: {error}"
            ) from error
