"""Real workers, one of which has too little memory for what some requests ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.sampling import penalties, sampler
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.worker.batch import prompt_logprobs
from nbengine.worker.worker import Worker

STARVED_WORKERS = "process_support.starved_worker:StarvedWorkersExecutor"
POOR = "NBENGINE_TEST_POOR"
"""The variable of the environment that says which worker it is, as "engine core:rank"."""

BEGUN, COMPUTED, LOGPROBS = 6, 7, 9
"""The numbers of prompt log probabilities that there is no room to begin with, and to compute, and the number of log
probabilities of a token that there is none for."""
COLUMNS = 64
"""The number of columns that a table of penalties can have."""
STATES = 50
"""The number of tokens whose states can be added up at a time."""
FATAL = 77
"""The length of the prompt of a request in whose tenth step memory runs out, in the middle of the forward pass."""


class StarvedWorkersExecutor(MultiprocExecutor):
    """An executor whose workers are real, but for the memory of one."""

    worker_class = "process_support.starved_worker:StarvedWorker"


def with_room(room: Callable[..., bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with no more memory than for what there is `room` for."""

    def with_little_memory(*args: Any, **options: Any) -> Any:
        if not room(*args):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return function(*args, **options)

    return with_little_memory


class StarvedWorker(Worker):
    """A worker that is short of memory if the environment says so."""

    _num_fatal_steps = 0

    def load_model(self) -> None:
        super().load_model()
        if os.environ[POOR] != f"{self.layout.dp_rank}:{self.layout.rank}":
            return
        seams: list[tuple[Any, str, Callable[..., bool]]] = [
            (prompt_logprobs.PromptLogprobs, "_begin", lambda _, new, num_top: num_top != BEGUN),
            (prompt_logprobs, "compute_logprobs", lambda logits, targets, num_top: num_top < COMPUTED),
            (sampler, "compute_logprobs", lambda logits, token_ids, num_top: num_top < LOGPROBS),
            (penalties.F, "pad", lambda part, extra: part.shape[1] + extra[1] <= COLUMNS),
            (torch, "segment_reduce", lambda states, _: len(states) <= STATES),
        ]
        for owner, name, room in seams:
            setattr(owner, name, with_room(room, getattr(owner, name)))
        self.model.on_layers = with_room(lambda _: self._num_fatal_steps < 10, self.model.on_layers)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        begins = any(len(new.token_ids) == FATAL for new in scheduler_output.scheduled_new_reqs)
        self._num_fatal_steps += begins or self._num_fatal_steps > 0
        return super().execute_model(scheduler_output)
