"""A simulation of many engine cores and many clients by discrete events: independent ranks, real decisions.

The coordinator's statistics are kept by `DPCoordinator`, the clients decide with the rules of
`scaling.rules`; time, processes and sockets are made up from recorded costs. The coordinator is one server:
it takes in a message after another, and publishes when nothing is left to read, as the host's poll loop does.
A prompt costs no more than the step in which its first token comes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scaling.costs import Costs
from scaling.rules import CENTRAL, RULES, Rule

from nbengine.engine.host import coordinator as coordinator_module
from nbengine.engine.host.coordinator import DPCoordinator
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.metrics.stats import EngineStats, SchedulerStats

Draw = Callable[[random.Random], int]
MEAN_LENGTH = 200
LENGTHS: dict[str, tuple[Draw, Draw]] = {
    "equal": (lambda rng: MEAN_LENGTH, lambda rng: 1 + rng.randrange(MEAN_LENGTH)),
    "random": (
        lambda rng: 1 + int(rng.expovariate(1 / (MEAN_LENGTH - 1))),
        lambda rng: 1 + int(rng.expovariate(1 / (MEAN_LENGTH - 1))),
    ),
    "skewed": (
        lambda rng: 50 if rng.random() < 0.9 else 1550,
        lambda rng: 1 + rng.randrange(50 if rng.random() < 0.225 else 1550),
    ),
}
"""Output tokens of a request, `MEAN_LENGTH` in the mean; and those that are left of one that is met at a
random moment."""
SAMPLE_INTERVAL = 0.1


@dataclass(frozen=True)
class Setting:
    """The setting of a simulation. `load` is the share of what all ranks can do together that is asked of
    them."""

    num_ranks: int = 256
    num_clients: int = 32
    load: float = 0.85
    lengths: str = "skewed"
    rule: str = "ours"
    publish_interval: float = 0.1
    max_num_seqs: int = 32
    seconds: float = 15.0
    warm_up: float = 5.0
    seed: int = 1
    speed: float = 1.0
    """The speed of the steps, as a multiple of that of the recorded ones."""

    def request_rate(self, costs: Costs) -> float:
        """Return the requests a second of all clients together."""
        return self._tokens_a_second(costs) * self.num_ranks / MEAN_LENGTH

    def steady_requests(self, costs: Costs) -> int:
        """Return the requests of each rank if all have equally many."""
        if self.load >= 1:
            return self.max_num_seqs
        rate = self._tokens_a_second(costs) / self.speed
        return round(rate * costs.step / (1 - rate * costs.step_request))

    def _tokens_a_second(self, costs: Costs) -> float:
        return self.load * self.max_num_seqs / costs.step_time(self.max_num_seqs) * self.speed


class Request:
    """A request on its way."""

    __slots__ = ("arrived", "begun", "client", "length", "rank", "started")

    def __init__(self, client: int, length: int, arrived: float) -> None:
        self.client = client
        self.length = length
        self.arrived = arrived
        self.started = -1.0
        self.rank = -1
        self.begun = False


class Core:
    """An engine core: every step gives each of its at most `max_num_seqs` requests one token."""

    __slots__ = ("fresh", "number", "running", "step", "stepping", "waiting", "work")

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[int, int, Request]] = []
        """A heap of the running requests by the step that ends each."""
        self.fresh: list[Request] = []
        """The requests whose first token the step brings."""
        self.step = 0
        self.stepping = False
        self.work = 0
        """The tokens that are still to come."""

    @property
    def outstanding(self) -> int:
        """Count the requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def stats(self) -> SchedulerStats:
        """Return the statistics as the scheduler reports them after a step."""
        return SchedulerStats(self.number, len(self.running), len(self.waiting), step_counter=self.step)


@dataclass
class Outcome:
    """The figures that were collected after the warm-up."""

    num_arrived: int = 0
    num_finished: int = 0
    num_unfinished: int = 0
    waits: list[float] = field(default_factory=list)
    """Seconds from arrival to the beginning of the first step."""
    request_imbalance: list[float] = field(default_factory=list)
    """For each sample, the requests of the rank that has most, by the mean."""
    work_imbalance: list[float] = field(default_factory=list)
    """The same ratio, with tokens in place of requests."""
    crowding: list[float] = field(default_factory=list)
    """For each interval between two snapshots, the requests sent to the rank that got most."""
    collisions: int = 0
    """The requests sent to a rank that another client had chosen since the last snapshot."""
    ages: list[float] = field(default_factory=list)
    """Seconds from a rank's step to the clients' knowledge of it."""
    num_publications: int = 0
    coordinator_busy: float = 0.0
    busy_steps: int = 0
    dummy_steps: int = 0
    """The steps of ranks without own work, in lock step."""
    stepping: float = 0.0
    """The seconds of all turns in lock step, and those that they would take at the ranks' mean pace."""
    stepping_alone: float = 0.0
    starts: list[float] = field(default_factory=list)
    """The seconds from a request in the paused state to the first turn of the wave, in lock step."""
    client_busy: float = 0.0
    """The seconds, of all clients, spent with snapshots and with choosing."""
    duration: float = 0.0


