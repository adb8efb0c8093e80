"""The fixed pool of slots for recurrent state: those of running requests, and checkpoints that can be found."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

from nbengine.errors import NBEngineError

NO_SLOT = -1
"""The number that stands for no slot; a state that starts from it starts from zeros."""


class StatePool:
    """`num_slots` slots, identified by the integers from 0 to `num_slots - 1`, each with room for the state of
    all recurrent layers of one request.

    A slot is blank, held, or a *checkpoint*: a state that can be found by the hash of the block at whose end
    it was. A checkpoint is nobody's, and a request that starts from it copies it. A step reads the checkpoints that
    it starts from while it writes others, so those stay until the next step is planned.

    Blank slots are handed out first, then those of the checkpoints with the least *credit*, which is their worth on
    top of the greatest credit of one that has gone. It is given again at each use, so that a checkpoint which is
    worth twice as much stays twice as long without use; among those of one worth the least recently used goes
    first. (This is the GreedyDual policy.)
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # The top of the stack is its end: slot 0 is handed out first.
        self._blank = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[bytes, int] = {}
        """The checkpoints."""
        self._worth_of: dict[bytes, int] = {}
        self._credits: defaultdict[int, OrderedDict[bytes, int]] = defaultdict(OrderedDict)
        """The credits of the checkpoints of each worth, from the least to the most recently used. They ascend."""
        self._spent = 0
        """The greatest credit of a checkpoint that has gone."""
        self._pinned: set[int] = set()
        """The checkpoints from which requests of the step that is being planned start."""

    @property
    def num_free_slots(self) -> int:
        """Return the number of slots that nobody holds, checkpoints included."""
        return len(self._blank) + len(self._slot_of)

    @property
    def num_checkpoints(self) -> int:
        """Return the number of checkpoints."""
        return len(self._slot_of)

    def begin_step(self) -> None:
        """Let the checkpoints go that the step before has started from."""
        self._pinned.clear()

    def find(self, block_hash: bytes) -> int | None:
        """Return the checkpoint at the end of a block, None if there is none."""
        return self._slot_of.get(block_hash)

    def touch(self, block_hash: bytes, worth: int = 0) -> None:
        """Take note that a checkpoint is of use, and worth at least that much."""
        before = self._worth_of[block_hash]
        del self._credits[before][block_hash]
        self._enter(block_hash, max(before, worth))

    def pin(self, block_hash: bytes, worth: int = 0) -> int:
        """Return the checkpoint at the end of a block, and keep it until the next step is planned."""
        self.touch(block_hash, worth)
        slot = self._slot_of[block_hash]
        self._pinned.add(slot)
        return slot

    def can_take(self, besides: bytes | None = None) -> bool:
        """Tell whether `take` would give a slot if the checkpoint `besides` were pinned."""
        kept = self._pinned
        if besides is not None:
            kept = kept | {self._slot_of[besides]}
        return bool(self._blank) or len(self._slot_of) > len(kept)

    def take(self, worth: int | None = None) -> int | None:
        """Take a blank slot, or that of the checkpoint with the least credit; None if there is neither.

        A slot for a checkpoint that would be worth `worth` is not taken from one that has more credit than that
        would get.
        """
        if self._blank:
            return self._blank.pop()
        found = self._least_credit()
        if found is None:
            return None
        credit, block_hash = found
        if worth is not None and self._spent + worth < credit:
            return None
        self._spent = max(self._spent, credit)
        return self._remove(block_hash)

    def free(self, slot: int) -> None:
        """Give back a held slot; nothing can find what it has."""
        self._blank.append(slot)

    def keep(self, slot: int, block_hash: bytes, worth: int = 0) -> None:
        """Make a checkpoint of a held slot, unless there is one with the same state."""
        if block_hash in self._slot_of:
            self._blank.append(slot)
            self.touch(block_hash, worth)
        else:
            self._slot_of[block_hash] = slot
            self._enter(block_hash, worth)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Make these checkpoints, as far as there are any, blank."""
        for block_hash in hashes:
            if block_hash in self._slot_of:
                slot = self._remove(block_hash)
                self._pinned.discard(slot)
                self._blank.append(slot)

    def discard(self, block_hash: bytes) -> None:
        """Make a checkpoint blank, if there is one, unless a request of the step starts from it."""
        slot = self._slot_of.get(block_hash)
        if slot is not None and slot not in self._pinned:
            self._blank.append(self._remove(block_hash))

    def forget_all(self) -> bool:
        """Make every slot blank and return True, or return False while any is held."""
        if self.num_free_slots < self.num_slots:
            return False
        self.forget(list(self._slot_of))
        self._spent = 0
        return True

    def check_integrity(self, held: Sequence[int]) -> None:
        """Check that each slot is held once, blank once or a checkpoint.

        Raises:
            NBEngineError: a slot is lost, or is in two places; or a checkpoint has no credit.
        """
        found = sorted([*held, *self._blank, *self._slot_of.values()])
        if found != list(range(self.num_slots)):
            raise NBEngineError(
                f"recurrent state: of {self.num_slots} slots {sorted(held)} are held, {sorted(self._blank)} "
                f"blank and {sorted(self._slot_of.values())} checkpoints"
            )
        if not self._pinned <= set(self._slot_of.values()):
            raise NBEngineError(f"recurrent state: slots {self._pinned} are pinned and no checkpoints")
        worths = {name: worth for worth, credits in self._credits.items() for name in credits}
        if worths != self._worth_of or worths.keys() != self._slot_of.keys():
            raise NBEngineError("recurrent state: the checkpoints and their credits disagree")

    def _enter(self, block_hash: bytes, worth: int) -> None:
        self._worth_of[block_hash] = worth
        self._credits[worth][block_hash] = self._spent + worth

    def _remove(self, block_hash: bytes) -> int:
        del self._credits[self._worth_of.pop(block_hash)][block_hash]
        return self._slot_of.pop(block_hash)

    def _least_credit(self) -> tuple[int, bytes] | None:
        """Return the credit and the hash of the checkpoint that goes first, the one of less worth if two have the
        same credit; None if all are pinned. There are few different worths."""
        least: tuple[int, int, bytes] | None = None
        for worth, credits in self._credits.items():
            for block_hash, credit in credits.items():
                if self._slot_of[block_hash] not in self._pinned:
                    if least is None or (credit, worth) < least[:2]:
                        least = credit, worth, block_hash
                    break
        return None if least is None else (least[0], least[2])
