"""A data-parallel engine in lock step without processes: the coordinator, cores, clients and the host, and between
them channels that are slow as chance has it.

A channel keeps its order, as ZMQ does; between channels there is none. Calls that the cores make of their models are
checked to be the same at every core, and end when all have made them. Whatever happens is drawn from one seed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from nbengine.engine.coordinator import DPCoordinator, WaveStart
from nbengine.engine.waves import Standing, Verdict, WaveState, greatest_wave
from nbengine.ipc.messages import EngineCoreOutputs

MAX_EVENTS = 20_000
MERGED = 0.2
"""How often what a core tells the coordinator is merged with what has not left yet."""


class Violation(AssertionError):
    """Something happened that never may."""


@dataclass(eq=False, slots=True)
class Channel:
    """Messages on their way, and how often they get on when it is their turn."""

    source: str
    target: Any
    speed: float
    queue: deque[tuple[Any, ...]] = field(default_factory=deque)


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


@dataclass(eq=False, slots=True)
class Client:
    """Knows what the coordinator has published, when it comes."""

    name: str
    wave: int = 0
    running: bool = False


class Network:
    """All of them, and the order in which things happen."""

    wave_state: Any = WaveState

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.interval = rng.choice((1, 2, 3))
        self.depth = rng.choice((1, 1, 2))
        self.size = rng.choice((2, 2, 3, 4))
        self.group = Group(self.size)
        self.next_groups: dict[int, Group] = {}
        self.coordinator = DPCoordinator(self.size, lock_step=True)
        self.channels: list[Channel] = []
        self.by_ends: dict[tuple[str, str], Channel] = {}
        self.subscribed: set[int] = set()
        self.announced: list[int] = []
        self.verdicts: dict[tuple[int, int], Verdict] = {}
        self.state = (0, False)
        self.now = 0.0
        self.unanswered: set[int] = set()
        self.outcomes: dict[int, str] = {}
        self.num_requests = 0
        self.pending_regroup: set[int] = set()
        self.is_leaving = False
        self.cores: dict[int, Core] = {}
        for rank in range(self.size):
            self.add_core(rank, self.size)
        self.clients = [Client(f"client {number}") for number in range(rng.choice((1, 2, 3)))]
        self.script = self.make_script()

    def add_core(self, rank: int, size: int, *, joins_later: bool = False) -> None:
        self.cores[rank] = Core(self, rank, size, joins_later=joins_later)
        self.send(f"core {rank}", "coordinator", "subscribe", rank)

    def make_script(self) -> deque[str]:
        """What clients and the host do, in order; a sleep is followed by waking up."""
        rng = self.random
        script = ["request"] * rng.randint(1, 6)
        sleeps, regroups = rng.random() < 0.3, rng.random() < 0.3
        if sleeps:
            script += ["sleep", *(["request"] * rng.randint(0, 2)), "wake"]
        if regroups:
            script += ["regroup", *(["request"] * rng.randint(0, 3))] * rng.randint(1, 2)
            if rng.random() < 0.5:
                script.reverse()
                script = [{"wake": "sleep", "sleep": "wake"}.get(word, word) for word in script]
        if not (sleeps and regroups) and rng.random() < 0.1:
            script.append("leave")
        if rng.random() < 0.3:
            script.insert(rng.randrange(len(script)), "abort")
        return deque(script)

    # Channels.

    def send(self, source: str, target: str, *message: Any, rank: int | None = None) -> None:
        self.channel(source, target, rank).queue.append(message)

    def channel(self, source: str, target: str, rank: int | None = None) -> Channel:
        channel = self.by_ends.get((source, target))
        if channel is None:
            speed = self.random.choice((1.0, 1.0, 0.5, 0.1))
            channel = Channel(source, target if rank is None else rank, speed)
            self.by_ends[source, target] = channel
            self.channels.append(channel)
        return channel

    def to_core(self, source: str, rank: int, *message: Any) -> None:
        self.send(source, f"core {rank}", *message, rank=rank)

    def tell_coordinator(self, rank: int, news: EngineCoreOutputs) -> None:
        queue = self.channel(f"core {rank}", "coordinator", None).queue
        if queue and queue[-1][0] == "push" and self.random.random() < MERGED:
            merged = queue[-1][1]
            for name in ("wave_complete", "start_wave"):
                if (newer := getattr(news, name)) is not None:
                    setattr(merged, name, newer)
            return
        queue.append(("push", news))

    def deliver(self, channel: Channel) -> None:
        message = channel.queue.popleft()
        target = channel.target
        if isinstance(target, int):
            core = self.cores[target]
            if not core.gone:
                core.inbox.append(message)
            elif message[0] == "add":
                # Its client hears that the core is gone, and of the requests that it has not begun.
                self.send_elsewhere(*message[1:])
        elif target == "coordinator":
            self.on_coordinator(message)
        else:
            client = next(c for c in self.clients if c.name == target)
            view = message[1:]
            if view < (client.wave, client.running):
                raise Violation(f"{target} is led back from {client.wave} to {view}")
            client.wave, client.running = view

    # The coordinator.

    def on_coordinator(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("push", news):
                start = self.coordinator.observe(news, self.now)
            case ("first", rank, wave):
                start = self.coordinator.first_request(rank, wave, self.now)
            case ("subscribe", rank):
                self.subscribed.add(rank)
                start = self.coordinator.joined()
        state = (self.coordinator.current_wave, self.coordinator.running)
        if state < self.state:
            raise Violation(f"the coordinator is led back from {self.state} to {state}")
        self.state = state
        if start is not None:
            self.announce(start, is_repeated=message[0] == "subscribe")
        if self.coordinator.due is not None and self.coordinator.due <= self.now:
            stats = self.coordinator.publish(self.now, 0.0)
            for client in self.clients:
                self.send("coordinator", client.name, "view", stats.current_wave, stats.engines_running)

    def announce(self, start: WaveStart, *, is_repeated: bool) -> None:
        if start.wave in self.announced and not is_repeated:
            raise Violation(f"wave {start.wave} is announced twice")
        self.announced.append(start.wave)
        for rank in self.subscribed:
            if rank != start.exclude_rank:
                self.to_core("coordinator", rank, "start", start.wave)

    # Clients and the host.

    def act(self) -> None:
        rng = self.random
        client = rng.choice(self.clients)
        match self.script[0]:
            case "request":
                self.request(client)
            case "abort":
                if self.num_requests:
                    request = rng.randrange(self.num_requests)
                    for rank in range(self.size):
                        self.to_core(client.name, rank, "abort", request)
            case "sleep" | "wake" as change:
                for rank in range(self.size):
                    self.to_core("user", rank, change)
            case "leave":
                self.is_leaving = True
                drain = rng.random() < 0.5
                for rank in self.cores:
                    self.to_core("host", rank, "leave", drain)
            case "regroup":
                if self.pending_regroup:
                    return
                self.regroup_to(rng.choice([n for n in (1, 2, 3, 4) if n != self.size]))
        self.script.popleft()

    def request(self, client: Client) -> None:
        rng = self.random
        rank, request = rng.randrange(self.size), self.num_requests
        self.num_requests += 1
        luck = rng.random()
        if luck > 0.05:
            self.unanswered.add(request)
            self.to_core(client.name, rank, "add", request, rng.randint(1, 5))
        # A client may die before it has said so, may say so for a request that nobody gets, and may be wrong.
        if not client.running and luck < 0.95:
            wave = client.wave if luck < 0.9 else rng.randrange(100)
            self.send(f"{client.name} front", "coordinator", "first", rank, wave)

    def regroup_to(self, size: int) -> None:
        self.next_groups.pop(size, None)
        old, self.size = self.size, size
        for rank in range(old, size):
            self.add_core(rank, size, joins_later=True)
        self.coordinator.scale(max(size, old))
        self.pending_regroup = set(range(max(size, old)))
        for rank in self.pending_regroup:
            self.to_core("host", rank, "regroup", size)

    def new_group(self, size: int) -> Group:
        return self.next_groups.setdefault(size, Group(size))

    def regrouped(self, core: Core) -> None:
        self.pending_regroup.discard(core.rank)

    def send_elsewhere(self, request: int, batches: int) -> None:
        if self.is_leaving:
            self.answered(request, "refused")
        else:
            self.to_core("host", 0, "add", request, batches)

    def answered(self, request: int, how: str) -> None:
        self.unanswered.discard(request)
        self.outcomes[request] = how

    def check_verdict(self, group: Group, number: int, verdict: Verdict) -> None:
        known = self.verdicts.setdefault((id(group), number), verdict)
        if known is not verdict:
            raise Violation(f"after call {number} one core hears {verdict}, another {known}")

    # Time.

    def run(self) -> None:
        """Let everything happen, until nothing more can; then check what must hold of the end."""
        rng = self.random
        for _ in range(MAX_EVENTS):
            self.now += 1.0
            busy = [channel for channel in self.channels if channel.queue]
            ready = [core for core in self.cores.values() if core.can_step()]
            num = len(busy) + len(ready) + bool(self.script)
            if not num:
                break
            choice = int(rng.random() * num)
            if choice < len(busy):
                channel = busy[choice]
                if channel.speed == 1.0 or rng.random() < channel.speed:
                    self.deliver(channel)
            elif choice < len(busy) + len(ready):
                ready[choice - len(busy)].step()
            elif rng.random() < 0.2 or num == 1:
                self.act()
        else:
            raise Violation(f"no end after {MAX_EVENTS} events")
        self.check_end()

    def check_end(self) -> None:
        if self.unanswered:
            raise Violation(f"stranded: requests {sorted(self.unanswered)}")
        members = [core for core in self.cores.values() if core.rank < self.size]
        if self.pending_regroup:
            raise Violation(f"cores {self.pending_regroup} have not come into the new group")
        if self.is_leaving:
            if not all(core.gone for core in members):
                raise Violation("some cores have not left")
            return
        if any(core.waves.running or core.question or core.entering for core in members):
            raise Violation("some cores still run")
        if len({core.waves.wave for core in members}) != 1:
            raise Violation(f"the cores have come to waves {[core.waves.wave for core in members]}")
        state = (self.coordinator.current_wave, self.coordinator.running)
        if state != (members[0].waves.wave, False):
            raise Violation(f"the coordinator believes in {state}, the cores are at {members[0].waves.wave}")
        for client in self.clients:
            if self.announced and (client.wave, client.running) != state:
                raise Violation(
                    f"{client.name} believes in {(client.wave, client.running)} instead of {state}"
                )
