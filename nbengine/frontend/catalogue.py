"""The models that lie on this machine and those worth fetching, each with what it needs and whether it fits here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from nbengine.config import EngineArgs, EngineConfig
from nbengine.config.registered_models import registered_models
from nbengine.frontend.fit import fit_each
from nbengine.ipc.fit import FitAnswers
from nbengine.models.checkpoints.kept_models import KeptModel, kept_models
from nbengine.models.listing import HEADER, THROUGH_TRANSFORMERS, runnable
from nbengine.models.suggested import SUGGESTED, Suggested
from nbengine.widgets.processes.fit_report import FitReport
from nbengine.widgets.processes.models_report import ModelLine, ModelsReport, SuggestedLine
from nbengine.widgets.words import table

DIRECTORIES_VARIABLE = "NBENGINE_MODEL_DIRS"
"""The environment variable with directories of models, between colons as in PATH."""


def named_directories() -> list[str]:
    """Return the directories that the environment names."""
    return [name for name in os.environ.get(DIRECTORIES_VARIABLE, "").split(os.pathsep) if name]


def classes_table() -> tuple[str, str]:
    """Make the table of the models that run, with their classes and GGUF names, as (plain text, HTML)."""
    rows = [*runnable(registered_models()), THROUGH_TRANSFORMERS]
    return table([line for row in rows for line in row.lines], [name.upper() for name in HEADER])


def models_report(directories: Sequence[str] = ()) -> ModelsReport:
    """Look at the caches and the `directories`, and work out what fits. Nothing is loaded and nothing fetched.

    Raises:
        NBEngineError: the process that works it out has failed.
    """
    kept = kept_models(directories)
    usable = [model for model in kept if model.config is not None]
    reports, machine = fit_each([(_engine_config(model), model.num_bytes) for model in usable])
    fits = dict(zip((model.name for model in usable), reports, strict=True))
    names = {model.name for model in usable}
    free = max((place.free for place in machine.places), default=0)
    return ModelsReport(
        [_kept_line(model, fits.get(model.name), machine) for model in kept],
        [_suggested_line(each, machine, free, is_kept=each.name in names) for each in SUGGESTED],
        machine.device,
        free,
        machine.bytes_per_second,
    )


def _engine_config(model: KeptModel) -> EngineConfig:
    assert model.config is not None
    config = EngineArgs(model=model.name).create_engine_config(bound=False)
    return replace(config, model=model.config)


def _kept_line(model: KeptModel, fit: FitReport | None, machine: FitAnswers) -> ModelLine:
    speed = None
    if fit is not None and model.config is not None and not model.config.is_moe:
        speed = None if model.is_encoder else _speed(fit.weights_bytes, machine)
    return ModelLine(model.name, model.place, model.kind, model.num_bytes, fit, model.problem, speed)


def _suggested_line(each: Suggested, machine: FitAnswers, free: int, *, is_kept: bool) -> SuggestedLine:
    speed = _speed(each.weights_bytes, machine) if each.is_decoder else None
    fits = each.weights_bytes < free
    return SuggestedLine(each.name, each.billions, each.weights_bytes, each.good_for, fits, is_kept, speed)


def _speed(weights_bytes: int, machine: FitAnswers) -> float | None:
    """Estimate the tokens a second of one request, each of which reads all weights once."""
    if not weights_bytes or not machine.bytes_per_second:
        return None
    return machine.bytes_per_second / weights_bytes
