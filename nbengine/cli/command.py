"""The command `nbengine`: models in the cache, and the engines that run."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from nbengine.errors import EngineDeadError, InvalidArgumentError, NBEngineError, quoted
from nbengine.units import size
from nbengine.version import __version__

if TYPE_CHECKING:
    from nbengine.server.settings import ServerSettings

T = TypeVar("T")
_LONGEST_COMPLAINT = 500


class _Parser(argparse.ArgumentParser):
    """A parser that says on one line of bounded length what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        text = message if message.isprintable() else quoted(message, _LONGEST_COMPLAINT)
        cut = text if len(text) <= _LONGEST_COMPLAINT else text[: _LONGEST_COMPLAINT - 1] + "…"
        self.exit(2, f"{self.prog}: error: {cut}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 for an error, 2 for a wrong argument, 130 for an
    interrupt."""
    parser = _parser()
    options, further = parser.parse_known_args(arguments)
    if options.run in (_fit, _serve, _start, _chat):
        options.arguments = further
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except NBEngineError as error:
        print(f"nbengine: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the pipe has closed it.
        _close_output()
        return 0
    except OSError as error:
        # The disk to which the output goes is full, for instance.
        print(f"nbengine: {error}", file=sys.stderr)
        _close_output()
        return 1
    return status


def _close_output() -> None:
    """Replace standard output with the null device, so that flushing it at exit does not fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nbengine", description="Models and engines of nbengine.")
    parser.add_argument("--version", action="version", version=f"nbengine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="put a model into the cache")
    fetch.add_argument(
        "model", nargs="?", default="smollm2-135m", help="alias, hub id, directory or .gguf file"
    )
    fetch.add_argument("--revision", help="branch, tag or commit on the hub")
    fetch.set_defaults(run=_fetch)
    models = commands.add_parser("models", help="list the models that are here, and those worth fetching")
    models.add_argument(
        "--dir",
        action="append",
        default=[],
        metavar="DIR",
        help="also look for models in a directory; repeatable",
    )
    models.add_argument("--classes", action="store_true", help="list the classes that run instead")
    models.set_defaults(run=_models)
    fit = commands.add_parser("fit", help="tell whether a model fits on this machine", add_help=False)
    fit.set_defaults(run=_fit)
    start = commands.add_parser("start", help="start an engine that stays", add_help=False)
    start.set_defaults(run=_start)
    chat = commands.add_parser("chat", help="talk to a model in this terminal", add_help=False)
    chat.set_defaults(run=_chat)
    attach = commands.add_parser("attach", help="show what an engine does, and keep it alive meanwhile")
    attach.add_argument("name", nargs="?", help="engine, or its connection file (default: the only one)")
    attach.add_argument("--chat", action="store_true", help="talk to it instead")
    attach.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (default 1)"
    )
    attach.set_defaults(run=_attach)
    serve = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI's API", add_help=False)
    serve.set_defaults(run=_serve)
    ps = commands.add_parser("ps", help="list the engines")
    ps.set_defaults(run=_ps)
    stop = commands.add_parser("stop", help="end an engine and wait until it is gone")
    stop.add_argument("name")
    stop.add_argument("--drain", action="store_true", help="let the requests that run finish first")
    stop.add_argument(
        "--timeout", type=_seconds, default=None, metavar="S", help="seconds to wait before it is terminated"
    )
    stop.set_defaults(run=_stop)
    reap = commands.add_parser("reap", help="remove what dead engines have left")
    reap.add_argument("--unattached", action="store_true", help="also end engines that nobody is attached to")
    reap.set_defaults(run=_reap)
    logs = commands.add_parser("logs", help="show an engine's log")
    logs.add_argument("name")
    logs.add_argument(
        "-n", "--lines", type=_count, default=50, metavar="N", help="number of lines (default 50)"
    )
    logs.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="show the log of the worker of this rank instead; ranks count through all engine cores",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="show new lines until the engine ends")
    logs.set_defaults(run=_logs)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {quoted(text)}")
    return seconds


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {quoted(text)}")
    return number


def _fetch(options: argparse.Namespace) -> int:
    from nbengine.config import EngineArgs
    from nbengine.frontend.progress_line import progress_line
    from nbengine.models.checkpoints.files import resolve_model

    asked = EngineArgs(model=options.model, revision=options.revision).create_engine_config(bound=True)
    with progress_line(f"{options.model}:", everywhere=True) as progress:
        config = resolve_model(asked.model, progress)
    weights_bytes = sum(os.path.getsize(path) for path in config.weights)
    print(f"{options.model}: {config.directory} ({size(weights_bytes)} of weights)")
    return 0


def _models(options: argparse.Namespace) -> int:
    from nbengine.frontend.catalogue import classes_table, models_report, named_directories

    if options.classes:
        print(classes_table()[0])
        return 0
    print(models_report([*named_directories(), *options.dir]))
    return 0


def _start(options: argparse.Namespace) -> int:
    from nbengine.cli.staying import start
    from nbengine.magics.engines.arguments import parse_start

    asked = _read(lambda: parse_start(options.arguments, "start", prog="nbengine start"))
    return asked if isinstance(asked, int) else start(asked)


def _attach(options: argparse.Namespace) -> int:
    from nbengine.cli.staying import attach, join

    if not options.chat:
        return attach(options.name, options.interval)
    from nbengine.cli.chatting import talk

    llm = join(options.name)
    try:
        return talk(llm, None)
    finally:
        llm.detach()


