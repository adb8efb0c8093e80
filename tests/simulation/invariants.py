"""Some things may never happen, whatever goes wrong outside; they are checked here."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from nbengine.engine.host.leases import EndedLease
from nbengine.errors import NBEngineError

if TYPE_CHECKING:
    from tests.simulation.users import User
    from tests.simulation.world import World


class Judge:
    """Says whether what has happened in a world is right. Every violation is noted in the hub, which ends the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.asked_to_end = False
        """Somebody has called `shutdown`."""

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a violation unless something holds."""
        if not holds:
            self._world.hub.fail(otherwise)

    # What excuses an engine's end.

    @property
    def engine_may_end(self) -> bool:
        """Return whether something has happened that ends an engine."""
        world = self._world
        bound_owner_left = world.config.bound and world.owner_is_gone
        # A client that is stopped loses its lease, and an engine without clients ends.
        idle = any(role.startswith("client") for role in world.faults.stopped)
        return self.asked_to_end or bound_owner_left or idle or self._was_killed("host", "core")

    def _was_killed(self, *roles: str) -> bool:
        return any(role.startswith(roles) for role in self._world.faults.killed)

    # What users meet.

    def failed_start(self, user: User, error: Exception) -> None:
        """Note that a user has got no client."""
        hurt = bool(self._world.faults.hurt)
        self._world.hub.say(f"no engine: {error}")
        self.expect(
            hurt or self.engine_may_end or self._world.faults.has("stop", "hold") or not user.plan.owner,
            f"{user.name} got no engine without a fault: {error!r}",
        )

    def engine_died(self, user: User, error: NBEngineError) -> None:
        """Note that a user was told that the engine has ended."""
        self._world.hub.say(f"the engine has ended: {error}")
        self.expect(self.engine_may_end, f"{user.name}: the engine ended without a reason: {error}")

    def failed_request(self, user: User, name: str, reason: str, lost_rank: int | None) -> None:
        """Note that a request has ended with an error of its own, or with its lease."""
        excused = self.engine_may_end or user.name in self._world.faults.stopped
        self.expect(excused, f"{name} failed without a reason: {reason}")

    def lease_ended(self, ended: EndedLease) -> None:
        """Note that the host has ended a lease because its client seems to be gone, or did not speak."""
        process = self._world.processes.get(ended.lease.process.pid)
        if process is None or process.status is not None:
            return
        stopped_until = self._world.faults.stopped.get(process.role, -1.0)
        # Until it has spoken again.
        excused = self._world.hub.now <= stopped_until + self._world.config.lease
        self.expect(excused, f"the lease of {process.role} ended while that lives: {ended.reason}")

    # What is left.

    def after_shutdown(self, user: User) -> None:
        """Check that nothing of the engine is left when `shutdown` has returned to its caller."""
        left = self.engine_processes()
        self.expect(not left, f"shutdown() of {user.name} returned, and there still are {', '.join(left)}")
        self.expect_no_files(f"after shutdown() of {user.name}")

    def engine_processes(self) -> list[str]:
        """The processes of the engine that have not ended."""
        return [str(process) for process in self._world.engine if process.status is None]

    def at_the_end(self) -> None:
        """Check what must hold when all users have left, and time has passed."""
        left = self.engine_processes()
        self.expect(not left, f"left at the end: {', '.join(left)}")
        zombies = [str(process) for process in self._world.processes.values() if not process.reaped]
        self.expect(not zombies, f"nobody has taken note of the end of {', '.join(zombies)}")
        sockets = list(self._world.network.open_sockets.values())
        self.expect(not sockets, f"open at the end: {sockets}")
        if not self._nobody_could_clean_up():
            self.expect_no_files("at the end")

    def _nobody_could_clean_up(self) -> bool:
        """Return whether the host was killed (or could not begin), and so was every core that has outlived
        it: what is left then is removed at the next start."""
        host = next((process for process in self._world.engine if process.role == "host"), None)
        if host is None:
            return self._was_killed("client0") or "client0" in self._world.faults.hurt
        cores = [process for process in self._world.engine if process is not host]
        if not cores and "host" in self._world.faults.hurt:
            return True
        moment = 0.01 + 2 * self._world.plan.long_delay
        return host.status == -signal.SIGKILL and all(
            core.status == -signal.SIGKILL or core.ended_at < host.ended_at + moment for core in cores
        )

    def expect_no_files(self, when: str) -> None:
        """Check that no run directory, tensor directory or connection file of the engine is there."""
        found = self._world.engine_files()
        self.expect(not found, f"{when} there still are {', '.join(found)}")
