"""`%engine` starts, watches and ends engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from nbengine.client.engines.directory import find_engine, list_engines, reap, stop_engine
from nbengine.config import EngineArgs
from nbengine.errors import EngineDeadError, NBEngineError, did_you_mean
from nbengine.frontend.text.interpolate import interpolate
from nbengine.magics.answers.recover import RecoverCommands
from nbengine.magics.arguments import CALLER_ERRORS, HelpRequested, MagicParser, split_words
from nbengine.magics.config import NBEngine
from nbengine.magics.engines.arguments import StartOptions, parse_start, present_arguments, with_model
from nbengine.magics.engines.config import ConfigCommand
from nbengine.magics.engines.control import ControlCommands
from nbengine.magics.engines.fit import FitCommand
from nbengine.magics.engines.history import HistoryCommand
from nbengine.magics.engines.launching import Launcher, still_configured
from nbengine.magics.engines.logs import LogCommands
from nbengine.magics.engines.models import ModelsCommand
from nbengine.magics.engines.parallel import ParallelCommands
from nbengine.magics.engines.patience import told_if_slow
from nbengine.magics.engines.reports import (
    engines_table,
    reap_sentences,
    status_table,
)
from nbengine.magics.engines.serving import ServeCommand
from nbengine.magics.engines.watch import WatchCommand
from nbengine.magics.errors import without_traceback
from nbengine.magics.help import ENGINE_HELP, documented
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.session import AttachedEngine, NotebookSession, live_engines
from nbengine.runtime.other_protocols import other_engines
from nbengine.widgets.live import publish, publish_bundle
from nbengine.widgets.processes.tree import read_process_tree
from nbengine.widgets.words import seconds

STATUS_SECONDS = 1.5
"""Seconds that `%engine status` waits for engine cores which may be stuck."""


@magics_class
class EngineMagics(Magics):
    """The magic `%engine`, which starts, watches and ends the notebook's engines."""

    shell: InteractiveShell

    def __init__(
        self, shell: InteractiveShell, session: NotebookSession, config: NBEngine, recorder: Recorder
    ) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._launcher = Launcher(shell, session)
        self._commands: dict[str, Callable[[Sequence[str]], None]] = {
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "status": self._status,
            "ps": self._ps,
            "tree": self._tree,
            "attach": self._attach,
            "detach": self._detach,
            "logs": LogCommands(shell, session).logs,
            "history": HistoryCommand(shell, session).history,
            "watch": WatchCommand(shell, session).watch,
            "load": self._launcher.load,
            "serve": ServeCommand(shell, session).serve,
            "fit": FitCommand(shell, config).fit,
            "models": ModelsCommand(shell, config).models,
            "config": ConfigCommand(shell, session).config,
            "reap": self._reap,
            **ParallelCommands(shell, session).commands,
            **ControlCommands(session).commands,
            **RecoverCommands(shell, session, config, recorder, lambda: self._attach([])).commands,
            "help": self._help,
        }

    @property
    def command_names(self) -> list[str]:
        """List the words that may follow `%engine`."""
        return sorted(self._commands)

    def parser_of(self, command: str) -> MagicParser | None:
        """Find the parser of the words behind a command; None where the command takes none."""
        if command not in self._commands or command == "help":
            return None
        try:
            self._commands[command](["-h"])
        except HelpRequested as request:
            return request.parser
        return None

    @no_var_expand
    @line_magic
    @documented(ENGINE_HELP)
    def engine(self, line: str) -> None:
        """Start, watch and end engines."""
        __tracebackhide__ = True
        namespace = prompt_namespace(self.shell)
        words = [interpolate(word, namespace) for word in split_words(line, "%engine")]
        command, rest = (words[0], words[1:]) if words else ("help", [])
        if command in ("-h", "--help"):
            command = "help"
        if command not in self._commands:
            raise UsageError(
                f"%engine: no command {command!r}{did_you_mean(command, self._commands)} (%engine help lists them)"
            )
        try:
            self._commands[command](rest)
        except HelpRequested as request:
            print(request)
        except CALLER_ERRORS as error:
            raise UsageError(f"%engine {command}: {error}") from None
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__

    def _start(self, words: Sequence[str]) -> None:
        options = parse_start(words)
        self._launcher.start(with_model(options, self._config.model))

    def _stop(self, words: Sequence[str]) -> None:
        parser = _parser("stop", "End an engine and wait until its processes are gone.")
        parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
        parser.add_argument("--drain", action="store_true", help="let the requests that run finish first")
        parsed = parser.parse_words(words)
        live = {info.name: info for info in live_engines()}
        attached = self._session.find(parsed.name) if parsed.name else self._session.get()
        if attached is not None:
            with told_if_slow(attached.client, "ends"):
                self._launcher.end(
                    attached.client.connection, lambda: self._session.stop(attached, drain=parsed.drain)
                )
        elif parsed.name in live:
            info = live[parsed.name]
            self._launcher.end(info, lambda: stop_engine(info, drain=parsed.drain))
        else:
            self._session.get(parsed.name)

    def _restart(self, words: Sequence[str]) -> None:
        options = parse_start(words, "restart")
        engine = self._session.get(options.name)
        arguments = {**present_arguments(engine), **options.arguments}
        EngineArgs.from_kwargs(arguments).create_engine_config(bound=False)
        self._launcher.end(engine.client.connection, lambda: self._session.stop(engine))
        configured = still_configured(engine, options)
        self._launcher.launch(StartOptions(engine.name, options.out, arguments, configured=configured))

    def _status(self, words: Sequence[str]) -> None:
        parser = _parser("status", "Show an engine's topology, requests, KV blocks and prefix cache.")
        parser.add_argument("name", nargs="?", help="engine (default: all of this notebook)")
        name = parser.parse_words(words).name
        attached = self._session.engines
        default = self._session.default
        engines = [self._session.get(name)] if name or not attached else attached
        # All at once: several that are stuck keep nobody waiting for longer than one does.
        with ThreadPoolExecutor(len(engines), "nbengine-status") as pool:
            asked = [pool.submit(engine.client.stats_within, STATUS_SECONDS) for engine in engines]
        for engine, answer in zip(engines, asked, strict=True):
            try:
                stats, silent = answer.result()
            except EngineDeadError:
                self._session.drop(engine)
                raise
            publish(self.shell, *status_table(engine, stats, silent, is_default=engine is default))

    def _ps(self, words: Sequence[str]) -> None:
        _parser("ps", "List all engines of yours on this machine.").parse_words(words)
        here = {engine.name: "attached" for engine in self._session.engines}
        if self._session.default is not None:
            here[self._session.default.name] = "default"
        engines = list_engines()
        others = [other.note for other in other_engines() if other.may_live]
        if engines:
            publish(self.shell, *engines_table(engines, here))
        if others:
            print("\n".join(others))
        if not (engines or others):
            print("no engine runs on this machine; `%engine start` starts one")

    def _tree(self, words: Sequence[str]) -> None:
        parser = _parser("tree", "Show an engine's processes as they are now, and their connections.")
        parser.add_argument("name", nargs="?", help="engine, also one that this notebook is not attached to")
        name = parser.parse_words(words).name
        engine = self._session.find(name) if name else self._session.get()
        info = find_engine(name or "") if engine is None else engine.client.connection
        publish_bundle(self.shell, read_process_tree(info, attached=engine is not None).bundle())

    def _attach(self, words: Sequence[str]) -> None:
        parser = _parser(
            "attach",
            "Join an engine that runs: the one given, else this notebook's own from before a restart of its kernel, "
            "else the only one there is.",
        )
        parser.add_argument("name", nargs="?", help="name of the engine, or path of its connection file")
        for name in self._candidates(parser.parse_words(words).name):
            attached = self._session.find(name)
            if attached is not None:
                print(f"engine {name!r} is attached already; it is the default now")
            self._session.add(attached or self._launcher.join(name))

    def _candidates(self, name: str | None) -> list[str]:
        if name is not None:
            try:
                return [find_engine(name).name]
            except NBEngineError as error:
                raise UsageError(f"%engine attach: {error}") from None
        alive = live_engines()
        own = self._session.ledger.among(alive)
        if own or len(alive) == 1:
            return [info.name for info in own or alive]
        if not alive:
            raise UsageError("%engine attach: no engine runs on this machine; `%engine start` starts one")
        raise UsageError(f"%engine attach: which one? These run: {', '.join(info.name for info in alive)}")

    def _detach(self, words: Sequence[str]) -> None:
        parser = _parser("detach", "Leave an engine running without this notebook.")
        parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
        engine = self._session.get(parser.parse_words(words).name)
        self._session.detach(engine)
        print(farewell([engine]))

    def _reap(self, words: Sequence[str]) -> None:
        parser = _parser("reap", "Clean up after engines that have died.")
        parser.add_argument("--all", action="store_true", help="also end engines that nobody is attached to")
        print(reap_sentences(reap(end_unattached=parser.parse_words(words).all)))

    def _help(self, words: Sequence[str]) -> None:
        if not words or words[0] in ("help", "-h", "--help"):
            print(ENGINE_HELP)
        elif words[0] in self._commands:
            self._commands[words[0]](["-h"])
        else:
            raise UsageError(f"%engine help: no command {words[0]!r}{did_you_mean(words[0], self._commands)}")


def farewell(engines: Sequence[AttachedEngine]) -> str:
    """Say what becomes of the engines that the notebook leaves, one line each."""
    return "\n".join(
        f"engine {engine.name!r} goes on without this notebook; it ends when nobody has attached for "
        f"{seconds(engine.client.config.keep_alive)} (`%engine attach {engine.name}` joins it again)"
        for engine in engines
    )


def _parser(command: str, description: str) -> MagicParser:
    return MagicParser(f"%engine {command}", description)
