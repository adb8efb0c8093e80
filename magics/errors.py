"""The appearance of errors in a notebook."""

from __future__ import annotations

from nbengine.errors import NBEngineError


def without_traceback(error: NBEngineError) -> NBEngineError:
    """Return the error, which from now on is shown as its message alone: a magic's frames explain nothing.

    The text before the cause, such as the end of the engine's log, is shown above the error's name.
    """
    text = str(error)
    cause: str = getattr(error, "cause", text)
    shown = f"{text.removesuffix(cause)}{type(error).__name__}: {cause}"
    # IPython calls this attribute to let an exception render itself.
    error.__dict__["_render_traceback_"] = lambda: [shown]
    return error.with_traceback(None)
