"""Cores in lock step never strand a request, never disagree, and come to rest; whatever is slow or reordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from nbengine.engine.core import waves
from nbengine.engine.core.waves import (
    WAVE_AGREEMENT_STEPS,
    WAVE_BITS,
    Standing,
    Verdict,
    WaveState,
    conclude,
    greatest_wave,
)
from nbengine.engine.host.coordinator import DPCoordinator, WaveStart
from tests.support.thorough import amount
from tests.unit.engine.simulated_core import Violation
from tests.unit.engine.wave_network import Network

NUM_SCHEDULES = amount(2000, thorough=100_000)
SEEDS_OF_A_FAULT = 4000
WORK, IDLE, ASLEEP = Standing(has_work=True), Standing(), Standing(is_asleep=True)


def agree(state: WaveState, standing: Standing, *others: Standing) -> Verdict:
    """Agree with cores in the same place."""
    peers = [WaveState(state.num_ranks, rank) for rank in range(1, len(others) + 1)]
    for peer, theirs in zip(peers, others, strict=True):
        peer.announce(0)
        peer.begin(theirs)
        peer.num_turns = state.num_turns
    agreements = [peer.agreement(theirs) for peer, theirs in zip(peers, others, strict=True)]
    sent: list[bool | None] = [None] * len(agreements)

    def any_rank(flag: bool) -> bool:
        flags = [next(a) if sent[0] is None else a.send(sent[0]) for a in agreements]
        answer = any((flag, *flags))
        sent[:] = [answer] * len(agreements)
        return answer

    return conclude(state.agreement(standing), any_rank)


# One core's side.


def test_work_begins_a_wave_and_is_told_once() -> None:
    state = WaveState(2)
    assert not state.can_begin(IDLE)
    assert state.begin(IDLE) is None
    assert state.begin(WORK) == 0
    assert state.running
    assert state.begin(WORK) is None


def test_an_announced_wave_is_begun_without_telling_and_one_of_the_past_means_nothing() -> None:
    state = WaveState(2)
    state.announce(0)
    assert state.begin(IDLE) is None
    assert state.running
    assert agree(state, IDLE, IDLE) is Verdict.RUN
    state.count_turn()
    assert agree(state, IDLE, IDLE) is Verdict.PAUSE
    assert (state.wave, state.running) == (1, False)
    state.announce(0)
    assert not state.can_begin(IDLE)
    state.announce(1)
    assert state.can_begin(IDLE)


def test_turns_between_agreements_are_counted_and_one_with_work_keeps_all_going() -> None:
    state = WaveState(2)
    state.begin(IDLE)
    state.announce(0)
    state.begin(IDLE)
    assert state.agreement_due
    assert agree(state, IDLE, WORK) is Verdict.RUN
    for _ in range(WAVE_AGREEMENT_STEPS):
        assert not state.agreement_due
        state.count_turn()
    assert state.agreement_due
    assert agree(state, IDLE, WORK) is Verdict.RUN
    assert (state.wave, state.num_turns) == (0, WAVE_AGREEMENT_STEPS)


def test_a_core_on_its_own_may_pause_after_every_turn() -> None:
    state = WaveState(1)
    state.begin(WORK)
    for _ in range(3):
        assert state.agreement_due
        assert conclude(state.agreement(WORK), bool) is Verdict.RUN
        assert not state.agreement_due
        state.count_turn()
    assert conclude(state.agreement(IDLE), bool) is Verdict.PAUSE


def test_work_is_held_up_by_a_sleeper_until_it_begins_a_wave_itself() -> None:
    state, sleeper = WaveState(2), WaveState(2, 1)
    state.begin(WORK)
    assert agree(state, WORK, ASLEEP) is Verdict.HOLD
    assert (state.wave, state.is_held_up) == (1, True)
    assert not state.can_begin(WORK)
    sleeper.announce(0)
    sleeper.begin(ASLEEP)
    assert agree(sleeper, ASLEEP, WORK) is Verdict.HOLD
    assert not sleeper.can_begin(ASLEEP)
    assert sleeper.begin(IDLE) == 1
    state.announce(1)
    assert state.begin(WORK) is None
    assert agree(state, WORK, IDLE) is Verdict.RUN
    assert not state.is_held_up


def test_nobody_leaves_before_all_want_to() -> None:
    leaving = Standing(is_leaving=True)
    state = WaveState(2)
    assert state.begin(leaving) == 0
    assert agree(state, leaving, IDLE) is Verdict.RUN
    state.count_turn()
    assert agree(state, leaving, IDLE) is Verdict.PAUSE
    assert state.begin(leaving) == 1
    assert agree(state, leaving, leaving) is Verdict.LEAVE


def test_the_group_changes_when_all_are_ready_even_with_work() -> None:
    ready = Standing(has_work=True, is_ready=True)
    state = WaveState(2)
    state.begin(ready)
    assert agree(state, ready, WORK) is Verdict.RUN
    state.count_turn()
    assert agree(state, ready, WORK) is Verdict.RUN
    state.count_turn()
    assert agree(state, ready, ready) is Verdict.PAUSE
    state.begin(ready)
    assert agree(state, ready, ready) is Verdict.REGROUP
    state.joined(3, 7)
    assert (state.wave, state.num_ranks) == (7, 3)


def test_a_newcomer_begins_nothing_before_it_has_joined() -> None:
    state = WaveState(3, 2, joins_later=True)
    state.announce(5)
    assert not state.can_begin(WORK)
    state.joined(3, 6)
    assert not state.can_begin(IDLE)
    assert state.begin(WORK) == 6


@pytest.mark.parametrize("numbers", [[0, 0], [0, 5, 5], [6, 5, 0], [2**WAVE_BITS - 1, 1], [4, 3, 7, 8]])
def test_the_greatest_wave_is_found_bit_by_bit(numbers: list[int]) -> None:
    searches = [greatest_wave(number) for number in numbers]
    flags = [next(search) for search in searches]
    found: list[int] = []
    while not found:
        answer = any(flags)
        flags.clear()
        for search in searches:
            try:
                flags.append(search.send(answer))
            except StopIteration as end:
                found.append(end.value)
    assert found == [max(numbers)] * len(numbers)


# All of them together.


def test_no_order_of_events_strands_a_request_or_parts_the_cores() -> None:
    outcomes: Counter[str] = Counter()
    num_waves = 0
    for seed in range(NUM_SCHEDULES):
        network = Network(seed)
        try:
            network.run()
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise
        outcomes.update(network.outcomes.values())
        num_waves += network.coordinator.current_wave
    assert outcomes["executed"] > 2 * NUM_SCHEDULES
    assert num_waves > NUM_SCHEDULES


def run_schedules(count: int) -> None:
    for seed in range(count):
        Network(seed).run()


Plant = Callable[[pytest.MonkeyPatch], None]


def deaf_when_running(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that a START_DP_WAVE which comes while the previous wave ends is forgotten with it."""
    end = WaveState.agreement

    def agreement(self: WaveState, standing: Standing) -> waves.Agreement:
        verdict = yield from end(self, standing)
        if not self.running:
            self._announced = -1
        return verdict

    def announce(self: WaveState, wave: int) -> None:
        if not self.running and wave == self.wave:
            self._announced = wave if self.has_joined else -1

    patch.setattr(WaveState, "agreement", agreement)
    patch.setattr(WaveState, "announce", announce)


