"""The files of a model on a node of a cluster."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from nbengine.config import EngineConfig
from nbengine.errors import ModelLoadError, NBEngineError
from nbengine.models.checkpoints.files import resolve_model
from nbengine.runtime.progress import ProgressCallback


def with_model_here(config: EngineConfig, progress: ProgressCallback | None = None) -> EngineConfig:
    """Return the configuration with the places of the model's files on this machine.

    The files are at the paths that were found for the engine, as on a shared file system, or are looked for
    again by the model's name.

    Raises:
        ModelLoadError: this machine cannot get the files; the message names the machine.
    """
    model = config.model
    missing = [path for path in filter(None, (model.directory, *model.weights)) if not Path(path).exists()]
    if not missing:
        return config
    try:
        found = resolve_model(replace(model, directory="", weights=()), progress)
    except NBEngineError as error:
        raise ModelLoadError(
            f"node {socket.gethostname()} does not have {missing[0]}, and looked for {model.model!r} by name: {error}"
        ) from error
    return replace(config, model=found)
