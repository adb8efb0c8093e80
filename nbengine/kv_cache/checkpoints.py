"""The places of a sequence at which the state of recurrent layers is kept for others, and what each is worth."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_FINEST_TOKENS = 64
"""To copy a state takes about a hundredth of the time in which this many tokens are computed."""
_MOST_WORTH = 1024
_LIKELY = 4
"""The next prompt goes on this many times as often from a place where one has ended or parted from others as
from any other place."""


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """The rule that says where checkpoints are made, all at the ends of blocks, and what they are worth.

    Without a checkpoint, tokens from the one before it on are computed again. So it is *worth* the number of these
    tokens, `_LIKELY` times that where it is likely to be found. There is one

    - at the end of the last block that a repetition of the prompt could reuse: the next turn of a conversation and
      an edited end start from it;
    - where the prompt parts from earlier ones, if they left keys and values there and no checkpoint: another edit
      of the same place starts from it;
    - at regular places, for edits anywhere. Like the marks of a ruler, every second one is worth `finest` tokens,
      every second of the others twice as many, and so on: as checkpoints of little worth go first, those that
      stay are spread evenly;
    - before the last one, at distances that double, where the regular ones are farther apart.
    """

    block_size: int
    finest: int
    """The least distance of regular checkpoints, a multiple of `block_size`."""
    most_regular: int
    """The most regular checkpoints of a request: their distance is doubled until they are no more."""

    @classmethod
    def of(cls, block_size: int, num_spare_slots: int, state_tokens: int) -> CheckpointRule:
        """Return the rule for a pool that has `num_spare_slots` slots beside those of the running requests, and
        whose states weigh as much as the keys and values of `state_tokens` tokens; 0 if there are none.

        A state that weighs little is kept as often as tokens weigh as much, at the end of every block at most. The
        others are kept as often as copying them takes little time. One request makes regular checkpoints in up to
        three quarters of the spare slots.
        """
        tokens = min(state_tokens or _MOST_FINEST_TOKENS, _MOST_FINEST_TOKENS)
        return cls(block_size, -(-tokens // block_size) * block_size, num_spare_slots * 3 // 4)

    def spacing(self, length: int) -> int:
        """Return the distance of regular checkpoints of a request of `length` tokens."""
        spacing = self.finest
        while spacing <= length and length // spacing > self.most_regular:
            spacing *= 2
        return spacing

    def places(self, num_prompt_tokens: int, start: int, end: int, fork: int = 0) -> dict[int, int]:
        """Return the numbers of tokens in (start, end] after which the state is kept, with the worth of each.

        `fork` is the number of tokens after which the prompt parts from earlier ones; 0: nobody knows.
        """
        # Most steps compute one token, and end no block.
        if end // self.block_size == start // self.block_size:
            return {}
        wanted = self._regular(num_prompt_tokens, start, end)
        last = (num_prompt_tokens - 1) // self.block_size * self.block_size
        distance, spacing = self.finest, self.spacing(num_prompt_tokens)
        while distance < min(spacing, last):
            place = (last - distance) // self.block_size * self.block_size
            if start < place <= end:
                wanted[place] = max(wanted.get(place, 0), min(distance, _MOST_WORTH))
            distance *= 2
        for place in (fork, last):
            if start < place <= min(end, last):
                wanted[place] = self.likely_worth(place)
        return wanted

    def likely_worth(self, place: int) -> int:
        """Return the worth of a checkpoint after `place` tokens from which others have gone on, or probably will:
        without it, all of them might have to be computed again."""
        return _LIKELY * min(1 << (place.bit_length() - 1), _MOST_WORTH)

    def _regular(self, num_prompt_tokens: int, start: int, end: int) -> dict[int, int]:
        found = {}
        # The checkpoints of a long answer must be farther apart than those of its prompt.
        spacing = self.spacing(max(num_prompt_tokens, start + 1))
        for place in range((start // spacing + 1) * spacing, end + 1, spacing):
            if place % self.spacing(max(num_prompt_tokens, place)) == 0:
                mark = place // self.finest
                found[place] = min(self.finest * (mark & -mark), _MOST_WORTH)
        return found
