"""A continuous-batching LLM engine beside a notebook. Importing this package does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbengine.version import __version__ as __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbengine.config import AsyncEngineArgs, EngineArgs
    from nbengine.config.registered_models import register_model
    from nbengine.errors import (
        EngineDeadError,
        EngineStalledError,
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
    from nbengine.frontend.llm import LLM
    from nbengine.frontend.llm_engine import LLMEngine
    from nbengine.frontend.observability.request_log import RequestLog
    from nbengine.frontend.observability.stat_loggers import LoggingStatLogger, StatLogger
    from nbengine.frontend.observability.tracing import RequestTracer
    from nbengine.frontend.prompts.kept import prompts
    from nbengine.frontend.requests.input_processor import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from nbengine.frontend.runs.kept import runs
    from nbengine.metrics.stats import EngineStats, SchedulerStats
    from nbengine.outputs import (
        CompletionOutput,
        Logprob,
        PromptProgress,
        RequestMetrics,
        RequestOutput,
        ToolCall,
        UnreadableCall,
    )
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

_HOMES = {
    "nbengine.config": ("AsyncEngineArgs", "EngineArgs"),
    "nbengine.config.registered_models": ("register_model",),
    "nbengine.errors": (
        "EngineDeadError",
        "EngineStalledError",
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
    "nbengine.frontend.prompts.kept": ("prompts",),
    "nbengine.frontend.requests.input_processor": (
        "EmbedsPrompt",
        "PromptType",
        "TextPrompt",
        "TokensPrompt",
    ),
    "nbengine.frontend.runs.kept": ("runs",),
    "nbengine.frontend.llm": ("LLM",),
    "nbengine.frontend.llm_engine": ("LLMEngine",),
    "nbengine.frontend.observability.request_log": ("RequestLog",),
    "nbengine.frontend.observability.stat_loggers": ("LoggingStatLogger", "StatLogger"),
    "nbengine.frontend.observability.tracing": ("RequestTracer",),
    "nbengine.metrics.stats": ("EngineStats", "SchedulerStats"),
    "nbengine.outputs": (
        "CompletionOutput",
        "Logprob",
        "PromptProgress",
        "RequestMetrics",
        "RequestOutput",
        "ToolCall",
        "UnreadableCall",
    ),
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
    "EngineStalledError",
    "EngineStartError",
    "EngineStats",
    "FitReport",
    "IncompleteOutputError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "LLMEngine",
    "LeaseExpiredError",
    "LoggingStatLogger",
    "Logprob",
    "ModelLoadError",
    "ModelNotFoundError",
    "NBEngineError",
    "NotSupportedError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptProgress",
    "PromptType",
    "RequestError",
    "RequestLog",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTracer",
    "SamplingParams",
    "SchedulerStats",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StatLogger",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "UnreadableCall",
    "UtilityError",
    "fit",
    "load_ipython_extension",
    "prompts",
    "register_model",
    "runs",
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
    """Define the magics: the entry point of `%load_ext nbengine`."""
    from nbengine.magics.extension import load

    load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Detach from the engines and remove the magics: the entry point of `%unload_ext nbengine`."""
    from nbengine.magics.extension import unload

    unload(ipython)
