"""Waves, in which the engine cores of a model with experts step together. No I/O, no clock, no threads.

The workers of these cores compute the experts for each other, so that a batch of one needs a batch of every
other. While a *wave* runs, each core therefore starts exactly one batch a *turn*, with work or without (a
dummy batch), and after every `WAVE_AGREEMENT_STEPS` turns all of them agree on whether any has work left. If
none has, they pause, and the number of the wave grows.

    PAUSED (wave w) ── own reason (`start_wave` w to the coordinator), or START_DP_WAVE w ──► agreement
       ▲                                                                                        │ run
       └── no work: wave w + 1 (rank 0 tells the coordinator: `wave_complete` w) ◄─ agreement ◄─┴─ turns ◄┐
                                                                                      └── go on ──────────┘

A core asks its executor for batches and for the questions of agreements, in one sequence that all cores have
in common. A core that begins wave w waits in its first agreement for all others, and these have all ended
wave w - 1: their numbers agree. No core can be ahead by more than that one question, so that:

- No request is stranded. A core that pauses and has work always begins a wave by itself and says so, whatever
  wave the request was sent in and whatever else is under way; `FIRST_REQ` of the client only makes the others
  begin sooner. The coordinator passes `start_wave` on to all of them, once per wave and again to cores that
  subscribe later.
- Nobody is left out. A wave that the coordinator begins for a client includes the core that the client names:
  its request may have been refused, or may never arrive.
- A wave number from a client changes nothing. Cores count waves themselves, and the coordinator's state is
  the greatest (wave, running) that it has heard of: reports that come late or twice cannot lead it back.

A wave begins with an agreement before any batch, since not every core can always compute: a sleeping one has
given its weights away. If any sleeps the wave ends at once, and the sleeper begins another when it has woken
up. In the same place the cores agree on what they do between two waves: leave, all of them, or change their
number.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

WAVE_AGREEMENT_STEPS = 32
"""Turns between two agreements of a wave."""
WAVE_BITS = 40
"""Bits of a wave's number: enough for a thousand waves a second for more than thirty years."""

T = TypeVar("T")
Agreement = Generator[bool, bool, "Verdict"]
"""A generator that yields this core's answer to the next question, is sent whether any core says yes, and
returns the verdict, which is the same for all."""


class Verdict(enum.Enum):
    """The decision on which the engine cores have agreed."""

    RUN = enum.auto()
    """Turns follow."""
    PAUSE = enum.auto()
    """The wave is over: nobody has work."""
    HOLD = enum.auto()
    """The wave is over before its first turn: somebody sleeps."""
    REGROUP = enum.auto()
    """The wave is over before its first turn: everybody is ready to change the number of cores."""
    LEAVE = enum.auto()
    """The wave is over before its first turn, and so is everything: everybody wants to leave."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state that one core brings to an agreement."""

    has_work: bool = False
    """The core has requests for which it could compute."""
    is_asleep: bool = False
    """The core cannot compute, not even for others."""
    is_ready: bool = False
    """The core knows how many cores there are to be from now on."""
    is_leaving: bool = False
    """The core is to end, and its requests have ended."""


