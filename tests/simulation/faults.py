"""A seed draws faults of the world outside and their times; each excuses some ends."""

from __future__ import annotations

import random
import signal
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World

KINDS = ("clock", "files", "disk", "hold", "stop", "kill", "kill_at_call")
LONGEST = 60.0
FIRST_SECONDS = 10.0
"""Faults begin within this time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    `amount` is a number of seconds: the wall clock is stepped by them (`clock`), or for that time a process
    has no descriptors left (`files`), the disk is full (`disk`), something holds a process's interpreter lock
    (`hold`), or a process is stopped (`stop`). With `kill_at_call` the process is killed when it calls
    outside for the `number`th time.
    """

    kind: str
    at: float
    target: str
    amount: float = 0.0
    number: int = 0

    @property
    def end(self) -> float:
        """Return the time at which the fault is over."""
        return self.at + (self.amount if self.kind in ("files", "disk", "hold", "stop") else 0.0)


def draw_faults(draw: random.Random, targets: list[str], kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """Draw up to three faults, or none."""
    number = draw.choices((0, 1, 2, 3), (15, 45, 25, 15))[0] if kinds else 0
    return [_draw(draw, draw.choice(kinds), draw.choice(targets)) for _ in range(number)]


def _draw(draw: random.Random, kind: str, target: str) -> Fault:
    at = draw.random() * draw.choice((0.5, 3.0, FIRST_SECONDS))
    if kind == "clock":
        return Fault(kind, at, "", draw.choice((-1, 1)) * draw.choice((1.0, 2.5, 60.0, 3600.0)))
    if kind in ("files", "disk"):
        return Fault(kind, at, target, draw.uniform(0.2, 3.0))
    if kind in ("hold", "stop"):
        return Fault(kind, at, target, draw.choice((1.0, 3.0, 10.0, LONGEST)) * draw.uniform(0.5, 1.0))
    return Fault(kind, at, target, number=draw.randint(1, 150))


class Faults:
    """The faults of a world, and what has come of them."""

    def __init__(self, world: World, plan: list[Fault]) -> None:
        self.plan = plan
        self._world = world
        self.effects: Counter[tuple[str, str]] = Counter()
        """The number of calls that failed because of a fault, by kind and process."""
        self.hurt: set[str] = set()
        """Processes that had such a call."""
        self.stopped: dict[str, float] = {}
        """Until when a process was stopped, by name."""
        self.killed: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._deadly_calls = {(fault.target, fault.number) for fault in plan if fault.kind == "kill_at_call"}
        self.has_deadly_calls = bool(self._deadly_calls)
        for fault in plan:
            if fault.kind != "kill_at_call":
                world.hub.call_at(fault.at, self._begin, fault)

    @property
    def last_end(self) -> float:
        """Return the time at which the last fault is over."""
        return max((fault.end for fault in self.plan), default=0.0)

    def has(self, *kinds: str) -> bool:
        """Return whether there is a fault of one of these kinds."""
        return any(fault.kind in kinds for fault in self.plan)

    def note_effect(self, kind: str, process: Process) -> None:
        """Note that a call of a process has failed because of a fault."""
        self.effects[kind, process.role] += 1
        self.hurt.add(process.role)

    def on_call(self, process: Process, what: str) -> None:
        """Kill a process that calls outside for the `kill_at_call`th time, in a world that has deadly
        calls."""
        self._calls[process.role] += 1
        if (process.role, self._calls[process.role]) in self._deadly_calls:
            process.hub.say(f"fault: killed in {what}")
            self._kill(process)

    def _begin(self, fault: Fault) -> None:
        world = self._world
        hub = world.hub
        if fault.kind == "clock":
            hub.say(f"fault: the wall clock is stepped by {fault.amount:g} s")
            hub.wall_offset += fault.amount
            return
        if fault.kind == "disk":
            hub.say(f"fault: the disk is full for {fault.amount:g} s")
            world.disk_full_until = hub.now + fault.amount
            return
        process = world.running(fault.target)
        if process is None:
            return
        hub.say(f"fault: {fault.kind} {process} {fault.amount:g}")
        if fault.kind == "files":
            process.files_short_until = hub.now + fault.amount
            process.free_files = hub.random.choice((0, 0, 0, 1, 3))
        elif fault.kind == "hold":
            process.hold(fault.amount)
        elif fault.kind == "stop":
            until = hub.now + fault.amount
            self.stopped[process.role] = max(until, self.stopped.get(process.role, until))
            process.kill(signal.SIGSTOP)
            hub.call_later(fault.amount, process.kill, signal.SIGCONT)
        else:
            self._kill(process)

    def _kill(self, process: Process) -> None:
        self.killed.add(process.role)
        process.kill(signal.SIGKILL)