def _chat(options: argparse.Namespace) -> int:
    from nbengine.cli.chatting import talk
    from nbengine.cli.staying import chat_engine
    from nbengine.magics.engines.arguments import start_options, start_parser

    parser = start_parser("chat", "nbengine chat")
    parser.add_argument("--engine", metavar="NAME", help="talk to this engine, which goes on afterwards")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parsed = _read(lambda: vars(parser.parse_words(options.arguments)))
    if isinstance(parsed, int):
        return parsed
    asked = _read(lambda: start_options(parsed, "nbengine chat"))
    if isinstance(asked, int):
        return asked
    with chat_engine(parsed["engine"], asked) as llm:
        return talk(llm, parsed["system"])


def _read(parse: Callable[[], T]) -> T | int:
    """Return what `parse` gives, or the exit status after help was shown or a mistake was told."""
    from IPython.core.error import UsageError

    from nbengine.magics.arguments import HelpRequested

    try:
        return parse()
    except HelpRequested as request:
        print(request)
        return 0
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2


def _fit(options: argparse.Namespace) -> int:
    from nbengine.config import EngineArgs
    from nbengine.frontend.fit import fit
    from nbengine.magics.engines.arguments import parse_start

    asked = _read(lambda: parse_start(options.arguments, "fit", prog="nbengine fit"))
    if isinstance(asked, int):
        return asked
    report = fit(**{"model": EngineArgs.model, **asked.arguments})
    print(report)
    return 0 if report.fits else 1


def _serve(options: argparse.Namespace) -> int:
    # A key on the command line is not to be seen in the list of processes.
    from setproctitle import setproctitle

    setproctitle("nbengine: serve")
    from nbengine.magics.engines.arguments import start_options, start_parser
    from nbengine.server.arguments import KEY_VARIABLE, add_server_arguments, settings_of
    from nbengine.server.launch import check_installed

    parser = start_parser("serve", "nbengine serve")
    add_server_arguments(parser)
    parsed = _read(lambda: vars(parser.parse_words(options.arguments)))
    if isinstance(parsed, int):
        return parsed
    asked = _read(lambda: start_options(parsed, "nbengine serve"))
    if isinstance(asked, int):
        return asked
    check_installed()
    settings = settings_of(parsed)
    # The engine's processes need not know the key.
    os.environ.pop(KEY_VARIABLE, None)
    return _serve_engine(settings, asked.name, asked.arguments)


def _serve_engine(settings: ServerSettings, name: str | None, arguments: dict[str, Any]) -> int:
    from nbengine.config import EngineArgs
    from nbengine.frontend.async_llm import AsyncLLM
    from nbengine.frontend.progress_line import progress_line
    from nbengine.ipc.shortage import raise_file_limit
    from nbengine.runtime.logs import configure_logging
    from nbengine.server.process import end_line, serve
    from nbengine.server.records import ServerRecord

    engine_args = EngineArgs.from_kwargs({"model": EngineArgs.model, **arguments}, "nbengine serve")
    configure_logging("server")
    raise_file_limit()

    def start() -> AsyncLLM:
        with progress_line(f"{engine_args.model}:", everywhere=True) as progress:
            return AsyncLLM.from_engine_args(engine_args, name=name, progress=progress)

    def on_ready(record: ServerRecord) -> None:
        print(f"serving {record}", flush=True)

    try:
        serve(settings, start, on_ready, ends_engine=True)
    except EngineDeadError as error:
        raise NBEngineError(end_line(error)) from error
    return 0


def _ps(options: argparse.Namespace) -> int:
    del options
    from nbengine.client.engines.directory import list_engines
    from nbengine.runtime.other_protocols import other_engines

    rows = [("NAME", "STATE", "PID", "CLIENTS", "PROCESSES", "MEMORY", "UP", "MODEL")]
    for engine in list_engines():
        info = engine.info
        up = _duration(time.time() - info.created) if engine.pids else "-"
        pid, model = str(info.host_pid), info.config.model.model
        clients, processes, memory = str(engine.num_clients), str(len(engine.pids)), size(engine.memory_bytes)
        rows.append((info.name, engine.state, pid, clients, processes, memory, up, model))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for other in other_engines():
        if other.may_live:
            print(other.note)
    return 0


def _stop(options: argparse.Namespace) -> int:
    from nbengine.client.engines.directory import STOP_TIMEOUT, find_engine, stop_engine

    info = find_engine(options.name)
    timeout = STOP_TIMEOUT if options.timeout is None else options.timeout
    stop_engine(info, drain=options.drain, timeout=timeout)
    print(f"{info.name} has ended")
    return 0


def _reap(options: argparse.Namespace) -> int:
    from nbengine.client.engines.directory import reap

    report = reap(end_unattached=options.unattached)
    lines = [f"removed what was left of {name}" for name in report.dead]
    lines += [f"ended {name}" for name in report.ended]
    lines += [f"killed process {pid}" for pid in report.killed_pids]
    lines += [f"removed {path}" for path in report.removed_dirs]
    print("\n".join(lines) or "nothing to remove")
    return 0


def _logs(options: argparse.Namespace) -> int:
    from nbengine.client.engines.logs import find_log, find_worker_log, follow_log
    from nbengine.runtime.logs import log_end, log_size

    path, info = find_log(options.name)
    if options.rank is not None:
        path = find_worker_log(path, options.rank)
    # What is written while the end is shown belongs to what follows.
    size = log_size(path)
    tail = log_end(path, options.lines, size)
    if tail:
        print(tail, flush=True)
    if options.follow:
        for text in follow_log(path, info, size):
            print(text, end="", flush=True)
    return 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
