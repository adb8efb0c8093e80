"""The recording of runs: each request is noted when it is made, and handed to the writer when it has ended."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from IPython.core.interactiveshell import InteractiveShell

from nbengine.config import ModelConfig
from nbengine.errors import NBEngineError
from nbengine.frontend.runs.place import store_path
from nbengine.frontend.runs.run import FoundScores, Limits, Run, RunFilter, question_of
from nbengine.frontend.runs.store import RunStore
from nbengine.frontend.runs.writer import RunWriter
from nbengine.magics.config import SAMPLING_DEFAULTS, NBEngine
from nbengine.magics.generation.arguments import OWN_PARAMETERS, GenerateOptions
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.namespace import notebook_name, running_cell
from nbengine.magics.session import AttachedEngine
from nbengine.outputs import RequestMetrics
from nbengine.sampling_params import SamplingParams
from nbengine.version import __version__
from nbengine.widgets.words import print_quietly

Messages = Sequence[Mapping[str, Any]]
_ALWAYS = (*SAMPLING_DEFAULTS, "n")
"""Parameters that every run has among its settings, whatever their values."""
_LEFT_OUT = (*OWN_PARAMETERS, "bad_words_token_ids")


@dataclass(frozen=True)
class Occasion:
    """The occasion of a request: the magic that asks, and the request's place in a comparison."""

    kind: str = "generate"
    comparison: str = ""
    varied: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """The recording of a notebook's runs, unless `NBEngine.keep_runs` is off."""

    def __init__(self, shell: InteractiveShell, config: NBEngine) -> None:
        self._shell = shell
        self._config = config
        self._versions: dict[str, str] = {}
        self._writer: RunWriter | None = None
        self._lock = threading.Lock()
        """Held while the writer is made: the first answers may end on several threads."""

    @property
    def is_on(self) -> bool:
        """Return whether runs are kept."""
        return bool(self._config.keep_runs)

    @property
    def writer(self) -> RunWriter:
        """Return the writer of the notebook's store, which exists from the first call on."""
        with self._lock:
            if self._writer is None:
                self._writer = RunWriter(RunStore(store_path()))
            return self._writer

    def follow(
        self,
        request: Request,
        engine: AttachedEngine,
        options: GenerateOptions,
        messages: Messages | None,
        occasion: Occasion,
    ) -> None:
        """Keep a request once it has ended, which it may do on any thread.

        `messages` are what the chat template got, None where the prompt goes to the model as it is.
        """
        if not self._config.keep_runs:
            return
        self.tell_trouble()
        begun = self.describe(request.origin.params, engine, options, messages, occasion)
        request.on_end.append(partial(self._keep, begun, request.result))

    def describe(
        self,
        params: SamplingParams,
        engine: AttachedEngine,
        options: GenerateOptions,
        messages: Messages | None,
        occasion: Occasion,
    ) -> Run:
        """Describe a run as far as that is possible before it has an answer."""
        cell, execution = running_cell(self._shell)
        begun = Run(
            time=time.time(),
            kind=occasion.kind,
            engine=engine.name,
            model=engine.client.config.model.model,
            model_version=self._version_of(engine),
            nbengine=__version__,
            prompt=options.prompt,
            text="",
            finish_reason=None,
            settings=settings_of(params, options, messages),
            varied=occasion.varied,
            messages=list(messages or ()),
            comparison=occasion.comparison,
            notebook=notebook_name(self._shell),
            cell=cell,
            execution=execution,
            **_kept_prompt(options),
        )
        return replace(begun, question=question_of(begun)) if occasion.comparison else begun

    def tell_trouble(self) -> None:
        """Say once what keeps runs from being written."""
        if self._writer is not None and (trouble := self._writer.take_trouble()):
            print_quietly(trouble)

    def before(self, cell: str, execution: str) -> list[dict[str, Any]]:
        """Return the runs of a cell's execution before this one, as another kernel may have kept them.

        Raises:
            NBEngineError: the store cannot be read.
        """
        choice = RunFilter(notebook=notebook_name(self._shell), cell=cell, last=1)
        for row in self.writer.store.select(choice):
            if row["execution"] != execution:
                return self.writer.store.select(replace(choice, execution=row["execution"], last=None))
        return []

    def keep_scores(self, answer: GenerationResult, found: FoundScores) -> None:
        """Keep the scores of an answer with its run, if there is one."""
        if self.is_on and answer.kept_run is not None:
            self.writer.score(answer.kept_run, found)

    def of_notebook(self, last: int) -> list[dict[str, Any]]:
        """Return the latest runs of this notebook, the oldest first; none where nobody tells its name.

        Raises:
            NBEngineError: the store cannot be read.
        """
        name = notebook_name(self._shell)
        self.close()
        return self.writer.store.select(RunFilter(notebook=name, last=last)) if name else []

    def mark(self, answer: GenerationResult, *, pinned: bool | None = None, thumb: int | None = None) -> None:
        """Note in the run of an answer what a person thinks of it.

        Raises:
            NBEngineError: there is no such run, or it cannot be written.
        """
        self.close()
        if answer.kept_run is None or answer.kept_run.number is None:
            raise NBEngineError("no run has been kept of this answer")
        self.writer.store.change(answer.kept_run.number, pinned=pinned, thumb=thumb)

    def close(self) -> None:
        """Wait until what has ended is written, and say if that is not possible."""
        if self._writer is not None:
            self._writer.flush()
            self.tell_trouble()

    def _keep(self, begun: Run, result: GenerationResult, error: NBEngineError | None) -> None:
        config = self._config
        if config.keep_runs:
            limits = Limits(config.runs_max_days, config.runs_max_mb)
            result.kept_run = self.writer.keep(finished_run(begun, result, error), limits)

    def _version_of(self, engine: AttachedEngine) -> str:
        # The files may be replaced later: the engine has loaded those that it found when it started.
        place = engine.client.connection.run_dir
        if place not in self._versions:
            self._versions[place] = model_version(engine.client.config.model)
        return self._versions[place]