def silent_beginner(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that a core relies on the client to have the others begin, for a request of this
    wave."""
    begin = WaveState.begin

    def begin_silently(self: WaveState, standing: Standing) -> int | None:
        begun = begin(self, standing)
        return None if begun == 0 else begun

    patch.setattr(WaveState, "begin", begin_silently)


def first_request_excludes(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that the core which the client names is left out: it is believed to begin by itself."""
    first_request = DPCoordinator.first_request

    def excluding(self: DPCoordinator, rank: int, wave: int, now: float) -> WaveStart | None:
        start = first_request(self, rank, wave, now)
        return start and start._replace(exclude_rank=rank)

    patch.setattr(DPCoordinator, "first_request", excluding)


def forgets_newcomers(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that one who subscribes while a wave runs is told nothing."""
    patch.setattr(DPCoordinator, "joined", lambda self: None)


def late_news_lead_back(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that the coordinator believes what it hears last."""

    def move_to(self: DPCoordinator, wave: int, running: bool, now: float) -> bool:
        is_news = (wave, running) != (self.current_wave, self.running)
        self.current_wave, self.running = wave, running
        self._publish_by(now)
        return is_news

    patch.setattr(DPCoordinator, "_move_to", move_to)


def wakes_unheard(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that a core which has held up the others begins no wave when it has woken up."""
    patch.setattr(
        WaveState,
        "_has_reason",
        lambda self, s: s.is_leaving or ((s.has_work or s.is_ready) and not self.is_held_up),
    )


def no_opening(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that a wave begins with a batch."""

    def run(standing: Standing) -> waves.Agreement:
        yield False
        return Verdict.RUN

    patch.setattr(waves, "_opening", run)


def decides_alone(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that a core without work pauses, whatever the others say."""
    agreement = WaveState.agreement

    def agree_with_oneself(self: WaveState, standing: Standing) -> waves.Agreement:
        if self.num_turns and not standing.has_work:
            yield False
            self.running, self.wave, self.num_turns = False, self.wave + 1, 0
            return Verdict.PAUSE
        verdict = yield from agreement(self, standing)
        return verdict

    patch.setattr(WaveState, "agreement", agree_with_oneself)


def newcomers_start_at_zero(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that a new group does not find out which wave comes next."""
    joined = WaveState.joined
    patch.setattr(WaveState, "joined", lambda self, num, wave: joined(self, num, self.wave))


def leaves_alone(patch: pytest.MonkeyPatch) -> None:
    """Plant the fault that a core which is to end leaves at the next agreement."""
    opening = waves._opening

    def leave(standing: Standing) -> waves.Agreement:
        verdict = yield from opening(standing)
        return Verdict.LEAVE if standing.is_leaving else verdict

    patch.setattr(waves, "_opening", leave)


PLANTS: list[Plant] = [
    deaf_when_running,
    silent_beginner,
    first_request_excludes,
    forgets_newcomers,
    late_news_lead_back,
    wakes_unheard,
    no_opening,
    decides_alone,
    newcomers_start_at_zero,
    leaves_alone,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_fault_in_the_protocol_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        run_schedules(SEEDS_OF_A_FAULT)
