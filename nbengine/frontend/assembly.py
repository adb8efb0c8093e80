"""Putting a frontend together around an engine that is starting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from nbengine.client.base import EngineCoreClient
from nbengine.config import EngineConfig
from nbengine.frontend.input_processor import InputProcessor
from nbengine.frontend.output_processor import OutputProcessor
from nbengine.frontend.tokenizer import load_tokenizer, resolve_tokenizer
from nbengine.ipc.control_messages import EngineReady, Progress
from nbengine.models.description import ModelDescription, described_model
from nbengine.models.hf_config import load_hf_config
from nbengine.models.progress import ProgressCallback
from nbengine.models.sharding import check_parallel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


DESCRIPTION_TIMEOUT = 60.0
"""Seconds that the files of a tokenizer may take from another machine."""


@dataclass(frozen=True, slots=True)
class FrontendParts:
    """What `LLMEngine` and `AsyncLLM` are made of, beside the client."""

    ready: EngineReady
    tokenizer: PreTrainedTokenizerFast
    input_processor: InputProcessor
    output_processor: OutputProcessor


def resolve_files(config: EngineConfig, progress: ProgressCallback | None = None) -> EngineConfig:
    """The configuration with the files of model and tokenizer found, fetched if need be (stage "fetch").

    The next stage, "load", begins with the engine's processes, long before these can report anything.

    Raises:
        ModelNotFoundError: no model or tokenizer goes by that name.
        ModelLoadError: files are missing, corrupt or of an unknown kind.
        InvalidArgumentError: the model cannot be divided among so many workers.
    """
    from nbengine.models.files import resolve_model

    model = resolve_model(config.model, progress)
    check_parallel(load_hf_config(model), config.parallel)
    if model.tokenizer is not None:
        model = dataclasses.replace(model, tokenizer=resolve_tokenizer(model.tokenizer))
    if progress is not None:
        progress(Progress("load", "starting the engine's processes"))
    return dataclasses.replace(config, model=model)


def assemble(client: EngineCoreClient, progress: ProgressCallback | None) -> FrontendParts:
    """Load the tokenizer while the engine starts, and wait until it is ready.

    Of an engine on another machine the files that a frontend needs are asked for.
    Whatever keeps it from getting ready, an interrupt included, ends an engine that `client` has started.
    """
    config, connection = client.config, client.connection
    try:
        if connection is None or connection.is_here:
            tokenizer = load_tokenizer(config.model)
            return _assemble(config, tokenizer, client.wait_ready(progress))
        ready = client.wait_ready(progress)
        answer = client.call_utility("describe_model", timeout=DESCRIPTION_TIMEOUT)
        description = msgspec.convert(answer, ModelDescription)
        with described_model(config.model, description) as model:
            return _assemble(dataclasses.replace(config, model=model), load_tokenizer(model), ready)
    except BaseException:
        client.abandon()
        raise


def _assemble(config: EngineConfig, tokenizer: PreTrainedTokenizerFast, ready: EngineReady) -> FrontendParts:
    return FrontendParts(
        ready,
        tokenizer,
        InputProcessor(config, tokenizer, ready.max_model_len, ready.supported_tasks),
        OutputProcessor(tokenizer.backend_tokenizer, stream_interval=config.scheduler.stream_interval),
    )
