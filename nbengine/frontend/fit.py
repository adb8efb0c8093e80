"""This module works out whether a model fits on this machine, before anything of it is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack, cast

import msgspec

from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import ModelLoadError, NBEngineError
from nbengine.frontend.options import EngineOptions, PathName, with_engine_options
from nbengine.ipc.fit import FitAnswer, FitAnswers, FitQuestion, FitQuestions, SizePlan
from nbengine.kv_cache.sizing import spare_slots
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups, LayerRule, RuleKind, make_groups
from nbengine.models.checkpoints.files import resolve_configuration
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.division import tensor_parallel_sizes
from nbengine.runtime.processes import child_environment
from nbengine.runtime.progress import ProgressCallback
from nbengine.widgets.processes.fit_report import FitReport, MemoryPlace, TensorParallelFit

_MAX_SUGGESTED_SIZE = 8


@with_engine_options
def fit(
    model: PathName = "smollm2-135m",
    *,
    progress: ProgressCallback | None = None,
    **options: Unpack[EngineOptions],
) -> FitReport:
    """Work out how an engine would come out on this machine: weights, KV cache, context, requests at once.

    Nothing is loaded: it takes the configuration, the headers of the weight files and the memory that is
    free. Of a model on the hub that has not been downloaded it takes config.json alone. A separate process
    computes it with the functions that a start uses, so that the numbers are those of a start at this moment.

    Args:
        model: a directory (a path, too), a .gguf file, a hub id, or an alias.
        progress: called with messages of the stage "fetch".
        options: those of `LLM`.

    Raises:
        ModelNotFoundError: nothing goes by that name.
        InvalidArgumentError, NotSupportedError: an argument; the message names it.
    """
    config = EngineArgs.from_kwargs({"model": model, **options}, "fit", ("progress",)).create_engine_config(
        bound=True
    )
    try:
        found, file_bytes = resolve_configuration(config.model, progress)
    except ModelLoadError as error:
        return FitReport(config.model.model, problem=str(error))
    config = replace(config, model=found)
    alternatives = [config, *_with_sizes(config), *_with_less(config)]
    (answer,) = _ask([FitQuestion(alternatives)]).answers
    return _report(config, file_bytes, alternatives, answer)


def fit_each(configs: Sequence[tuple[EngineConfig, int]]) -> tuple[list[FitReport], FitAnswers]:
    """Work out how engines of several models, each for itself, would come out, and how fast memory is read.

    Args:
        configs: Configurations whose models are resolved, with the bytes of their weights on disk.

    Returns:
        A report for each, and the machine as it was found.
    """
    alternatives = [[config, *_with_less(config)] for config, _ in configs]
    found = _ask([FitQuestion(each) for each in alternatives], measures=True)
    reports = [
        _report(config, file_bytes, tried, answer)
        for (config, file_bytes), tried, answer in zip(configs, alternatives, found.answers, strict=True)
    ]
    return reports, found


def _with_sizes(config: EngineConfig) -> list[EngineConfig]:
    """Return the same configuration with each number of tensor-parallel workers that may be worth a
    thought."""
    try:
        sizes = tensor_parallel_sizes(load_hf_config(config.model), _MAX_SUGGESTED_SIZE)
    except NBEngineError:
        return []  # the answer about the configuration itself says what is wrong with the model
    return [
        replace(config, parallel=replace(config.parallel, tensor_parallel_size=size))
        for size in sizes
        if size != config.parallel.tensor_parallel_size
    ]


def _with_less(config: EngineConfig) -> list[EngineConfig]:
    """Return variants of the configuration with which a person would try to make the model fit."""
    less = []
    if config.model.max_model_len is not None:
        less.append(replace(config, model=replace(config.model, max_model_len=None)))
    if config.model.dtype != "bfloat16":
        less.append(replace(config, model=replace(config.model, dtype="bfloat16")))
    if config.cache.kv_cache_dtype == "auto" and config.model.device != "cuda":
        less.append(replace(config, cache=replace(config.cache, kv_cache_dtype="int8")))
    return less


def _ask(questions: Sequence[FitQuestion], *, measures: bool = False) -> FitAnswers:
    """Have a process that imports torch answer questions.

    Raises:
        NBEngineError: the process has failed.
    """
    command = [sys.executable, "-m", "nbengine.engine.fit_probe"]
    asked = msgspec.json.encode(FitQuestions(list(questions), measures))
    done = subprocess.run(command, input=asked, env=child_environment(), capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [
            f"exit status {done.returncode}"
        ]
        names = ", ".join(repr(question.configs[0].model.model) for question in questions)
        raise NBEngineError(f"cannot work out whether {names or 'models'} fits: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=FitAnswers)


def _report(
    config: EngineConfig, file_bytes: int, asked: Sequence[EngineConfig], answer: FitAnswer
) -> FitReport:
    if answer.problem:
        return FitReport(config.model.model, problem=answer.problem)
    plans = list(zip(asked, answer.plans, strict=True))
    own = answer.plans[0]
    parallel = config.parallel
    return FitReport(
        model=config.model.model,
        problem=own.problem,
        advice="" if not own.problem else _advice(config, plans),
        device=answer.device,
        dtype=own.dtype,
        file_bytes=file_bytes,
        weights_bytes=own.weights_bytes,
        page_bytes=own.page_bytes,
        block_size=own.block_size,
        num_blocks=own.num_blocks,
        groups=_groups_of(own),
        slot_bytes=own.slot_bytes,
        num_state_slots=own.num_state_slots,
        num_spare_slots=spare_slots(own.num_state_slots, config.scheduler.max_num_seqs, config.cache),
        max_model_len=own.max_model_len,
        context_limit=answer.context_limit,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_engine_cores=parallel.data_parallel_size,
        memory=tuple(MemoryPlace(place.name, place.total, place.free) for place in answer.places),
        tensor_parallel=tuple(
            sorted((_size_fit(plan) for each, plan in plans if _differs_in_size(each, config)), key=_size_of)
        ),
    )


def _differs_in_size(config: EngineConfig, own: EngineConfig) -> bool:
    """Return whether a configuration is `own`, or `own` with another number of workers."""
    return (config.model, config.cache) == (own.model, own.cache)


def _size_fit(plan: SizePlan) -> TensorParallelFit:
    workers = plan.tensor_parallel_size * plan.pipeline_parallel_size
    num_tables = _groups_of(plan).num_tables
    return TensorParallelFit(
        plan.tensor_parallel_size,
        plan.weights_bytes // workers,
        num_tables * plan.page_bytes // plan.block_size // workers,
        plan.num_blocks,
        plan.problem,
        num_tables,
    )


def _groups_of(plan: SizePlan) -> CacheGroups:
    rules = [LayerRule(cast("RuleKind", kind), size) for kind, size in plan.rules]
    return make_groups(rules) if rules else ONE_GROUP


def _size_of(size: TensorParallelFit) -> int:
    return size.tensor_parallel_size


def _advice(config: EngineConfig, plans: Sequence[tuple[EngineConfig, SizePlan]]) -> str:
    """Return flags with which the model would fit, found by trying; the text is empty if none does."""
    found = []
    for other, plan in plans:
        if plan.problem:
            continue
        if other.parallel != config.parallel:
            found.append(f"--tp {other.parallel.tensor_parallel_size}")
        elif other.model.max_model_len != config.model.max_model_len:
            found.append(f"--max-model-len {plan.max_model_len}")
        elif other.model.dtype != config.model.dtype:
            found.append(f"--dtype {other.model.dtype}")
        elif other.cache.kv_cache_dtype != config.cache.kv_cache_dtype:
            found.append(f"--kv-cache-dtype {other.cache.kv_cache_dtype}")
    return " or ".join(found)
