"""This module puts a frontend together around an engine that is starting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from nbengine.client.base import EngineCoreClient
from nbengine.config import EngineConfig
from nbengine.engine.bounds import check_counts, check_memory
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.prompt_length import TextEncoder
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.stored_templates import check_template
from nbengine.frontend.text.tokenizer import load_tokenizer, resolve_tokenizer, with_tokenizer
from nbengine.frontend.text.tokenizer_statements import warn_of_unmet_statements
from nbengine.ipc.control_messages import EngineReady, Progress
from nbengine.models.configs.description import ModelDescription, described_model
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.stated_lengths import warn_of_changed_angles, warn_of_shorter_lengths
from nbengine.models.division import check_parallel
from nbengine.models.registry import is_registered
from nbengine.runtime.capacity import Capacity
from nbengine.runtime.progress import ProgressCallback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


DESCRIPTION_TIMEOUT = 60.0
"""Seconds that the files of a tokenizer may take from another machine."""


@dataclass(frozen=True, slots=True)
class FrontendParts:
    """The parts of which `LLMEngine` and `AsyncLLM` are made, beside the client."""

    ready: EngineReady
    tokenizer: PreTrainedTokenizerFast
    input_processor: InputProcessor
    output_processor: OutputProcessor


def resolve_files(config: EngineConfig, progress: ProgressCallback | None = None) -> EngineConfig:
    """Return the configuration with the files of model and tokenizer found, fetched if need be (stage
    "fetch").

    The next stage, "load", begins with the engine's processes, long before these can report anything.

    Raises:
        ModelNotFoundError: no model or tokenizer goes by that name.
        ModelLoadError: files are missing, corrupt or of an unknown kind.
        InvalidArgumentError: the model cannot be divided among that many workers, this machine has no room
            for them, or `chat_template` is no template.
        EngineStartError: this machine has no room for the model.
    """
    from nbengine.models.checkpoints.files import resolve_model

    capacity = Capacity.here()
    check_counts(config, capacity)
    model = resolve_model(config.model, progress)
    hf_config = load_hf_config(model)
    # What somebody has registered is imported where the model runs, and checked there.
    if not is_registered(hf_config):
        check_parallel(hf_config, config.parallel)
    check_memory(dataclasses.replace(config, model=model), hf_config, capacity)
    if model.chat_template is not None:
        check_template("chat_template", model.chat_template)
    if model.tokenizer is not None:
        model = dataclasses.replace(model, tokenizer=resolve_tokenizer(model.tokenizer))
    model = with_tokenizer(model, progress)
    if progress is not None:
        progress(Progress("load", "starting the engine's processes"))
    return dataclasses.replace(config, model=model)


def assemble(client: EngineCoreClient, progress: ProgressCallback | None) -> FrontendParts:
    """Load the tokenizer while the engine starts, and wait until it is ready.

    The files that a frontend needs are asked for if the engine is on another machine. Whatever keeps the
    engine from getting ready, an interrupt included, ends an engine that `client` has started.
    """
    config, connection = client.config, client.connection
    try:
        if connection is None or connection.is_here:
            tokenizer = load_tokenizer(config.model)
            encoder = TextEncoder(tokenizer.backend_tokenizer)
            return _assemble(config, tokenizer, encoder, client.wait_ready(progress))
        ready = client.wait_ready(progress)
        answer = client.submit_utility("describe_model").result(DESCRIPTION_TIMEOUT)
        description = msgspec.convert(answer, ModelDescription)
        with described_model(config.model, description) as model:
            tokenizer = load_tokenizer(model)
            encoder = TextEncoder(tokenizer.backend_tokenizer)
            return _assemble(dataclasses.replace(config, model=model), tokenizer, encoder, ready)
    except BaseException:
        client.abandon()
        raise


def _assemble(
    config: EngineConfig, tokenizer: PreTrainedTokenizerFast, encoder: TextEncoder, ready: EngineReady
) -> FrontendParts:
    warn_of_unmet_statements(config.model, tokenizer)
    warn_of_shorter_lengths(config.model, ready.max_model_len)
    warn_of_changed_angles(config.model, ready.max_model_len)
    return FrontendParts(
        ready,
        tokenizer,
        InputProcessor(config, tokenizer, encoder, ready.max_model_len, ready.supported_tasks),
        OutputProcessor(TextDecoding.of(tokenizer), stream_interval=config.scheduler.stream_interval),
    )
