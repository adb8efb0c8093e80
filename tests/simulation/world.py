"""A world: one machine, one engine, some users, and the faults that a seed has drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbengine.config import EngineArgs, EngineConfig
from nbengine.engine import __main__ as engine_main
from nbengine.ipc import liveness
from tests.simulation import state
from tests.simulation.faults import KINDS, Fault, Faults, draw_faults
from tests.simulation.hub import Hub, Violation, drop_idle_greenlets
from tests.simulation.invariants import Judge
from tests.simulation.network import Network
from tests.simulation.processes import Process, descriptor_numbers
from tests.simulation.substitutes import installed
from tests.simulation.users import User, UserPlan, draw_user
from tests.tools.scratch import shared_memory_prefix

PATIENCE = 150.0
"""Every user must have finished this many seconds after the last fault."""
AFTERWARDS = 90.0
"""Nothing may be left this many seconds after the last user: an engine waits 60 s for its first client."""
FIRST_PID = 100
SEEDS_A_COLLECTION = 5
"""The garbage of more worlds does not stay in a CPU's cache, and takes longer to collect."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The plan that a seed has drawn."""

    lease: float
    keep_alive: float
    bound: bool
    ranks: int
    users: tuple[UserPlan, ...]
    faults: tuple[Fault, ...]
    network_delay: float
    thread_delay: float
    long_delay: float
    preemption: float
    step_time: float
    """Seconds that a step takes at most."""
    handler_time: float
    """Seconds that a user takes at most to handle some outputs, on the loop's thread."""