class Simulation:
    """A simulation that `run` runs once, returning its figures; the same setting gives the same figures
    again."""

    def __init__(self, setting: Setting, costs: Costs) -> None:
        self.setting = setting
        self.costs = costs
        self.outcome = Outcome(duration=setting.seconds)
        self._rng = random.Random(setting.seed)
        self._now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._cores = [Core(number) for number in range(setting.num_ranks)]
        self._central: deque[Request] | None = deque() if setting.rule == CENTRAL else None
        self._rules: list[Rule] = []
        if self._central is None:
            make = RULES[setting.rule]
            self._rules = [
                make(
                    setting.num_ranks, setting.num_clients, client, random.Random(f"{setting.seed} {client}")
                )
                for client in range(setting.num_clients)
            ]
        self._state = DPCoordinator(setting.num_ranks)
        self._free_at = 0.0
        self._look_at = math.inf
        """The moment at which to look next whether a snapshot is due."""
        self._unpublished: dict[int, float] = {}
        self._chosen: dict[int, tuple[int, int]] = {}
        """For each rank, the requests that it got since the last snapshot, and the client that sent the last
        (-1: several)."""

    def run(self) -> Outcome:
        """Simulate the setting and return the outcome."""
        setting = self.setting
        self._rate = setting.request_rate(self.costs)
        self._end = setting.warm_up + setting.seconds
        self._fill()
        self._at(self._rng.expovariate(self._rate), self._arrive)
        self._at(setting.warm_up, self._sample)
        before, coordinator_module.PUBLISH_INTERVAL = (
            coordinator_module.PUBLISH_INTERVAL,
            setting.publish_interval,
        )
        try:
            while self._events and self._events[0][0] < self._end:
                self._now, _, call, arguments = heapq.heappop(self._events)
                call(*arguments)
        finally:
            coordinator_module.PUBLISH_INTERVAL = before
        self.outcome.num_unfinished = sum(core.outstanding for core in self._cores) + len(self._central or ())
        return self.outcome

    def _fill(self) -> None:
        """Begin with as many requests as there will be, in the midst of their work, so that little is to
        settle."""
        _, residual = LENGTHS[self.setting.lengths]
        for core in self._cores * self.setting.steady_requests(self.costs):
            request = Request(self._rng.randrange(self.setting.num_clients), residual(self._rng), -1.0)
            request.rank = core.number
            if self._rules:
                self._rules[request.client].adopt(core.number)
            heapq.heappush(core.running, (request.length, next(self._numbers), request))
            core.work += request.length
            self.outcome.num_arrived += 1
        for core in self._cores:
            if core.running:
                self._at(self._rng.random() * self.costs.step / self.setting.speed, self._begin_step, core)
                core.stepping = True

    @property
    def _counts(self) -> bool:
        return self._now >= self.setting.warm_up

    def _at(self, moment: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), call, arguments))

    # Requests.

    def _arrive(self) -> None:
        self._at(self._now + self._rng.expovariate(self._rate), self._arrive)
        client = self._rng.randrange(self.setting.num_clients)
        request = Request(client, LENGTHS[self.setting.lengths][0](self._rng), self._now)
        self.outcome.num_arrived += 1
        if self._central is not None:
            self._central.append(request)
            core = min(self._cores, key=lambda core: len(core.running) + len(core.waiting))
            if core.outstanding < self.setting.max_num_seqs:
                self._give(core, self._central.popleft())
            return
        rule = self._rules[client]
        request.rank = rule.send()
        if self._counts:
            self.outcome.client_busy += self.costs.choose + self.costs.choose_rank * self.setting.num_ranks
        self._note_choice(request)
        self._at(self._now + self.costs.deliver, self._give, self._cores[request.rank], request)

    def _note_choice(self, request: Request) -> None:
        count, owner = self._chosen.get(request.rank, (0, request.client))
        if owner != request.client:
            owner = -1
            self.outcome.collisions += self._counts
        self._chosen[request.rank] = (count + 1, owner)

    def _give(self, core: Core, request: Request) -> None:
        core.waiting.append(request)
        core.work += request.length
        if not core.stepping:
            self._begin_step(core)

    # Steps.

    def _begin_step(self, core: Core) -> None:
        self._admit(core)
        core.stepping = True
        duration = self.costs.step_time(len(core.running)) / self.setting.speed
        self._at(self._now + duration, self._end_step, core)

    def _admit(self, core: Core) -> None:
        room = self.setting.max_num_seqs - len(core.running)
        while core.waiting and room:
            request = core.waiting.popleft()
            request.started = self._now
            if request.arrived >= self.setting.warm_up:
                self.outcome.waits.append(self._now - request.arrived)
            heapq.heappush(core.running, (core.step + request.length, next(self._numbers), request))
            core.fresh.append(request)
            room -= 1

    def _take_tokens(self, core: Core) -> list[Request]:
        """End a step and return the requests that it has ended."""
        core.step += 1
        core.work -= len(core.running)
        ended = []
        while core.running and core.running[0][0] <= core.step:
            ended.append(heapq.heappop(core.running)[2])
        return ended

    def _end_step(self, core: Core) -> None:
        self._report(core, self._take_tokens(core))
        while self._central and core.outstanding < self.setting.max_num_seqs:
            self._give(core, self._central.popleft())
        if core.running or core.waiting:
            self._begin_step(core)
        else:
            core.stepping = False

    def _report(self, core: Core, ended: list[Request]) -> None:
        begun, core.fresh = core.fresh, []
        self.outcome.num_finished += len(ended)
        if self._central is not None:
            return
        if begun or ended:
            self._at(self._now + self.costs.deliver, self._outputs, begun, ended)
        self._at(self._now + self.costs.deliver, self._take_in, self._stats(core), self._now)

    def _stats(self, core: Core) -> SchedulerStats:
        return core.stats()

    def _outputs(self, begun: list[Request], ended: list[Request]) -> None:
        for request in begun:
            self._rules[request.client].begin(request.rank)
        for request in ended:
            self._rules[request.client].end(request.rank)

    # The coordinator.

    def _take_in(self, stats: SchedulerStats, made_at: float) -> None:
        self._occupy(self.costs.take_in + (self.costs.wake if self._free_at <= self._now else 0.0))
        self._state.observe(EngineCoreOutputs(stats.engine_index, scheduler_stats=stats), self._now)
        self._unpublished[stats.engine_index] = made_at
        self._publish_soon()

    def _publish_soon(self) -> None:
        due = self._state.due
        if due is not None and due < self._look_at:
            self._look_at = max(due, self._free_at)
            self._at(self._look_at, self._look_at_due)

    def _look_at_due(self) -> None:
        due = self._state.due
        if self._now < self._look_at or due is None:
            return
        self._look_at = math.inf
        if max(due, self._free_at) <= self._now:
            self._publish()
        else:
            self._publish_soon()

    def _publish(self) -> None:
        setting = self.setting
        stats = self._state.publish(self._now, self._now)
        self._occupy(self.costs.publication(setting.num_ranks, setting.num_clients))
        made_at, self._unpublished = self._unpublished, {}
        self._at(self._free_at + self.costs.deliver, self._snapshot, stats, list(made_at.values()))

    def _occupy(self, seconds: float) -> None:
        self._free_at = max(self._free_at, self._now) + seconds
        if self._counts:
            self.outcome.coordinator_busy += seconds

    def _snapshot(self, stats: EngineStats, made_at: list[float]) -> None:
        for rule in self._rules:
            rule.observe(stats)
        chosen, self._chosen = self._chosen, {}
        if not self._counts:
            return
        self.outcome.num_publications += 1
        self.outcome.ages.extend(self._now - moment for moment in made_at)
        self.outcome.crowding.append(max((count for count, _ in chosen.values()), default=0))
        each = self.costs.observe + self.costs.observe_rank * self.setting.num_ranks
        self.outcome.client_busy += each * self.setting.num_clients

    def _sample(self) -> None:
        self._at(self._now + SAMPLE_INTERVAL, self._sample)
        for figures, values in (
            (self.outcome.request_imbalance, [core.outstanding for core in self._cores]),
            (self.outcome.work_imbalance, [core.work for core in self._cores]),
        ):
            mean = sum(values) / len(values)
            if mean:
                figures.append(max(values) / mean)
