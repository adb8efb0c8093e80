"""The command `nbengine`: models in the cache, and the engines that run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from nbengine.errors import NBEngineError
from nbengine.units import size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 for an error, 130 for an interrupt."""
    parser = _parser()
    options, further = parser.parse_known_args(arguments)
    if options.run is _fit:
        options.arguments = further
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    try:
        status: int = options.run(options)
    except NBEngineError as error:
        print(f"nbengine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe has had enough; nothing more can be written, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nbengine", description="Models and engines of nbengine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="put a model into the cache")
    fetch.add_argument(
        "model", nargs="?", default="smollm2-135m", help="alias, hub id, directory or .gguf file"
    )
    fetch.add_argument("--revision", help="branch, tag or commit on the hub")
    fetch.set_defaults(run=_fetch)
    fit = commands.add_parser("fit", help="tell whether a model fits on this machine", add_help=False)
    fit.set_defaults(run=_fit)
    ps = commands.add_parser("ps", help="list the engines")
    ps.set_defaults(run=_ps)
    stop = commands.add_parser("stop", help="end an engine and wait until it is gone")
    stop.add_argument("name")
    stop.add_argument("--drain", action="store_true", help="let it finish what runs")
    stop.add_argument(
        "--timeout", type=float, default=None, metavar="S", help="seconds before it is made to end"
    )
    stop.set_defaults(run=_stop)
    reap = commands.add_parser("reap", help="remove what dead engines have left")
    reap.add_argument("--unattached", action="store_true", help="also end engines that nobody is attached to")
    reap.set_defaults(run=_reap)
    logs = commands.add_parser("logs", help="show an engine's log")
    logs.add_argument("name")
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="how many lines (default 50)")
    logs.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="of the worker of this rank instead, counted through all engine cores",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the engine ends")
    logs.set_defaults(run=_logs)
    return parser


def _fetch(options: argparse.Namespace) -> int:
    from nbengine.config import ModelConfig
    from nbengine.frontend.progress_line import progress_line
    from nbengine.models.files import resolve_model

    with progress_line(f"{options.model}:", everywhere=True) as progress:
        config = resolve_model(ModelConfig(model=options.model, revision=options.revision), progress)
    weights_bytes = sum(os.path.getsize(path) for path in config.weights)
    print(f"{options.model}: {config.directory} ({size(weights_bytes)} of weights)")
    return 0


def _fit(options: argparse.Namespace) -> int:
    from IPython.core.error import UsageError

    from nbengine.config import EngineArgs
    from nbengine.frontend.fit import fit
    from nbengine.magics.arguments import HelpRequested
    from nbengine.magics.engines.arguments import parse_start

    try:
        asked = parse_start(options.arguments, "fit", prog="nbengine fit")
    except HelpRequested as request:
        print(request)
        return 0
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    report = fit(**{"model": EngineArgs.model, **asked.arguments})
    print(report)
    return 0 if report.fits else 1


def _ps(options: argparse.Namespace) -> int:
    del options
    from nbengine.client.directory import list_engines

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
    return 0


def _stop(options: argparse.Namespace) -> int:
    from nbengine.client.directory import STOP_TIMEOUT, find_engine, stop_engine

    info = find_engine(options.name)
    timeout = STOP_TIMEOUT if options.timeout is None else options.timeout
    stop_engine(info, drain=options.drain, timeout=timeout)
    print(f"{info.name} has ended")
    return 0


def _reap(options: argparse.Namespace) -> int:
    from nbengine.client.directory import reap

    report = reap(end_unattached=options.unattached)
    lines = [f"removed what was left of {name}" for name in report.dead]
    lines += [f"ended {name}" for name in report.ended]
    lines += [f"killed process {pid}" for pid in report.killed_pids]
    lines += [f"removed {path}" for path in report.removed_dirs]
    print("\n".join(lines) or "nothing to remove")
    return 0


def _logs(options: argparse.Namespace) -> int:
    from nbengine.client.logs import find_log, find_worker_log, follow_log
    from nbengine.engine.logs import log_tail

    path, info = find_log(options.name)
    if options.rank is not None:
        path = find_worker_log(path, options.rank)
    tail = log_tail(path, options.lines)
    if tail:
        print(tail, flush=True)
    if options.follow:
        for text in follow_log(path, info):
            print(text, end="", flush=True)
    return 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
