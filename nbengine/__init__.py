"""A continuous-batching LLM engine beside a notebook. Importing this costs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbengine.config import AsyncEngineArgs, EngineArgs
    from nbengine.errors import (
        EngineDeadError,
        EngineStartError,
        IncompleteOutputError,
        InvalidArgumentError,
        InvalidTypeError,
        LeaseExpiredError,
        ModelLoadError,
        ModelNotFoundError,
        NBEngineError,
        NotSupportedError,
        RequestError,
        UtilityError,
    )
    from nbengine.frontend.async_llm import AsyncLLM, AsyncLLMEngine
    from nbengine.frontend.fit import fit
    from nbengine.frontend.input_processor import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from nbengine.frontend.llm import LLM
    from nbengine.frontend.llm_engine import LLMEngine
    from nbengine.metrics.stats import EngineStats, SchedulerStats
    from nbengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from nbengine.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from nbengine.sampling_params import (
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from nbengine.widgets.processes.fit_report import FitReport

__version__ = "0.1.0"

_HOMES = {
    "nbengine.config": ("AsyncEngineArgs", "EngineArgs"),
    "nbengine.errors": (
        "EngineDeadError",
        "EngineStartError",
        "IncompleteOutputError",
        "InvalidArgumentError",
        "InvalidTypeError",
        "LeaseExpiredError",
        "ModelLoadError",
        "ModelNotFoundError",
        "NBEngineError",
        "NotSupportedError",
        "RequestError",
        "UtilityError",
    ),
    "nbengine.frontend.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "nbengine.frontend.fit": ("fit",),
    "nbengine.frontend.input_processor": ("EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"),
    "nbengine.frontend.llm": ("LLM",),
    "nbengine.frontend.llm_engine": ("LLMEngine",),
    "nbengine.metrics.stats": ("EngineStats", "SchedulerStats"),
    "nbengine.outputs": ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
    "nbengine.pooling_outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "nbengine.widgets.processes.fit_report": ("FitReport",),
    "nbengine.sampling_params": (
        "PoolingParams",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineDeadError",
    "EngineStartError",
    "EngineStats",
    "FitReport",
    "IncompleteOutputError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "LLMEngine",
    "LeaseExpiredError",
    "Logprob",
    "ModelLoadError",
    "ModelNotFoundError",
    "NBEngineError",
    "NotSupportedError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerStats",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UtilityError",
    "fit",
    "load_ipython_extension",
    "unload_ipython_extension",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'nbengine' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Entry point of `%load_ext nbengine`: define the magics."""
    from nbengine.magics.extension import load

    load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Entry point of `%unload_ext nbengine`: detach from the engines and remove the magics."""
    from nbengine.magics.extension import unload

    unload(ipython)
