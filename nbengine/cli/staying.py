"""`nbengine start` and `nbengine attach`: engines that stay when the command ends, and a view of what one does."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from nbengine.config import EngineArgs
from nbengine.errors import EngineDeadError, InvalidArgumentError, NBEngineError, did_you_mean, shown
from nbengine.frontend.async_llm import AsyncLLM
from nbengine.frontend.progress_line import progress_line
from nbengine.ipc.shortage import raise_file_limit
from nbengine.magics.engines.arguments import StartOptions
from nbengine.metrics.stats import EngineStats
from nbengine.units import size
from nbengine.widgets.words import count, seconds

KEEP_ALIVE = 24 * 3600.0
"""Seconds that an engine started from a shell waits for somebody: no notebook holds it from the beginning."""


def start(options: StartOptions) -> int:
    """Start an engine, say how to use and to end it, and leave it.

    Raises:
        NBEngineError: it did not start.
    """
    raise_file_limit()
    arguments = {"model": EngineArgs.model, "keep_alive": KEEP_ALIVE, **options.arguments}
    engine_args = EngineArgs.from_kwargs(arguments, "nbengine start")
    with progress_line(f"{engine_args.model}:", everywhere=True) as progress:
        llm = AsyncLLM.from_engine_args(engine_args, name=options.name, bound=False, progress=progress)
    name, ready = llm.name, llm.ready
    cache = f"KV cache {count(ready.num_blocks, 'block')} ({size(ready.kv_cache_bytes)})"
    print(
        f"engine {name!r} is ready on {ready.device} {ready.dtype}: {cache}, "
        f"context {count(ready.max_model_len, 'token')}"
    )
    print(f"  nbengine chat --engine {name}   talks to it; `%engine attach {name}` in a notebook")
    print(f"  nbengine stop {name}            ends it")
    print(f"It ends by itself when nobody has been attached for {seconds(engine_args.keep_alive)}.")
    llm.detach()
    return 0


def join(name: str | None) -> AsyncLLM:
    """Attach to the engine called `name`, or to the only one that runs.

    Raises:
        NBEngineError: none runs, or several do, or it cannot be reached.
    """
    raise_file_limit()
    names = running_engines()
    if name is None:
        if not names:
            raise NBEngineError("no engine runs; `nbengine start` starts one")
        if len(names) > 1:
            raise InvalidArgumentError("the engine", None, f"named, because several run: {', '.join(names)}")
        (name,) = names
    elif name not in names and not name.endswith(".json"):
        known = f" (these run: {', '.join(names)})" if names else ""
        raise NBEngineError(f"no engine {shown(name)} runs{did_you_mean(name, names)}{known}")
    with progress_line(f"{name}:") as progress:
        return AsyncLLM.attach(name, progress=progress)


@contextmanager
def chat_engine(name: str | None, options: StartOptions) -> Iterator[AsyncLLM]:
    """Give the engine to talk to: the one called `name`, or one of the options' model that ends with the talk.

    Without a name, model and flags it is the only engine that runs, if there is one.

    Raises:
        InvalidArgumentError: both a running engine and what to start are given.
        NBEngineError: it cannot be reached, or did not start.
    """
    is_new = bool(options.arguments or options.name)
    if name is not None and is_new:
        raise InvalidArgumentError("--engine", name, "given without MODEL and the flags of a new engine")
    if name is not None or (not is_new and len(running_engines()) == 1):
        llm = join(name)
        try:
            yield llm
        finally:
            llm.detach()
        return
    raise_file_limit()
    engine_args = EngineArgs.from_kwargs({"model": EngineArgs.model, **options.arguments}, "nbengine chat")
    with progress_line(f"{engine_args.model}:") as progress:
        llm = AsyncLLM.from_engine_args(engine_args, name=options.name, progress=progress)
    try:
        yield llm
    finally:
        llm.shutdown()


def running_engines() -> list[str]:
    """List the names of the engines that run."""
    from nbengine.client.engines.directory import list_engines

    return [engine.info.name for engine in list_engines() if engine.pids]


@dataclass
class Flow:
    """The tokens per second between two snapshots of an engine's statistics."""

    tokens: int | None = None
    time: float = 0.0

    def rate(self, stats: EngineStats) -> float | None:
        """Take a snapshot, and return the tokens per second since the one before; None for the first."""
        tokens = sum(core.num_generation_tokens for core in stats.engines)
        before, since = self.tokens, stats.timestamp - self.time
        self.tokens, self.time = tokens, stats.timestamp
        if before is None or since <= 0:
            return None
        return max(0, tokens - before) / since


def attach(name: str | None, interval: float) -> int:
    """Be a client of an engine, which keeps it alive, and show what it does until it ends or somebody interrupts.

    Raises:
        NBEngineError: there is no such engine, or it has ended.
    """
    llm = join(name)
    flow = Flow()
    with _line() as show:
        try:
            show(
                f"attached to engine {llm.name!r} ({llm.config.model.model}); Ctrl-C leaves it running",
                stays=True,
            )
            while True:
                stats = llm.stats_blocking()
                show(_line_of(stats, flow.rate(stats)))
                time.sleep(interval)
        except KeyboardInterrupt:
            show(f"engine {llm.name!r} goes on without this terminal", stays=True)
            llm.detach()
            return 0
        except EngineDeadError as error:
            raise NBEngineError(f"engine {llm.name!r} has ended: {error.cause}") from error


def _line_of(stats: EngineStats, rate: float | None) -> str:
    """Say in one line what an engine does."""
    cores = stats.engines
    running, waiting = (
        sum(core.num_running_reqs for core in cores),
        sum(core.num_waiting_reqs for core in cores),
    )
    blocks, free = sum(core.num_blocks for core in cores), sum(core.num_free_blocks for core in cores)
    parts = [
        f"{running} running",
        f"{waiting} waiting",
        f"{'-' if rate is None else f'{rate:,.0f}'} tokens/s",
    ]
    if blocks:
        parts.append(f"KV cache {(blocks - free) / blocks:.0%}")
    if all(core.is_sleeping for core in cores):
        parts.append("asleep")
    elif any(core.is_paused for core in cores):
        parts.append("paused")
    return " · ".join(parts)


class _Shown(Protocol):
    def __call__(self, text: str, *, stays: bool = False) -> None: ...


@contextmanager
def _line() -> Iterator[_Shown]:
    """Give what shows a text: in a terminal in place of the one before unless that one stays, else as a line of its
    own where it differs."""
    out, last = sys.stdout, ""
    is_terminal = out.isatty()

    def show(text: str, *, stays: bool = False) -> None:
        nonlocal last
        if is_terminal:
            room = shutil.get_terminal_size().columns - 1
            out.write("\r\x1b[K" + (f"{text}\n" if stays else text[:room]))
        elif text != last:
            out.write(f"{text}\n")
        last = text
        out.flush()

    try:
        yield show
    finally:
        if is_terminal:
            out.write("\r\x1b[K")
            out.flush()