def draw_plan(seed: int, kinds: tuple[str, ...] = KINDS) -> Plan:
    """Draw a world."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 1, 2))
    users = [draw_user(draw, owner=True, ranks=ranks)]
    users += [draw_user(draw, owner=False, ranks=ranks) for _ in range(draw.choice((0, 0, 1, 2)))]
    targets = ["host", *(f"core{rank}" for rank in range(ranks))]
    targets += 2 * [f"client{index}" for index in range(len(users))]
    return Plan(
        lease=draw.choice((2.0, 4.0, 30.0)),
        keep_alive=draw.choice((0.0, 1.0, 5.0)),
        bound=draw.random() < 0.6,
        ranks=ranks,
        users=tuple(users),
        faults=tuple(draw_faults(draw, targets, kinds)),
        network_delay=draw.choice((50e-6, 500e-6, 5e-3)),
        thread_delay=draw.choice((10e-6, 200e-6, 2e-3)),
        long_delay=draw.choice((0.0, 0.0, 0.05, 0.5)),
        preemption=draw.choice((0.0, 0.0, 0.02, 0.2)),
        step_time=draw.choice((0.01, 0.1, 0.5)),
        handler_time=draw.choice((0.0, 0.0, 0.001, 0.05)),
    )


@functools.cache
def _config(bound: bool, lease: float, keep_alive: float, ranks: int) -> EngineConfig:
    arguments = EngineArgs(
        model="random-tiny",
        lease=lease,
        keep_alive=keep_alive,
        data_parallel_size=ranks,
        num_gpu_blocks_override=16,
        max_model_len=64,
        distributed_executor_backend="tests.simulation.executor:SimExecutor",
    )
    return arguments.create_engine_config(bound=bound)


class World:
    """Runs one seed."""

    def __init__(
        self, seed: int, plan: Plan | None = None, *, trace: Callable[[str], None] | None = None
    ) -> None:
        self.seed = seed
        self.plan = plan or draw_plan(seed)
        self.hub = Hub(seed)
        if trace is not None:
            # The directory's name is another one in every run.
            self.hub.trace = lambda line: trace(line.replace(str(self.directory), "…"))
        self.network = Network(self.hub.random.random)
        self.secrets = random.Random(seed + 1)
        self._durations = random.Random(seed + 2)
        self.processes: dict[int, Process] = {}
        self.descriptor_numbers = descriptor_numbers()
        self.disk_full_until = 0.0
        self.over = False
        self._next_pid = FIRST_PID
        self._num_cores: dict[int, int] = {}
        self.directory = Path()
        self.config = _config(self.plan.bound, self.plan.lease, self.plan.keep_alive, self.plan.ranks)
        self.users = [User(self, f"client{index}", plan) for index, plan in enumerate(self.plan.users)]
        self._apply_delays()
        self.faults = Faults(self, list(self.plan.faults))
        self.judge = Judge(self)

    def _apply_delays(self) -> None:
        plan = self.plan
        self.hub.delay, self.hub.preemption = plan.thread_delay, plan.preemption
        self.network.delay = plan.network_delay
        if plan.long_delay:
            self.hub.long_delay, self.hub.long_delay_chance = plan.long_delay, 0.02
            self.network.long_delay, self.network.long_delay_chance = plan.long_delay, 0.02

    def run(self) -> None:
        """Run to the end; everything outside is to be substituted (`installed`).

        Raises:
            Violation: something happened that never may.
        """
        self.directory = Path(tempfile.mkdtemp(prefix=shared_memory_prefix(), dir=_shared_memory()))
        state.enter(self)
        try:
            self._run()
        finally:
            self.over = True
            self.hub.close()
            state.leave()
            for process in self.processes.values():
                for number in process.real_files:
                    os.close(number)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self) -> None:
        hub = self.hub
        for name in ("run", "shm"):
            (self.directory / name).mkdir()
        for user in self.users:
            process = self._new_process(None, ["python", user.name])
            process.role = user.name
            process.environment = {
                "NBENGINE_RUNTIME_DIR": str(self.directory / "run"),
                "XDG_RUNTIME_DIR": str(self.directory),
            }
            user.process = process
            process.start(user.run)
        hub.run(self.faults.last_end + PATIENCE)
        self._raise()
        for user in self.users:
            assert user.process is not None
            if user.process.status is None:
                raise Violation(f"{user.name} does not get on: it is {user.doing}")
        if self._runs("host", "core"):
            hub.run(hub.now + AFTERWARDS + self.plan.keep_alive)
        # What is under way arrives.
        hub.run(hub.now + 3.0)
        self._raise()
        self.judge.at_the_end()
        self._raise()

    def _raise(self) -> None:
        if self.hub.failure is not None:
            raise self.hub.failure

    def _runs(self, *roles: str) -> bool:
        return any(
            process.role.startswith(roles) and process.status is None for process in self.processes.values()
        )

    # Processes.

    def _new_process(self, parent: Process | None, argv: list[str]) -> Process:
        pid, self._next_pid = self._next_pid, self._next_pid + 1
        process = self.processes[pid] = Process(self, pid, parent, argv)
        return process

    def start_process(
        self,
        parent: Process,
        argv: list[str],
        environment: dict[str, str],
        *,
        new_session: bool,
        new_group: bool,
        pass_fds: tuple[int, ...],
    ) -> Process:
        """Start a process, as `fork` and `exec` would."""
        process = self._new_process(parent, argv)
        if not new_session:
            process.session = parent.session
            if not new_group:
                process.group = parent.group
        process.environment = environment
        for number in pass_fds:
            thing = parent.descriptors[number]
            thing.references += 1
            process.descriptors[number] = thing
        role, *arguments = argv[argv.index("nbengine.engine") + 1 :]
        process.role = role if role == "host" else f"{role}{arguments[1]}"
        process.handlers[signal.SIGINT] = signal.SIG_IGN
        self.hub.say(f"starts {process}")
        if role == "host":
            process.start(lambda _: engine_main._host(arguments[0]))
        else:
            process.start(lambda _: engine_main._core(arguments[0], int(arguments[1])))
        return process

    def running(self, role: str) -> Process | None:
        """The process that runs in a role, the newest if there are several."""
        found = [
            process for process in self.processes.values() if process.role == role and process.status is None
        ]
        return found[-1] if found else None

    @property
    def engine(self) -> list[Process]:
        """The processes that the engine has had, the host and its cores."""
        return [process for process in self.processes.values() if process.role.startswith(("host", "core"))]

    @property
    def owner_is_gone(self) -> bool:
        """Return whether the process that has started the engine has ended."""
        owner = self.users[0].process
        return owner is not None and owner.status is not None

    def on_end(self, process: Process) -> None:
        """Note that a process has ended: perhaps the last of the users, or of all."""
        if not self._runs("client" if process.role.startswith("client") else ""):
            self.hub.stopped = True

    def on_uncaught(self, process: Process, error: Exception) -> None:
        """Note that an exception has ended a process."""
        self.hub.say(f"uncaught in {process}: {error!r}")
        # A core finds nothing of an engine whose host was killed before it began.
        host_is_gone = process.role.startswith("core") and self.running("host") is None
        if process.role not in self.faults.hurt and not host_is_gone:
            self.hub.fail(f"an exception ended {process}: {error!r}", error)

    def pass_time(self, what: str) -> None:
        """Let time pass, because the model works, or a user."""
        longest = {
            "load": 1.0,
            "step": self.plan.step_time,
            "unload": 0.2,
            "handle": self.plan.handler_time,
        }[what]
        if longest:
            self.hub.sleep(longest * self._durations.random())

    def engine_files(self) -> list[str]:
        """Directories and files of the engine that are there."""
        places = (("", "nbe-", ""), ("shm", "", ""), ("run", "nbengine-", ".json"))
        return [
            os.path.join(self.directory, place, name)
            for place, beginning, end in places
            for name in os.listdir(os.path.join(self.directory, place))
            if name.startswith(beginning) and name.endswith(end)
        ]


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Recorder:
    """The trace of a run, and a digest of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def _on_unraisable(what: Any) -> None:
    """An exception has escaped a finalizer; when a world ends its threads are cut off anywhere, and that is no matter."""
    if state.is_running():
        state.hub().fail(f"an exception escaped {what.object!r}: {what.exc_value!r}", what.exc_value)


def _ask_what_is_asked_once() -> None:
    """Ask the system what a process asks it a single time: the first world would have calls that others lack."""
    for ask in (liveness.machine_id, liveness.lasting_machine_id, liveness._proc_is_ours):
        ask()


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Simulate everything outside, for worlds within; log nothing, and let no collector run in the middle."""
    _ask_what_is_asked_once()
    enabled = gc.isenabled()
    gc.disable()
    logger = logging.getLogger("nbengine")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    hook, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    try:
        with installed():
            # What is there already need not be looked at when worlds are collected.
            gc.freeze()
            try:
                yield
            finally:
                drop_idle_greenlets()
                # Finalizers call outside, too.
                gc.collect()
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)
        gc.unfreeze()
        if enabled:
            gc.enable()


def run_seed(
    seed: int, *, trace: Callable[[str], None] | None = None, kinds: tuple[str, ...] = KINDS
) -> None:
    """Run one seed, within `simulation`.

    Raises:
        Violation: something happened that never may.
    """
    World(seed, draw_plan(seed, kinds), trace=trace).run()
    if seed % SEEDS_A_COLLECTION == 0:
        gc.collect()


def describe(plan: Plan) -> Any:
    """Describe a plan for people."""
    return dataclasses.asdict(plan)
