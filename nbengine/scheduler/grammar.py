"""What the scheduler knows of a request's grammar, whichever library is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Grammar(Protocol):
    """Follows one request's output through its grammar. Preemption leaves it where it is."""

    @property
    def error(self) -> str:
        """Why a token was refused; empty as long as none was."""

    def accept_tokens(self, token_ids: list[int]) -> bool:
        """Advance by what was sampled; False: a token is not allowed, and the output cannot go on."""

    def is_terminated(self) -> bool:
        """Whether the output has come to its end: the end-of-sequence token was accepted."""


class GrammarMaskBuilder(Protocol):
    """Builds the masks of a step for many grammars at once."""

    def fill_bitmasks(self, grammars: Sequence[Grammar]) -> NDArray[np.int32]:
        """Return one row a grammar, in a buffer that the next call overwrites."""
