"""One run of a magic that generates: what it waits for, what it leaves behind, how its errors look."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.magics.arguments import CALLER_ERRORS
from nbengine.magics.errors import without_traceback
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.stream import Stream
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.widgets.live import in_kernel, publish


@runtime_checkable
class Streamed(Protocol):
    """A value that has been shown already when the cell ends."""

    def silence_once(self) -> None:
        """Let the next display pass in silence."""


class Turn:
    """One run of the magic: a context manager around its waiting, which keeps the result whatever happens.

    `returned` is what the magic returns. A cell magic's result goes into `_` and `Out` in silence; a line magic's is
    returned, since the line may be an assignment.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        engine: AttachedEngine | None,
        *,
        is_cell: bool,
    ) -> None:
        self.generation: Stream[Any] | None = None
        self.returned: Any = None
        self.diff = False
        """Show, in the end, what differs from the cell's previous answer."""
        self._shell = shell
        self._session = session
        self._engine = engine
        self._is_cell = is_cell

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if self.generation is not None:
            self.keep(self.generation.result, failed=error is not None)
        if isinstance(error, NBEngineError):
            raise self.explained(error) from error.__cause__

    def show_diff(self) -> None:
        """Show what differs from the cell's previous answer, if that is asked for."""
        if not self.diff or self.generation is None:
            return
        result: GenerationResult = self.generation.result
        if result.previous is None:
            publish(self._shell, "[--diff: there was no answer before to compare with]")
            return
        diff = result.diff()
        publish(self._shell, str(diff), diff.html)

    def keep(self, value: object, *, failed: bool = False) -> None:
        """Put the result where the user finds it."""
        if self._is_cell or failed:
            hook: Any = self._shell.displayhook
            hook.update_user_ns(value)
            hook.fill_exec_result(value)
            return
        if isinstance(value, Streamed) and in_kernel(self._shell):
            value.silence_once()
        self.returned = value

    def explained(self, error: NBEngineError) -> Exception:
        """The error as the user should see it; an engine that has died leaves the session."""
        if isinstance(error, CALLER_ERRORS):
            return UsageError(str(error))
        self.note_death(error)
        return without_traceback(error)

    def note_death(self, error: NBEngineError) -> None:
        """Drop the engine if it is dead."""
        if self._engine is not None and isinstance(error, EngineDeadError):
            self._session.drop(self._engine)
