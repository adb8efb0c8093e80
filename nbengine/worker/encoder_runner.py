"""The runner of encoders: whole prompts go in, their pooled outcome comes out. There is no KV cache and
nothing to sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nbengine.config import EngineConfig
from nbengine.errors import NBEngineError
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.layers.encoder_attention import PromptGroup, group_prompts
from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from nbengine.worker.batch.allocation import Allocations
from nbengine.worker.batch.pooler import PooledStep, Pooler


class EncoderRunner:
    """A runner that takes the prompts of a step through an encoder, the shortest first, so that prompts of
    similar length are neighbours."""

    _pooler: Pooler
    kernels = "torch"
    """The kernels that compute."""

    def __init__(self, config: EngineConfig, model: EncoderModel, device: torch.device) -> None:
        self._config = config
        self._model = model
        self._device = device
        self._allocations = Allocations()
        self._state: tuple[list[str], PooledStep | None] | None = None

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int, num_slots: int = 0) -> None:  # noqa: ARG002
        """Make room for what is pooled; there is no KV cache."""
        model = self._model
        self._pooler = Pooler(
            self._config.scheduler.max_num_seqs,
            model.config.hidden_size,
            self._device,
            model if model.config.num_labels else None,
            self._allocations,
        )

    @property
    def most_steps(self) -> int:
        """Return 1: no step follows from another."""
        return 1

    def interrupt(self) -> None:
        """Do nothing: there is one step at a time."""

    def release_kv_cache(self) -> None:
        """Do nothing: there is no KV cache."""

    def restore_kv_cache(self) -> None:
        """Do nothing: there is no KV cache."""

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the forward pass on the plan's prompts; see `ModelRunner.execute_model`.

        Raises:
            NBEngineError: the step before has not been fetched, or the plan has a part of a prompt.
        """
        if self._state is not None:
            raise NBEngineError("execute_model: the step before has not been sampled")
        self._pooler.update(plan)
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        prompts = sorted(plan.scheduled_new_reqs, key=lambda new: len(new.token_ids))
        counts = plan.num_scheduled_tokens
        if len(prompts) != len(counts) or any(len(p.token_ids) != counts[p.req_id] for p in prompts):
            raise NBEngineError("execute_model: an encoder computes a prompt in one step")
        req_ids = [prompt.req_id for prompt in prompts]
        hidden = self._model.forward(*self._inputs(prompts))
        self._state = req_ids, self._pooler.pool(hidden, req_ids, counts)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput:  # noqa: ARG002
        """Fetch what the step that `execute_model` left waiting has pooled.

        Raises:
            NBEngineError: no step waits.
        """
        state, self._state = self._state, None
        if state is None:
            raise NBEngineError("sample_tokens: no step waits to be sampled")
        req_ids, pooled = state
        output = ModelRunnerOutput(req_ids=req_ids, sampled_token_ids=[[] for _ in req_ids])
        if pooled is not None:
            pooled.put_results(output, self._allocations)
        self._allocations.put_faults(output)
        return output

    def _inputs(self, prompts: list[NewRequestData]) -> tuple[Tensor, Tensor, Tensor, list[PromptGroup]]:
        """Return token ids, positions, segments (int64 [T]) and groups of prompts in ascending order of
        length."""
        lengths = np.fromiter((len(prompt.token_ids) for prompt in prompts), np.int64, len(prompts))
        starts = lengths.cumsum() - lengths
        input_ids = np.concatenate([np.asarray(prompt.token_ids, np.int64) for prompt in prompts])
        positions = np.arange(len(input_ids)) - starts.repeat(lengths)
        token_types = np.zeros(len(input_ids), np.int64)
        # RoBERTa has one segment only.
        if self._model.config.type_vocab_size > 1:
            for start, length, prompt in zip(starts, lengths, prompts, strict=True):
                params = prompt.pooling_params
                if params is not None and params.second_segment_start is not None:
                    token_types[start + params.second_segment_start : start + length] = 1
        return (
            torch.from_numpy(input_ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            torch.from_numpy(token_types).to(self._device),
            group_prompts(lengths, self._device),
        )
