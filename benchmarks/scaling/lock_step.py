"""The same simulation with engine cores in lock step, with the waves of `WaveState` and of `DPCoordinator`.

Every rank takes part in every turn, with work or without, and a turn takes as long as its slowest rank.
"""

from __future__ import annotations

from scaling.costs import Costs
from scaling.independent import Core, Outcome, Request, Setting, Simulation

from nbengine.engine.core.waves import Agreement, Standing, Verdict, WaveState
from nbengine.engine.host.coordinator import DPCoordinator, WaveStart
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.metrics.stats import EngineStats, SchedulerStats


class LockStep(Simulation):
    """A simulation with ranks in lock step."""

    def __init__(self, setting: Setting, costs: Costs) -> None:
        super().__init__(setting, costs)
        self._state = DPCoordinator(setting.num_ranks, lock_step=True)
        self._waves = [WaveState(setting.num_ranks, rank) for rank in range(setting.num_ranks)]
        self._num_begun = 0
        self._asked_at: float | None = None
        """The arrival of the first request of a wave that does not turn yet."""
        self._clients_see_wave = False

    def run(self) -> Outcome:
        """Simulate the setting and return the outcome."""
        outcome = super().run()
        numbers = {wave.wave for wave in self._waves}
        if max(numbers) - min(numbers) > 1:
            raise RuntimeError(f"waves are apart: {sorted(numbers)}")
        return outcome

    def _fill(self) -> None:
        """Do nothing: a lock step begins empty, paused."""

    # Waves.

    def _arrive(self) -> None:
        super()._arrive()
        if not self._clients_see_wave:
            self._at(self._now + self.costs.deliver, self._first_request, self._last.rank)

    def _note_choice(self, request: Request) -> None:
        self._last = request
        super()._note_choice(request)

    def _first_request(self, rank: int) -> None:
        self._occupy(self.costs.take_in + self.costs.wake)
        self._announce(self._state.first_request(rank, self._state.current_wave, self._now))

    def _give(self, core: Core, request: Request) -> None:
        core.waiting.append(request)
        core.work += request.length
        if self._asked_at is None and not self._waves[core.number].running:
            self._asked_at = request.arrived
        self._begin(core.number)

    def _begin(self, rank: int) -> None:
        """Let a rank begin a wave if it has a reason; when all have, they agree."""
        wave = self._waves[rank]
        news = not wave.running and wave.can_begin(self._standing(rank))
        if not news:
            return
        number = wave.begin(self._standing(rank))
        self._num_begun += 1
        if number is not None:
            self._at(self._now + self.costs.deliver, self._wave_begun, rank, number)
        if self._num_begun == self.setting.num_ranks:
            self._at(self._now, self._agree)

    def _wave_begun(self, rank: int, number: int) -> None:
        self._occupy(self.costs.take_in + self.costs.wake)
        self._announce(self._state.observe(EngineCoreOutputs(rank, start_wave=number), self._now))

    def _announce(self, start: WaveStart | None) -> None:
        if start is not None:
            self._occupy(self.costs.publish + self.costs.publish_client * self.setting.num_ranks)
            self._at(self._free_at + self.costs.deliver, self._announced, start)
        self._publish_soon()

    def _announced(self, start: WaveStart) -> None:
        for rank, wave in enumerate(self._waves):
            if rank != start.exclude_rank:
                wave.announce(start.wave)
                self._begin(rank)

    def _agree(self) -> None:
        verdict = _conclude([wave.agreement(self._standing(rank)) for rank, wave in enumerate(self._waves)])
        doublings = max(1, (self.setting.num_ranks - 1).bit_length())
        after = self._now + doublings * self.costs.agree
        if verdict is Verdict.RUN:
            self._at(after, self._turn)
            return
        self._num_begun = 0
        self._at(after + self.costs.deliver, self._wave_complete, self._waves[0].wave - 1)
        for rank in range(self.setting.num_ranks):
            self._begin(rank)

    def _wave_complete(self, number: int) -> None:
        self._occupy(self.costs.take_in + self.costs.wake)
        self._state.observe(EngineCoreOutputs(0, wave_complete=number), self._now)
        self._publish_soon()

    def _standing(self, rank: int) -> Standing:
        return Standing(has_work=self._cores[rank].outstanding > 0)

    # Turns.

    def _turn(self) -> None:
        if self._asked_at is not None:
            if self._counts:
                self.outcome.starts.append(self._now - self._asked_at)
            self._asked_at = None
        durations = [self._prepare(core) for core in self._cores]
        if self._counts:
            dummies = sum(not core.running for core in self._cores)
            self.outcome.dummy_steps += dummies
            self.outcome.busy_steps += len(self._cores) - dummies
            self.outcome.stepping += max(durations)
            self.outcome.stepping_alone += sum(durations) / len(durations)
        self._at(self._now + max(durations), self._turned)

    def _prepare(self, core: Core) -> float:
        self._admit(core)
        jitter = self._rng.choice(self.costs.jitter)
        return self.costs.step_time(len(core.running)) / self.setting.speed * jitter

    def _turned(self) -> None:
        for core, wave in zip(self._cores, self._waves, strict=True):
            wave.count_turn()
            self._report(core, self._take_tokens(core))
        if self._waves[0].agreement_due:
            self._agree()
        else:
            self._turn()

    def _stats(self, core: Core) -> SchedulerStats:
        wave = self._waves[core.number]
        stats = core.stats()
        stats.current_wave, stats.engines_running = wave.wave, wave.running
        return stats

    def _snapshot(self, stats: EngineStats, made_at: list[float]) -> None:
        self._clients_see_wave = stats.engines_running
        super()._snapshot(stats, made_at)


def _conclude(agreements: list[Agreement]) -> Verdict:
    """Carry the agreement of all ranks through: each is told whether any of them said yes."""
    answers = [next(agreement) for agreement in agreements]
    while True:
        verdicts = []
        anyone = any(answers)
        answers = []
        for agreement in agreements:
            try:
                answers.append(agreement.send(anyone))
            except StopIteration as end:
                verdicts.append(end.value)
        if verdicts:
            if answers or len(set(verdicts)) > 1:
                raise RuntimeError(f"ranks disagree: {set(verdicts)}, {len(answers)} have not finished")
            return verdicts[0]
