"""The verdict that an engine is dead, from the reports and ends of its processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbengine.client.link.engine_watch import EngineWatch
from nbengine.ipc.control_messages import EngineDead

LAST_WORDS_TIMEOUT = 10.0
"""Seconds that the host gets to say why an engine core has ended."""
LAST_OUTPUTS_TIMEOUT = 5.0
"""Seconds after the host's notice in which the last outputs of an engine that ends in good order may come."""


@dataclass(frozen=True, slots=True)
class Death:
    """The news of an engine's end.

    `started`: whether the engine had become ready; None if the host does not say. `explained`: the cause needs
    no lines of a log beside it.
    """

    cause: str
    log_tail: str = ""
    started: bool | None = None
    explained: bool = False


class EngineVerdict:
    """The judge of the host's notice, the farewells of engine cores, and the ends of their processes.

    A core whose end the host does not explain within `LAST_WORDS_TIMEOUT` is the engine's end. After the
    notice of an end in good order the engine is dead when every core has said good-bye on the socket of its
    outputs, or `LAST_OUTPUTS_TIMEOUT` later, so that streams get their last outputs first. All times are of
    the monotonic clock.
    """

    def __init__(self, watch: EngineWatch) -> None:
        self._watch = watch
        self._ranks: list[int] = []
        self._farewells: set[int] = set()
        self._incarnations: dict[int, int] = {}
        """The incarnations that the host has called ready, by rank."""
        self.notice: EngineDead | None = None
        self.due = math.inf
        """The time at which the verdict falls if nothing more is heard."""
        self.is_end_expected = False
        """The engine is being ended: cores end first, and the host waits for them,
        so that their ends say nothing."""

    def attached(self, ranks: list[int]) -> None:
        """Take note of the engine's cores."""
        self._ranks = ranks

    def ready(self, rank: int, incarnation: int) -> None:
        """Take note that the host calls this core ready."""
        self._incarnations[rank] = incarnation
        self._farewells.discard(rank)

    def ranks_changed(self, ranks: list[int]) -> None:
        """Take note that the engine goes on with these cores, and without those that are not listed."""
        self._ranks = ranks
        self._watch.keep(ranks)
        if self.notice is None and not self._is_one_gone():
            self.due = math.inf

    def farewell(self, rank: int, incarnation: int, now: float) -> None:
        """Take note that a core has said good-bye."""
        if incarnation < self._incarnations.get(rank, incarnation):
            # The host has already announced the successor of this core.
            return
        self._farewells.add(rank)
        if rank in self._ranks:
            self._expect_last_words(now)

    def noticed(self, notice: EngineDead, now: float) -> None:
        """Take note that the host says that the engine is dead."""
        self.notice = notice
        patience = LAST_OUTPUTS_TIMEOUT if notice.expected and notice.started else 0.0
        self.due = now + patience

    def look(self, now: float) -> None:
        """Look at the cores' processes."""
        if self._is_one_gone():
            self._expect_last_words(now)

    def death(self, now: float) -> Death | None:
        """Return the verdict if it falls now."""
        notice = self.notice
        if notice is not None:
            if now >= self.due or self._farewells.issuperset(self._ranks):
                return Death(notice.cause, notice.log_tail, notice.started, notice.explained)
        elif now >= self.due:
            return Death("an engine core ended, and the host does not say why")
        return None

    def _is_one_gone(self) -> bool:
        return bool(self._farewells.intersection(self._ranks)) or self._watch.core_gone()

    def _expect_last_words(self, now: float) -> None:
        if self.due == math.inf and not self.is_end_expected:
            self.due = now + LAST_WORDS_TIMEOUT
