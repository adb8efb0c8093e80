"""How errors look in a notebook."""

from __future__ import annotations

from nbengine.errors import NBEngineError


def without_traceback(error: NBEngineError) -> NBEngineError:
    """Return the error, from now on shown as its message: the frames of a magic explain nothing.

    What comes before the cause, such as the end of the engine's log, is shown above the error's name.
    """
    text = str(error)
    cause: str = getattr(error, "cause", text)
    shown = f"{text.removesuffix(cause)}{type(error).__name__}: {cause}"
    # IPython's way to let an exception look as it wants to.
    error.__dict__["_render_traceback_"] = lambda: [shown]
    return error.with_traceback(None)
