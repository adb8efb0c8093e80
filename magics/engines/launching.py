"""Starting and ending engines, with what the user sees of it: `%engine start`, `stop`, `restart` and `load`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.connection import ConnectionInfo
from nbengine.config import EngineArgs
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Progress
from nbengine.magics.engines.arguments import StartOptions, parse_start, present_arguments
from nbengine.magics.engines.reports import footprint, started_sentence
from nbengine.magics.interrupts import Interrupted
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.widgets.processes.progress import StartProgress
from nbengine.widgets.words import count, seconds

OF_THE_MODEL = (
    "tokenizer",
    "quantization",
    "load_format",
    "max_model_len",
    "hf_overrides",
    "trust_remote_code",
    "revision",
)
"""Arguments that were given for one model, and do not carry over to another."""


class Launcher:
    """Starts and ends the notebook's engines."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session

    def launch(self, options: StartOptions) -> None:
        """Start an engine, and have it as the default.

        Raises:
            Interrupted: by the user; nothing of the engine is left.
            NBEngineError: it did not start.
        """
        config = EngineArgs.from_kwargs(options.arguments).create_engine_config(bound=False)
        began = time.monotonic()
        session = self._session
        session.bury()
        with StartProgress(self._shell, f"starting {config.model.model}", config.parallel) as progress:
            progress.update(Progress("fetch"))
            try:
                client = session.backend.start(
                    options.arguments, name=options.name, session=session.key, progress=progress.update
                )
            except KeyboardInterrupt:
                raise Interrupted("start interrupted; what had been started is ended") from None
            progress.update(Progress("ready"))
            engine = AttachedEngine(client, options.arguments)
            session.add(engine)
            if options.out is not None:
                self._shell.user_ns[options.out] = client
            progress.conclusion = started_sentence(engine, time.monotonic() - began)

    def end(self, info: ConnectionInfo, end: Callable[[], None]) -> None:
        """End an engine by `end`, and say what came back."""
        began = time.monotonic()
        held = footprint(info)
        end()
        for note in self._session.on_engine_end:
            note(info)
        print(
            f"engine {info.name!r} stopped in {seconds(time.monotonic() - began)}: "
            f"{count(held.processes, 'process is', 'processes are')} gone, {held} came back"
        )

    def load(self, words: Sequence[str]) -> None:
        """`%engine load MODEL`: another model under the same name.

        The model's files are found first, while the old one still runs; then that is ended, so that the new one has its
        memory. If the new one does not start, the old one is started again.
        """
        options = parse_start(words, "load")
        wanted = options.arguments.get("model")
        if wanted is None:
            raise UsageError("%engine load: which MODEL? An alias, a directory, a .gguf file or a hub id")
        engine = self._session.get(options.name)
        before = StartOptions(engine.name, None, present_arguments(engine))
        arguments, left_out = carried_over(before.arguments, options.arguments)
        config = EngineArgs.from_kwargs(arguments).create_engine_config(bound=False)
        with StartProgress(self._shell, f"looking for {wanted}", config.parallel) as progress:
            progress.update(Progress("fetch"))
            self._session.backend.prepare(arguments, progress=progress.update)
        if left_out:
            print(
                f"{', '.join(left_out)} was for the model before; give it again if it is meant for {wanted}"
            )
        self.end(engine.client.connection, lambda: self._session.stop(engine))
        try:
            self.launch(StartOptions(engine.name, options.out, arguments))
        except Interrupted:
            raise Interrupted(
                f"load interrupted; no engine {engine.name!r} runs now: `%engine start {_model_of(before)} --name "
                f"{engine.name}` starts the one before"
            ) from None
        except NBEngineError:
            self._restore(before, wanted)
            raise

    def _restore(self, before: StartOptions, wanted: str) -> None:
        """Start the engine that had to make room; the error of the other one is being raised."""
        print(f"{wanted} did not start; {_model_of(before)} is started again")
        try:
            self.launch(before)
        except NBEngineError as error:
            print(f"engine {before.name!r} is gone: {_model_of(before)} did not start again, either: {error}")


def carried_over(before: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments for another model: those of the one before that make sense for it, and those given.

    Returns:
        The arguments, and those that are left out, as "name=value".
    """
    of_before = [name for name in OF_THE_MODEL if name in before and name not in given]
    kept = {name: value for name, value in before.items() if name not in of_before}
    return {**kept, **given}, [f"{name}={before[name]!r}" for name in of_before]


def _model_of(options: StartOptions) -> str:
    return str(options.arguments.get("model", EngineArgs.model))
