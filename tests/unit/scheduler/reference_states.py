"""Slow slots for recurrent states to compare with: counts, and a list of what can be found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.unit.scheduler.reference import ReferenceRequest


@dataclass
class Checkpoint:
    """A state that can be found."""

    content: object
    worth: int
    credit: int


class ReferenceStates:
    """Slots are equal, so that only their number counts; checkpoints are the prefixes whose state they have."""

    def __init__(self, num_slots: int, num_spare: int) -> None:
        self.num_slots = num_slots
        self.most_running = num_slots - num_spare
        self.running = 0
        self.blank = num_slots
        self.least_recent_first: list[Checkpoint] = []
        self.spent = 0
        """The greatest credit of a checkpoint that has gone."""
        self.pinned: list[object] = []
        """Checkpoints that the step being planned starts from."""
        self.makers: list[ReferenceRequest] = []

    def num_free(self) -> int:
        return self.blank + len(self.least_recent_first)

    def num_admissible(self) -> int:
        return min(self.num_free(), self.most_running - self.running)

    def find(self, content: object) -> Checkpoint | None:
        return next((each for each in self.least_recent_first if each.content == content), None)

    def use(self, content: object, worth: int) -> None:
        found = self.find(content)
        assert found is not None
        self.least_recent_first.remove(found)
        worth = max(worth, found.worth)
        self.least_recent_first.append(Checkpoint(content, worth, self.spent + worth))

    def take_one(self, worth: int | None = None) -> bool:
        if self.blank:
            self.blank -= 1
            return True
        candidates = [each for each in self.least_recent_first if each.content not in self.pinned]
        if not candidates:
            return False
        first = min(candidates, key=lambda each: (each.credit, each.worth))
        if worth is not None and self.spent + worth < first.credit:
            return False
        self.spent = max(self.spent, first.credit)
        self.least_recent_first.remove(first)
        return True

    def start(self, content: object | None, worth: int) -> bool:
        """Take a slot for a request that starts from a checkpoint, or from zeros; return whether there is one."""
        kept = self.pinned + ([] if content is None or content in self.pinned else [content])
        if self.running == self.most_running:
            return False
        if not self.blank and len(self.least_recent_first) == len(kept):
            return False
        if content is not None:
            self.use(content, worth)
            self.pinned = kept
        self.running += 1
        return self.take_one()

    def keep(self, content: object, worth: int) -> None:
        """Let a state that was made be found; its slot goes back if there is one like it."""
        if self.find(content) is not None:
            self.blank += 1
            self.use(content, worth)
        else:
            self.least_recent_first.append(Checkpoint(content, worth, self.spent + worth))

    def end(self, known: list[tuple[object, int]], num_made: int) -> None:
        """Take back the slot of a request, and those of what it has made and nobody can know."""
        for content, worth in known:
            self.keep(content, worth)
        self.running -= 1
        self.blank += 1 + num_made - len(known)

    def give_up(self, content: object) -> None:
        """Forget a checkpoint whose block is gone, if there is one and no request starts from it."""
        found = self.find(content)
        if found is not None and content not in self.pinned:
            self.least_recent_first.remove(found)
            self.blank += 1

    def forget_all(self) -> None:
        self.blank += len(self.least_recent_first)
        self.least_recent_first = []
        self.pinned = []
        self.spent = 0


def num_spare(num_slots: int, max_num_seqs: int, *, caching: bool) -> int:
    """Count the slots that no request may have."""
    if not caching or num_slots < 2:
        return 0
    return max(1, num_slots // 4, num_slots - max_num_seqs)


def power_of_two_below(place: int) -> int:
    return max(2**k for k in range(20) if 2**k <= place)


def worth_of_likely(place: int) -> int:
    return 4 * min(power_of_two_below(place), 1024)


@dataclass
class ReferenceRule:
    """Where the state is kept of a request, and how much each place is worth, place by place."""

    block_size: int
    finest: int
    most_regular: int

    def spacing(self, length: int) -> int:
        powers = (self.finest * 2**k for k in range(20))
        return next(s for s in powers if s > length or length // s <= self.most_regular)

    def worth(self, place: int, num_prompt: int, fork: int) -> int:
        """Return the worth of the state after that number of tokens, at the end of a block; 0: it is not kept."""
        size, finest = self.block_size, self.finest
        last = max((p for p in range(0, num_prompt, size)), default=0)
        if place == last or (place == fork and place <= last):
            return worth_of_likely(place)
        worth = 0
        if place % self.spacing(max(num_prompt, place)) == 0:
            worth = max(finest * 2**k for k in range(20) if place % (finest * 2**k) == 0)
        distances = [finest * 2**k for k in range(20) if finest * 2**k < min(last, self.spacing(num_prompt))]
        for distance in distances:
            if place <= last - distance < place + size:
                worth = max(worth, distance)
        return min(worth, 1024)
