"""`%engine serve` starts and ends servers, which put an engine behind HTTP for clients outside of the notebook."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.ipc.liveness import is_alive
from nbengine.magics.arguments import MagicParser, variable_name
from nbengine.magics.interrupts import Interrupted
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.runtime.connection import ConnectionInfo
from nbengine.server.arguments import add_server_arguments, settings_of
from nbengine.server.launch import start_server, stop_server
from nbengine.server.records import ServerRecord, servers_of, url_of
from nbengine.server.settings import ServerSettings

_DESCRIPTION = (
    "Put an engine behind HTTP, for the clients of OpenAI's and Anthropic's APIs: the server is a process of its own, "
    "a client of the engine like this notebook, and ends with the engine. The engine goes on while it is served, also "
    "without this notebook. A line that runs again finds the server that it has started."
)


class ServeCommand:
    """The command `serve` of `%engine`."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session
        self._started: dict[str, list[tuple[ServerSettings, ServerRecord]]] = {}
        """The servers that this notebook has started, with their settings, by the name of the engine."""
        session.on_engine_end.append(self._bury)

    def serve(self, words: Sequence[str]) -> None:
        """Start a server, or find the one that the same line has started, or end those of an engine."""
        parsed = _serve_parser().parse_words(words)
        engine = self._session.get(parsed.name)
        if parsed.stop:
            self._stop(engine)
            return
        settings = settings_of(vars(parsed))
        found = self._found(engine, settings)
        record = found or self._start(engine, settings)
        already = " already" if found else ""
        print(f"engine {engine.name!r} is served{already} as {record}; `%engine serve --stop` ends that")
        if parsed.out is not None:
            self._shell.user_ns[parsed.out] = record

    def _start(self, engine: AttachedEngine, settings: ServerSettings) -> ServerRecord:
        try:
            record = start_server(engine.client.connection, settings)
        except KeyboardInterrupt:
            raise Interrupted("the start of the server was interrupted; nothing of it is left") from None
        self._started.setdefault(engine.name, []).append((settings, record))
        return record

    def _found(self, engine: AttachedEngine, settings: ServerSettings) -> ServerRecord | None:
        """Return the server that a line with these settings has started: one of this notebook, or one at the same
        port of this machine that was started before a restart of the kernel."""
        for known, record in self._started.get(engine.name, ()):
            if known == settings and is_alive(record.process):
                return record
        if settings.api_keys or not settings.port:
            return None
        url = url_of(settings.host, settings.port)
        running = servers_of(engine.client.connection)
        return next((record for record in running if record.url == url and not record.wants_key), None)

    def _stop(self, engine: AttachedEngine) -> None:
        records = servers_of(engine.client.connection)
        if not records:
            raise UsageError(f"%engine serve --stop: engine {engine.name!r} has no server")
        started = self._started.pop(engine.name, ())
        patience = {record.pid: settings.drain_timeout for settings, record in started}
        for record in records:
            stop_server(record, drain_timeout=patience.get(record.pid, ServerSettings.drain_timeout))
            print(f"the server at {record.url} has ended; engine {engine.name!r} goes on")

    def _bury(self, info: ConnectionInfo) -> None:
        """Wait for the end of the servers of an engine that has ended."""
        for _, record in self._started.pop(info.name, ()):
            stop_server(record, drain_timeout=0)
            print(f"the server at {record.url} has ended, too")


def _serve_parser() -> MagicParser:
    parser = MagicParser("%engine serve", _DESCRIPTION)
    parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
    parser.add_argument(
        "-o",
        "--out",
        metavar="NAME",
        type=variable_name,
        help="bind the server's record, with its url, to a variable",
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the engine's servers, after the requests that run"
    )
    add_server_arguments(parser)
    return parser
