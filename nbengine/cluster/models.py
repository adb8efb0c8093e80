"""A model's files on a node of a cluster."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from nbengine.config import EngineConfig
from nbengine.errors import ModelLoadError, NBEngineError
from nbengine.models.files import resolve_model
from nbengine.models.progress import ProgressCallback


def with_model_here(config: EngineConfig, progress: ProgressCallback | None = None) -> EngineConfig:
    """The configuration with the places of the model's files on this machine.

    They are where they were found for the engine, as on a shared file system, or are looked for again by the model's name.

    Raises:
        ModelLoadError: this machine cannot have them; the message names it.
    """
    model = config.model
    missing = [path for path in filter(None, (model.directory, *model.weights)) if not Path(path).exists()]
    if not missing:
        return config
    try:
        found = resolve_model(replace(model, directory="", weights=()), progress)
    except NBEngineError as error:
        raise ModelLoadError(
            f"node {socket.gethostname()} has not {missing[0]}, and looked for {model.model!r} by name: {error}"
        ) from error
    return replace(config, model=found)
