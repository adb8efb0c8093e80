"""One run of a magic that generates: its waiting, the result that it leaves, and its errors."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.magics.arguments import CALLER_ERRORS
from nbengine.magics.errors import without_traceback
from nbengine.magics.generation.result import GenerationResult, ShownOnce
from nbengine.magics.generation.stream import Stream
from nbengine.magics.generation.waiting import Wait, awaited, awaited_elsewhere, without_a_loop
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.widgets.live import in_kernel, publish


class Turn:
    """One run of the magic: a context manager around its waiting, which keeps the result whatever happens.

    `returned` is the magic's return value. A cell magic's result goes into `_` and `Out` without a display; a
    line magic's is returned, since the line may be an assignment.
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
        """The turn ends by showing what differs from the cell's previous answer."""
        self._shell = shell
        self._session = session
        self._engine = engine
        self._is_cell = is_cell

    def run_blocking(self) -> Any:
        """Wait for the answer in this thread, and return the magic's value."""
        __tracebackhide__ = True
        with self:
            while self.generation is not None:
                self.generation.run_blocking()
                if not without_a_loop(self.go_on(awaited_elsewhere)):
                    break
        return self._shown()

    async def run(self) -> Any:
        """Do what `run_blocking` does, but awaited: a kernel's top-level cell runs this."""
        __tracebackhide__ = True
        with self:
            while self.generation is not None:
                await self.generation.run()
                if not await self.go_on(awaited):
                    break
        return self._shown()

    async def go_on(self, wait: Wait) -> bool:
        """Begin another generation when one has ended, and return whether there is one: here there is none.

        `wait` waits for what an awaitable brings.
        """
        del wait
        return False

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

    def _shown(self) -> Any:
        """Show how the answer differs from the cell's previous one if the line asks for that."""
        if self.diff and self.generation is not None:
            result: GenerationResult = self.generation.result
            if result.previous is None:
                publish(self._shell, "[--diff: there was no answer before to compare with]")
            else:
                diff = result.diff()
                publish(self._shell, str(diff), diff.html)
        return self.returned

    def keep(self, value: object, *, failed: bool = False) -> None:
        """Put the result where the user finds it."""
        if self._is_cell or failed:
            hook: Any = self._shell.displayhook
            hook.update_user_ns(value)
            hook.fill_exec_result(value)
            return
        if isinstance(value, ShownOnce) and in_kernel(self._shell):
            value.silence_once()
        self.returned = value

    def explained(self, error: NBEngineError) -> Exception:
        """Return the error as the user should see it; an engine that has died leaves the session."""
        if isinstance(error, CALLER_ERRORS):
            return UsageError(str(error))
        if self._engine is not None and isinstance(error, EngineDeadError):
            self._session.drop(self._engine)
        return without_traceback(error)
