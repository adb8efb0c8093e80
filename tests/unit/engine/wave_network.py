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

from nbengine.engine.core.waves import Verdict, WaveState
from nbengine.engine.host.coordinator import DPCoordinator, WaveStart
from nbengine.ipc.messages import EngineCoreOutputs
from tests.unit.engine.simulated_core import Core, Group, Violation

MAX_EVENTS = 20_000
MERGED = 0.2
"""The probability that what a core tells the coordinator is merged with what has not left yet."""


@dataclass(eq=False, slots=True)
class Channel:
    """Messages on their way, and how often they get on when it is their turn."""

    source: str
    target: Any
    speed: float
    queue: deque[tuple[Any, ...]] = field(default_factory=deque)


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
        """Draw what clients and the host do, in order; a sleep is followed by waking up."""
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
        has_changed = True
        for _ in range(MAX_EVENTS):
            self.now += 1.0
            if has_changed:
                busy = [channel for channel in self.channels if channel.queue]
                ready = [core for core in self.cores.values() if core.can_step()]
                num = len(busy) + len(ready) + bool(self.script)
                if not num:
                    break
            has_changed = True
            choice = int(rng.random() * num)
            if choice < len(busy):
                channel = busy[choice]
                if channel.speed == 1.0 or rng.random() < channel.speed:
                    self.deliver(channel)
                else:
                    has_changed = False
            elif choice < len(busy) + len(ready):
                ready[choice - len(busy)].step()
            elif rng.random() < 0.2 or num == 1:
                self.act()
            else:
                has_changed = False
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
