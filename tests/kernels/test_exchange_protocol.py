"""The protocol of the exchanges, gone through exhaustively: every order in which ranks can take their steps.

A step is one access to shared memory; writing and reading a slot take two, a beginning and an end, so that they
can overlap. What orders accesses on real processors is release and acquire, see `nbengine.kernels.cpu.flags`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from nbengine.kernels.cpu.exchange import SLOTS

TORN = -1


class Wrong(Exception):
    """A rank has read something else than the phase it is in."""


@dataclass(frozen=True)
class Protocol:
    """The steps of one phase, as written in `nbengine.kernels.cpu.exchange` unless changed."""

    size: int
    slots: int = SLOTS
    flag_first: bool = False
    waits: bool = True

    def steps(self) -> list[tuple[str, int]]:
        write = [("begin write", 0), ("end write", 0)]
        flag = [("raise", 0)]
        start = flag + write if self.flag_first else write + flag
        waits = [("wait", rank) for rank in range(self.size)] if self.waits else []
        reads = [(verb, rank) for rank in range(self.size) for verb in ("begin read", "end read")]
        return start + waits + reads


@dataclass(frozen=True)
class State:
    """Of all ranks: how many steps they have taken, their flags, and which phase's data their slots hold."""

    taken: tuple[int, ...]
    flags: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


def put(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def successors(protocol: Protocol, state: State, phases: int) -> Iterator[State]:
    steps = protocol.steps()
    for rank in range(protocol.size):
        before, index = divmod(state.taken[rank], len(steps))
        phase = before + 1
        if phase > phases:
            continue
        verb, other = steps[index]
        after = replace(state, taken=put(state.taken, rank, state.taken[rank] + 1))
        slot = phase % protocol.slots
        if verb in ("begin write", "end write"):
            content = TORN if verb == "begin write" else phase
            yield replace(after, slots=put(after.slots, rank, put(after.slots[rank], slot, content)))
        elif verb == "raise":
            yield replace(after, flags=put(after.flags, rank, phase))
        elif verb == "wait":
            if state.flags[other] >= phase:
                yield after
        else:
            if state.slots[other][slot] != phase:
                raise Wrong(f"rank {rank} reads {state.slots[other][slot]} of rank {other} in phase {phase}")
            yield after


def explore(protocol: Protocol, phases: int) -> int:
    """Visit every state; how many there are. Raises `Wrong`; fails if ranks wait for each other without end."""
    size, slots = protocol.size, protocol.slots
    start = State((0,) * size, (0,) * size, ((0,) * slots,) * size)
    seen, todo = {start}, [start]
    finished = phases * len(protocol.steps())
    while todo:
        state = todo.pop()
        following = list(successors(protocol, state, phases))
        assert following or all(taken == finished for taken in state.taken), f"stuck in {state}"
        new = set(following) - seen
        seen |= new
        todo += new
    return len(seen)


@pytest.mark.parametrize(("size", "phases"), [(2, 6), (3, 3)])
def test_in_every_order_of_steps_each_rank_reads_what_the_phase_is_about(size, phases):
    assert explore(Protocol(size), phases) > 100


@pytest.mark.parametrize(
    "changed", [{"slots": 1}, {"flag_first": True}, {"waits": False}], ids=lambda changed: next(iter(changed))
)
def test_the_search_finds_what_is_wrong_with_other_protocols(changed):
    with pytest.raises(Wrong):
        explore(Protocol(2, **changed), 3)


WAITER = ("sign up", "fence and look", "sleep unless it has changed")
OWNER = ("raise", "fence and look", "wake")


def lost_wake_ups(owner: tuple[str, ...]) -> int:
    """In how many orders the waiter sleeps on although the flag has been raised and the owner is done."""
    lost = 0
    todo = [
        (0, 0, 0, 0, None, False)
    ]  # steps of waiter and owner, sleepers, count, what the owner saw, asleep
    while todo:
        waiter, owned, sleepers, count, saw, asleep = todo.pop()
        moves = []
        if waiter < len(WAITER):
            step = WAITER[waiter]
            if step == "sign up":
                moves.append((1, owned, 1, count, saw, False))
            elif step == "fence and look":
                moves.append((2 if count == 0 else 3, owned, sleepers, count, saw, False))
            else:
                moves.append((3, owned, sleepers, count, saw, count == 0))
        if owned < len(owner):
            step = owner[owned]
            if step == "raise":
                moves.append((waiter, owned + 1, sleepers, 1, saw, asleep))
            elif step == "fence and look":
                moves.append((waiter, owned + 1, sleepers, count, sleepers, asleep))
            else:
                moves.append((waiter, owned + 1, sleepers, count, saw, asleep and not saw))
        lost += not moves and asleep
        todo += moves
    return lost


def test_no_wake_up_is_lost_in_any_order():
    assert lost_wake_ups(OWNER) == 0


def test_a_wake_up_would_be_lost_if_the_owner_looked_for_sleepers_first():
    assert lost_wake_ups(("fence and look", "raise", "wake")) > 0
