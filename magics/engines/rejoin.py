"""`%engine start` where engines run already: they must not pile up when a notebook is run again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from IPython.core.error import UsageError

from nbengine.config import EngineConfig
from nbengine.magics.engines.arguments import StartOptions, values_of
from nbengine.runtime.connection import ConnectionInfo, newest
from nbengine.runtime.directories import MARKER

_MOST_DIFFERENCES = 4
_NOT_COMPARED = ("keep_alive",)
"""Arguments that do not count: `keep_alive` is how long an engine waits for clients; no output needs it."""


@dataclass(frozen=True)
class Running:
    """The engines of this user that run on this machine, oldest first.

    `own` has those that this notebook was attached to before a restart of its kernel; the latest is the last.
    """

    attached: Sequence[ConnectionInfo]
    own: Sequence[ConnectionInfo]
    others: Sequence[ConnectionInfo]
    count_clients: Callable[[ConnectionInfo], int]


def engine_to_join(options: StartOptions, wanted: EngineConfig, running: Running) -> ConnectionInfo | None:
    """Find the engine that fits a start; None: another one has to be started.

    An engine of this notebook stands in the way if it differs from what is asked for, and so does an engine
    of another notebook that does not differ. A bound engine belongs to the program that has started it.

    Raises:
        UsageError: the user has to decide; the message says what differs, and what to do.
    """
    if options.new:
        return None
    mine = [*running.own, *running.attached]
    if options.name is not None:
        named = [info for info in (*mine, *running.others) if info.name == options.name]
        return _checked(named[-1], wanted, running) if named else None
    same = [info for info in mine if not differences(info, wanted)]
    if same:
        return same[-1]
    if mine:
        return _checked(mine[-1], wanted, running)
    same = [info for info in running.others if _may_be_shared(info) and not differences(info, wanted)]
    free = [info for info in same if not running.count_clients(info)]
    return free[-1] if free else _checked(same[-1], wanted, running) if same else None


def idle_engines(running: Running, wanted: EngineConfig) -> list[tuple[ConnectionInfo, str]]:
    """Find the engines that nobody uses, each with how it differs from an engine that is about to be started."""
    idle = [info for info in running.others if _may_be_shared(info) and not running.count_clients(info)]
    return [(info, _listed(differences(info, wanted))) for info in idle]


def differences(info: ConnectionInfo, wanted: EngineConfig) -> list[str]:
    """List the differences between an engine, as it runs now, and a configuration; empty if there is none."""
    there, here = values_of(newest(info).config), values_of(wanted)
    found = []
    path = Path(os.path.abspath(os.path.expanduser(wanted.model.model)))
    if path.exists():
        # A path is compared by its place, not by its spelling; an alias or a hub id is compared as a name.
        here["model"] = str(path)
        if str(path) in (info.config.model.directory, *info.config.model.weights):
            there["model"] = str(path)
            if _has_changed(info):
                found.append("the model's files have changed since it was started")
    names = [name for name in here if name not in _NOT_COMPARED and there[name] != here[name]]
    # The model comes first, since it matters most to users.
    names.sort(key=lambda name: name != "model")
    return [*found, *(f"{name} is {_shown(there[name])} there, {_shown(here[name])} here" for name in names)]


def _checked(info: ConnectionInfo, wanted: EngineConfig, running: Running) -> ConnectionInfo:
    """Return the engine; raise an error if it differs from what is wanted, or belongs to somebody else."""
    is_mine = info in running.attached or info in running.own
    name, found = info.name, differences(info, wanted)
    beside = "`%engine start --new`, or another --name, starts one beside it"
    if not is_mine and not _may_be_shared(info):
        raise UsageError(f"engine {name!r} is running already, and belongs to another program; {beside}")
    if found:
        join = "" if info in running.attached else f"`%engine attach {name}`, and then "
        load = f"`%engine load {wanted.model.model} …` replaces it, `%engine stop {name}` ends it"
        raise UsageError(
            f"engine {name!r} is running already, and differs: {_listed(found)}. {join}{load}; {beside}"
        )
    if not is_mine and running.count_clients(info):
        raise UsageError(
            f"engine {name!r} runs with the same arguments, and another notebook uses it: `%engine attach {name}` "
            f"joins it; {beside}"
        )
    return info


def _listed(found: list[str]) -> str:
    more = len(found) - _MOST_DIFFERENCES
    return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _may_be_shared(info: ConnectionInfo) -> bool:
    return info.is_here and not info.config.bound


def _has_changed(info: ConnectionInfo) -> bool:
    """Return whether weights were written after the engine's directory was made."""
    try:
        began = os.stat(os.path.join(info.run_dir, MARKER)).st_mtime
        return any(os.stat(path).st_mtime > began for path in info.config.model.weights)
    except OSError:
        return True


def _shown(value: object) -> str:
    return "not given" if value in (None, {}, ()) else str(value)
