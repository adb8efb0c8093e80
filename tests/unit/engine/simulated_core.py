"""An engine core in lock step without a process, for `wave_network`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbengine.engine.core.waves import Standing, Verdict, greatest_wave
from nbengine.ipc.messages import EngineCoreOutputs

if TYPE_CHECKING:
    from tests.unit.engine.wave_network import Network


class Violation(AssertionError):
    """Something happened that never may."""


@dataclass(eq=False, slots=True)
class Call:
    """A batch or a question that the cores of a group have in common; it ends when all `missing` have made it."""

    what: tuple[Any, ...]
    missing: int
    flag: bool = False


@dataclass(eq=False, slots=True)
class Group:
    """Cores that step together."""

    size: int
    calls: list[Call] = field(default_factory=list)


class Core:
    """An engine core: what `DPEngineCoreProc` does around its `WaveState`, with requests that are mere numbers."""

    def __init__(self, network: Network, rank: int, size: int, *, joins_later: bool = False) -> None:
        self.network = network
        self.rank = rank
        self.waves = network.wave_state(size, rank, joins_later=joins_later, agreement_steps=network.interval)
        self.group: Group | None = None if joins_later else network.group
        self.num_calls = 0
        self.inbox: list[tuple[Any, ...]] = []
        self.requests: dict[int, int] = {}
        """Batches that each still needs."""
        self.batches: deque[Call] = deque()
        """In flight, at most `network.depth`."""
        self.question: Call | None = None
        self.agreement: Any = None
        self.entering: Call | None = None
        self.is_entering = False
        self.asleep = False
        self.changes: list[str] = []
        self.leaving: bool | None = None
        """Told to end; True with a drain."""
        self.new_size: int | None = None
        self.retired = False
        self.gone = False

    # What it could do.

    def standing(self) -> Standing:
        ready = self.new_size is not None and (self.rank < self.new_size or not self.requests)
        return Standing(
            has_work=bool(self.requests) and not (self.asleep or self.changes),
            is_asleep=self.asleep,
            is_ready=ready,
            is_leaving=self.leaving is not None and not self.requests,
        )

    def can_step(self) -> bool:
        if self.gone:
            return False
        call = self.question or self.entering
        if call is not None:
            return not call.missing
        if len(self.batches) >= self.network.depth:
            return not self.batches[0].missing
        if self.inbox or self.waves.running:
            return True
        outside = self.group is None
        return (outside and self.new_size is not None) or self.waves.can_begin(self.standing())

    # What it does next, without waiting in between.

    def step(self) -> None:
        while self.batches and not self.batches[0].missing:
            self.batches.popleft()
        if self.entering is not None:
            self.enter()
            return
        if self.question is not None:
            flag, self.question = self.question.flag, None
            self.ask(flag)
            return
        for message in self.inbox:
            getattr(self, f"on_{message[0]}")(*message[1:])
        self.inbox.clear()
        if self.leaving is not None and (
            not self.leaving or self.asleep or self.changes or self.waves.is_held_up
        ):
            self.end_requests(list(self.requests))
        if self.group is None:
            if self.new_size is not None:
                self.regroup()
            elif self.leaving is not None:
                self.go()
            return
        if not self.waves.running:
            before = self.waves.wave
            begun = self.waves.begin(self.standing())
            if self.waves.wave < before:
                raise Violation(f"core {self.rank}: wave {before}, then {self.waves.wave}")
            if begun is not None:
                self.tell(EngineCoreOutputs(start_wave=begun))
        if self.waves.agreement_due:
            self.agreement = self.waves.agreement(self.standing())
            self.ask(None)
        elif self.waves.running:
            self.take_turn()

    def take_turn(self) -> None:
        if self.asleep:
            raise Violation(f"core {self.rank} computes while it sleeps")
        self.waves.count_turn()
        self.batches.append(self.call(("batch", self.waves.wave, self.waves.num_turns)))
        if self.changes:
            return
        for request in list(self.requests):
            self.requests[request] -= 1
            if not self.requests[request]:
                del self.requests[request]
                self.network.answered(request, "executed")

    def ask(self, flag: bool | None) -> None:
        # Newcomers have another wave in mind until they know better.
        where = () if self.is_entering else (self.waves.wave, self.waves.num_turns)
        try:
            mine = next(self.agreement) if flag is None else self.agreement.send(flag)
        except StopIteration as end:
            self.conclude(end.value)
        else:
            self.question = self.call(("question", *where), mine)

    def conclude(self, outcome: Verdict | int) -> None:
        if isinstance(outcome, int):
            self.is_entering = False
            self.waves.joined(self.group.size, outcome)
            self.network.regrouped(self)
            return
        self.network.check_verdict(self.group, self.num_calls, outcome)
        if outcome is Verdict.RUN:
            return
        if self.rank == 0:
            self.tell(EngineCoreOutputs(wave_complete=self.waves.wave - 1))
        self.advance()
        if outcome is Verdict.LEAVE:
            self.go()
        if outcome is Verdict.REGROUP:
            self.regroup()

    def regroup(self) -> None:
        size, self.new_size = self.new_size, None
        if self.rank >= size:
            self.go()
            if self.requests:
                raise Violation(f"core {self.rank} goes with requests {self.requests}")
            self.network.regrouped(self)
            return
        self.group, self.num_calls = self.network.new_group(size), 0
        self.entering = self.call(("enter",))

    def go(self) -> None:
        """End; clients find other cores for what has come too late, if there are any."""
        self.gone = True
        for message in self.inbox:
            if message[0] == "add":
                self.network.send_elsewhere(*message[1:])

    def enter(self) -> None:
        self.entering, self.is_entering = None, True
        self.agreement = greatest_wave(self.waves.wave)
        self.ask(None)

    def call(self, what: tuple[Any, ...], flag: bool = False) -> Call:
        calls, number = self.group.calls, self.num_calls
        self.num_calls += 1
        if number == len(calls):
            calls.append(Call(what, self.group.size))
        call = calls[number]
        if call.what != what:
            raise Violation(f"core {self.rank} does {what} where another does {call.what}")
        call.missing -= 1
        call.flag |= flag
        return call

    # Messages.

    def on_add(self, request: int, batches: int) -> None:
        if self.leaving is not None:
            self.network.answered(request, "refused")
        elif self.retired:
            self.network.send_elsewhere(request, batches)
        else:
            self.requests[request] = batches

    def on_abort(self, request: int) -> None:
        self.end_requests([request])

    def on_start(self, wave: int) -> None:
        self.waves.announce(wave)

    def on_sleep(self) -> None:
        self.changes.append("sleep")
        self.advance()

    def on_wake(self) -> None:
        self.changes.append("wake")
        self.advance()

    def on_leave(self, drain: bool) -> None:
        self.leaving = drain

    def on_regroup(self, size: int) -> None:
        self.new_size = size
        self.retired = self.rank >= size

    def advance(self) -> None:
        while self.changes and not (self.changes[0] == "sleep" and self.waves.running):
            self.asleep = self.changes.pop(0) == "sleep"

    def end_requests(self, requests: list[int]) -> None:
        for request in requests:
            if self.requests.pop(request, None) is not None:
                self.network.answered(request, "aborted")

    def tell(self, news: EngineCoreOutputs) -> None:
        news.engine_index = self.rank
        self.network.tell_coordinator(self.rank, news)