def _kept_prompt(options: GenerateOptions) -> dict[str, Any]:
    kept = options.kept
    # A prompt of the playground that nobody has kept has no version.
    if kept is None or not kept.version:
        return {}
    return {
        "prompt_name": kept.name,
        "prompt_version": kept.version,
        "prompt_values": dict(kept.values),
    }


def finished_run(begun: Run, result: GenerationResult, error: NBEngineError | None) -> Run:
    """Return a run with its answer and its end."""
    outputs = result.outputs
    several = [
        {"text": each.text, "finish_reason": each.finish_reason, "tokens": len(each.token_ids)}
        for each in outputs
    ]
    return replace(
        begun,
        text=result.text,
        finish_reason=result.finish_reason,
        error="" if error is None else f"{type(error).__name__}: {getattr(error, 'cause', error)}",
        tokens=sum(len(each.token_ids) for each in outputs),
        prompt_tokens=result.num_prompt_tokens,
        cached_tokens=result.num_cached_tokens,
        outputs=several if len(several) > 1 else (),
        metrics=metrics_of(result.metrics),
    )


def metrics_of(metrics: RequestMetrics) -> dict[str, Any]:
    """Return the figures of a request: seconds, tokens a second, preemptions; None where there is no such figure."""
    ended = metrics.finished_time if metrics.finished_time is not None else metrics.last_token_time
    return {
        "ttft": metrics.time_to_first_token,
        "itl": metrics.inter_token_latency,
        "tokens_per_second": metrics.tokens_per_second,
        "queued": metrics.queued_time,
        "total": None if ended is None else ended - metrics.arrival_time,
        "preemptions": metrics.num_preemptions,
        "ranks": list(metrics.data_parallel_ranks),
    }


def settings_of(
    params: SamplingParams, options: GenerateOptions, messages: Messages | None
) -> dict[str, Any]:
    """Return all that a later request needs, besides prompt and messages, to ask the same again."""
    given = msgspec.to_builtins(params, enc_hook=str)
    settings = {name: getattr(params, name) for name in _ALWAYS}
    settings |= {name: value for name, value in given.items() if name not in _LEFT_OUT}
    settings["chat"] = messages is not None
    if messages and messages[0].get("role") == "system":
        settings["system"] = messages[0].get("content")
    if options.template.think is not None:
        settings["think"] = options.template.think
    if options.template.variables:
        settings["template"] = dict(options.template.variables)
    return settings | dict(options.tools)


def model_version(model: ModelConfig) -> str:
    """Return the revision of a model of the hub, else a digest of its files' sizes and times.

    It is empty where the files cannot be seen, as with an engine on another machine that has no revision.
    """
    parts = Path(model.directory).parts
    if "snapshots" in parts[:-1]:
        return parts[parts.index("snapshots") + 1]
    digest = hashlib.sha256()
    try:
        for name in model.weights:
            status = os.stat(name)
            digest.update(f"{Path(name).name} {status.st_size} {status.st_mtime_ns}\n".encode())
    except OSError:
        return model.revision or ""
    return f"files {digest.hexdigest()[:12]}" if model.weights else model.revision or ""
