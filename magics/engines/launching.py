"""`%engine start`, `stop`, `restart` and `load`: this module starts and ends engines and shows that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.engines.directory import count_clients, find_engine
from nbengine.config import EngineArgs
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import Progress
from nbengine.magics.engines.arguments import StartOptions, arguments_of, parse_start, present_arguments
from nbengine.magics.engines.rejoin import Running, engine_to_join, idle_engines
from nbengine.magics.engines.reports import capacity, footprint, started_sentence
from nbengine.magics.interrupts import Interrupted
from nbengine.magics.session import AttachedEngine, NotebookSession, live_engines
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.processes.progress import StartProgress
from nbengine.widgets.words import count, print_quietly, seconds

OTHERWISE = "`%engine start --new` starts another"
OF_THE_MODEL = (
    "tokenizer",
    "tokenizer_mode",
    "chat_template",
    "generation_config",
    "quantization",
    "activation_dtype",
    "load_format",
    "model_impl",
    "max_model_len",
    "hf_overrides",
    "revision",
)
"""Arguments that were given for one model and do not carry over to another."""


class Launcher:
    """The part of `%engine` that starts and ends the notebook's engines."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session

    def start(self, options: StartOptions) -> None:
        """Join an engine that fits the options, or start one, and make it the default.

        Raises:
            UsageError: an engine that runs stands in the way; the message says what to do.
            Interrupted: the user interrupted the start; nothing of the engine is left.
            NBEngineError: the engine did not start.
        """
        config = EngineArgs.from_kwargs(options.arguments).create_engine_config(bound=False)
        self._session.bury()
        running = self._running()
        try:
            found = engine_to_join(options, config, running)
        except UsageError as refusal:
            raise UsageError(f"%engine start: {refusal}") from None
        if found is None:
            for info, differs in [] if options.new else idle_engines(running, config):
                print_quietly(
                    f"engine {info.name!r} holds {footprint(info)}, and nobody uses it: {differs or 'it does not differ'}. "
                    f"`%engine attach {info.name}`, and then `%engine load {config.model.model} …` replaces it, "
                    f"`%engine stop {info.name}` ends it"
                )
            self.launch(options)
            return
        engine = self._session.find(found.name)
        if engine is not None:
            print(f"engine {engine.name!r} runs already, with these arguments; {OTHERWISE}")
        else:
            engine = self.join(
                found.name, f"engine {found.name!r} runs already, with these arguments; {OTHERWISE}"
            )
            # The engine is what the line asks for, so the line's arguments count as given.
            engine.arguments |= options.arguments
            engine.configured = options.configured
        self._session.add(engine)
        if options.out is not None:
            self._shell.user_ns[options.out] = engine.client

    def join(self, name: str, note: str = "") -> AttachedEngine:
        """Become a client of an engine that runs; `note` is printed before the engine's capacity."""
        session = self._session
        parallel = find_engine(name).config.parallel
        with StartProgress(self._shell, f"attaching to {name}", parallel) as progress:
            client = session.backend.attach(name, session=session.key, progress=progress.update)
            engine = AttachedEngine(client, arguments_of(client.config))
            before = f"{note}\n" if note else ""
            progress.conclusion = f"{before}attached to engine {engine.name!r}: {capacity(engine)}"
        return engine

    def _running(self) -> Running:
        attached = [engine.client.connection for engine in self._session.engines]
        names = {info.name for info in attached}
        alive = [info for info in live_engines() if info.name not in names]
        own = self._session.ledger.among(alive)
        others = [info for info in alive if info.name not in {info.name for info in own}]
        return Running(attached, own, others, count_clients)

    def launch(self, options: StartOptions) -> None:
        """Start an engine, and make it the default.

        Raises:
            Interrupted: the user interrupted the start; nothing of the engine is left.
            NBEngineError: the engine did not start.
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
            engine = AttachedEngine(client, options.arguments, options.configured)
            session.add(engine)
            if options.out is not None:
                self._shell.user_ns[options.out] = client
            progress.conclusion = started_sentence(engine, time.monotonic() - began)

    def end(self, info: ConnectionInfo, end: Callable[[], None]) -> None:
        """End an engine with `end`, and print how much memory came back."""
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
        """Put another model in an engine's place, under its name: `%engine load MODEL`.

        The model's files are found first, while the old engine still runs; then that engine is ended, so that
        the new one has its memory. If the new one does not start, the old one is started again.
        """
        options = parse_start(words, "load")
        wanted = options.arguments.get("model")
        if wanted is None:
            raise UsageError("%engine load: which MODEL? An alias, a directory, a .gguf file or a hub id")
        engine = self._session.get(options.name)
        before = StartOptions(engine.name, None, present_arguments(engine), configured=engine.configured)
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
            configured = still_configured(engine, options)
            self.launch(StartOptions(engine.name, options.out, arguments, configured=configured))
        except Interrupted:
            raise Interrupted(
                f"load interrupted; no engine {engine.name!r} runs now: `%engine start {_model_of(before)} --name "
                f"{engine.name}` starts the previous one"
            ) from None
        except NBEngineError:
            self._restore(before, wanted)
            raise

    def _restore(self, before: StartOptions, wanted: str) -> None:
        """Start the engine that had to make room again, while the error of the other one is being raised."""
        print(f"{wanted} did not start; {_model_of(before)} is started again")
        try:
            self.launch(before)
        except NBEngineError as error:
            print(f"engine {before.name!r} is gone: {_model_of(before)} did not start again, either: {error}")


def carried_over(before: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments for another model: those of the one before that fit it, and those given.

    Returns:
        The arguments, and those that are left out, as "name=value".
    """
    of_before = [name for name in OF_THE_MODEL if name in before and name not in given]
    kept = {name: value for name, value in before.items() if name not in of_before}
    return {**kept, **given}, [f"{name}={before[name]!r}" for name in of_before]


def still_configured(engine: AttachedEngine, options: StartOptions) -> frozenset[str]:
    """Name the arguments that came from the notebook's configuration, and that the line does not give."""
    return engine.configured - options.arguments.keys()


def _model_of(options: StartOptions) -> str:
    return str(options.arguments.get("model", EngineArgs.model))