class WaveState:
    """One engine core's side of the waves.

    Its methods are called in this order: `begin` until `running`, then an `agreement` whenever
    `agreement_due`, else a batch and `count_turn`.

    With one core nobody else is asked or waited for, and every turn may be the last.
    """

    def __init__(
        self,
        num_ranks: int,
        rank: int = 0,
        *,
        joins_later: bool = False,
        agreement_steps: int = WAVE_AGREEMENT_STEPS,
    ) -> None:
        self.num_ranks = num_ranks
        self.rank = rank
        self.has_joined = not joins_later
        """True for one of the cores that step together; a newcomer is none before `joined`."""
        self.wave = 0
        """Number of the wave that runs, or of the next one."""
        self.running = False
        self.num_turns = 0
        """Number of batches of this wave."""
        self.is_held_up = False
        """True if a core slept when the latest wave began: then work is no reason to begin another."""
        self._holds_up = False
        """True if this core was the sleeper, or one of them."""
        self._agreement_steps = agreement_steps
        self._next_agreement = 0
        self._announced = -1

    @property
    def agreement_due(self) -> bool:
        """Tell whether the next thing to do in a running wave is to agree."""
        return self.running and self.num_turns >= self._next_agreement

    def announce(self, wave: int) -> None:
        """Take in a START_DP_WAVE: some core has begun the wave, or is to. A wave of the past is ignored."""
        self._announced = max(self._announced, wave)

    def can_begin(self, standing: Standing) -> bool:
        """Tell whether `begin` would begin a wave."""
        if self.running or not self.has_joined:
            return False
        return self._announced >= self.wave or self._has_reason(standing)

    def begin(self, standing: Standing) -> int | None:
        """Begin a wave if there is a reason to; return its number if the others must be told, else None."""
        if not self.can_begin(standing):
            return None
        is_news = self._announced < self.wave
        self.wave = max(self.wave, self._announced)
        self.running = True
        self.num_turns = self._next_agreement = 0
        return self.wave if is_news else None

    def count_turn(self) -> None:
        """Count a batch that was started."""
        self.num_turns += 1

    def agreement(self, standing: Standing) -> Agreement:
        """Agree with the other cores, `standing` being this one's contribution; see `Agreement`."""
        if self.num_turns:
            goes_on = yield standing.has_work and not standing.is_ready
            verdict = Verdict.RUN if goes_on else Verdict.PAUSE
        else:
            verdict = yield from _opening(standing)
        if verdict is Verdict.RUN:
            self._next_agreement = self.num_turns + (1 if self.num_ranks == 1 else self._agreement_steps)
        else:
            self.running = False
            self.wave += 1
            self.num_turns = 0
        self.is_held_up = verdict is Verdict.HOLD
        self._holds_up = self.is_held_up and standing.is_asleep
        return verdict

    def joined(self, num_ranks: int, wave: int) -> None:
        """Become one of a new group of cores, which has paused; `wave` comes next."""
        self.num_ranks = num_ranks
        self.wave = wave
        self.has_joined = True
        self.is_held_up = self._holds_up = False

    def _has_reason(self, standing: Standing) -> bool:
        if standing.is_leaving or (self._holds_up and not standing.is_asleep):
            return True
        return (standing.has_work or standing.is_ready) and not self.is_held_up


def _opening(standing: Standing) -> Agreement:
    # Nearly always the first question is the only one.
    if not (yield standing.is_asleep or standing.is_ready or standing.is_leaving):
        return Verdict.RUN
    somebody_sleeps = yield standing.is_asleep
    # Newcomers wait for the others already: what has begun with them is finished before all leave.
    if not somebody_sleeps and not (yield not standing.is_ready):
        return Verdict.REGROUP
    if not (yield not standing.is_leaving):
        return Verdict.LEAVE
    return Verdict.HOLD if somebody_sleeps else Verdict.RUN


def greatest_wave(wave: int) -> Generator[bool, bool, int]:
    """Find the greatest `wave` of the cores of a new group, with one question per bit; newcomers have 0."""
    greatest, is_candidate = 0, True
    for bit in reversed(range(WAVE_BITS)):
        has_bit = is_candidate and bool(wave >> bit & 1)
        if (yield has_bit):
            greatest |= 1 << bit
            # A core without this bit has a lower number than one with it.
            is_candidate = has_bit
    return greatest


def conclude(questions: Generator[bool, bool, T], any_rank: Callable[[bool], bool]) -> T:
    """Carry an agreement through; `any_rank` tells whether any core answers with True."""
    try:
        flag = next(questions)
        while True:
            flag = questions.send(any_rank(flag))
    except StopIteration as end:
        outcome: T = end.value
        return outcome
