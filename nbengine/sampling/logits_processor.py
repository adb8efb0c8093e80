"""Custom logits processors: classes that an engine loads by name and applies to every batch.

A processor is named `"module:Class"` in the engine argument `logits_processors`, and its module must be
importable in the engine's process (`PYTHONPATH`, or an installed package). Requests hand it parameters in
`SamplingParams.extra_args`. It runs inside the engine: what `apply` and `update_state` raise ends the engine.
Only if `apply` finds too little memory, the rows are sampled one by one, and only requests for which there is
too little alone end.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbengine.errors import EngineStartError, RequestError
from nbengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from nbengine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class RowAdded:
    """A request came, or came back after a preemption."""

    row: int
    params: SamplingParams
    prompt_token_ids: NDArray[np.int32]
    output_token_ids: NDArray[np.int32]
    """The tokens that the request had generated before a preemption; else empty."""


@dataclass(frozen=True, slots=True)
class RowMoved:
    """A request now has another row; the request that had that row before has left it."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class RowRemoved:
    """A request finished or was preempted."""

    row: int


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """The events between two steps: first tokens were sampled, then rows changed, in the order given."""

    sampled_rows: NDArray[np.int64]
    sampled_token_ids: NDArray[np.int64]
    """One token for each of `sampled_rows`."""
    changes: tuple[RowAdded | RowMoved | RowRemoved, ...]


class LogitsProcessor(ABC):
    """A processor changes the logits of a whole batch at once, before everything else but a structured
    output's mask.

    An instance keeps its state by row: `update_state` comes before each `apply` and tells what happened to
    the rows since the one before.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:  # noqa: B027  # may stay as it is
        """Prepare for `config`; called once, when the engine starts. `device` is where the logits will be."""

    @classmethod  # noqa: B027  # most processors refuse nothing
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise an exception to refuse a request; its message reaches the caller, and no other request.

        It may be called from any thread.
        """

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Take in what happened since the previous call."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Return the changed logits, finite or minus infinity; changing them in place is allowed.

        Args:
            logits: float32 [N, V], on the device. The next step may overwrite them: what is to be kept has to
                be copied.
            rows: int64 [N], the row of the batch to which each row of logits belongs. A row whose prompt is
                still being computed is left out.
        """


def load_logits_processors(names: Iterable[str]) -> tuple[type[LogitsProcessor], ...]:
    """Import the classes named `"module:Class"`.

    Raises:
        EngineStartError: a class cannot be imported or is no `LogitsProcessor`; the message names it.
    """
    return tuple(_load(name) for name in names)


def check_params(processors: Iterable[type[LogitsProcessor]], params: SamplingParams) -> None:
    """Ask each processor whether it takes the parameters.

    Raises:
        RequestError: a processor refuses them; the message has its name and its reason.
    """
    for processor in processors:
        try:
            processor.validate_params(params)
        except Exception as error:
            raise RequestError(f"the logits processor {processor.__name__} refuses: {error}") from error


def create_logits_processors(config: EngineConfig, device: torch.device) -> tuple[LogitsProcessor, ...]:
    """Make an instance of each processor that the engine was given.

    Raises:
        EngineStartError: a processor cannot be loaded or made; the message names it.
    """
    names = config.model.logits_processors
    instances = []
    for name, processor_class in zip(names, load_logits_processors(names), strict=True):
        try:
            instances.append(processor_class(config, device))
        except Exception as error:
            raise EngineStartError(
                f"the logits processor {name} cannot be made: {type(error).__name__}: {error}"
            ) from error
    return tuple(instances)


def _load(name: str) -> type[LogitsProcessor]:
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise EngineStartError(
            f"the logits processor {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise EngineStartError(f"{name} is no subclass of nbengine.sampling.logits_processor.LogitsProcessor")
    return found
