"""A question to the user before something is done."""

from __future__ import annotations

from IPython.core.error import StdinNotImplementedError, UsageError

from nbengine.magics.interrupts import interruptible


def confirmed(question: str, refusal: str) -> bool:
    """Ask the user, and return whether the answer is yes; `refusal` explains a frontend that cannot ask.

    Raises:
        UsageError: the frontend cannot ask.
    """
    try:
        with interruptible():
            reply = input(f"{question} [y/N] ")
    except StdinNotImplementedError:
        raise UsageError(refusal) from None
    return reply.strip().lower() in ("y", "yes")
