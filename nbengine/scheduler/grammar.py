"""The scheduler's view of a request's grammar, independent of the library behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Grammar(Protocol):
    """The grammar of one request, which follows the request's output. A preemption leaves it where it is."""

    @property
    def error(self) -> str:
        """Say why a token was refused; empty until one was."""

    def accept_tokens(self, token_ids: list[int]) -> bool:
        """Advance by the sampled tokens; return False if one is refused, so that the output cannot go on."""

    def is_terminated(self) -> bool:
        """Tell whether the output has come to its end: the end-of-sequence token was accepted."""

    def is_free(self, num_unknown: int) -> bool:
        """Tell whether any token may come behind `num_unknown` further tokens, whatever these are."""

    @property
    def is_over(self) -> bool:
        """Tell whether any token may come from now on, so that nobody need ask the grammar again."""


class GrammarMaskBuilder(Protocol):
    """A builder of the masks of a step, for many grammars at once."""

    def fill_bitmasks(self, grammars: Sequence[Grammar]) -> NDArray[np.int32]:
        """Return one row per grammar, in a buffer that the next call overwrites."""
