"""`%generate` and `%%generate`."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError
from nbengine.magics.arguments import HelpRequested
from nbengine.magics.config import NBEngine
from nbengine.magics.generate_arguments import parse_generate
from nbengine.magics.interpolate import interpolate
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.result import GenerationHandle, GenerationResult
from nbengine.magics.session import NotebookSession
from nbengine.magics.submission import Submitter
from nbengine.magics.turn import Turn


@magics_class
class GenerateMagics(Magics):
    """Sends prompts to the notebook's engines."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: NotebookSession, config: NBEngine) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._submitter = Submitter(shell, config, session.ongoing)

    @no_var_expand
    @line_cell_magic
    def generate(self, line: str, cell: str | None = None) -> Any:
        """Send a prompt to the engine; the answer streams into the cell. `%generate -h` lists the flags."""
        __tracebackhide__ = True
        turn = self._begin(line, cell)
        with turn:
            if turn.generation is not None:
                turn.generation.run_blocking()
        return turn.returned

    async def stream(self, line: str, cell: str | None = None) -> Any:
        """`generate`, awaited: what a kernel's top-level cell runs."""
        __tracebackhide__ = True
        turn = self._begin(line, cell)
        with turn:
            if turn.generation is not None:
                await turn.generation.run()
        return turn.returned

    def cancel_background(self) -> None:
        """End all generations that run in the background."""
        for handle in list(self._submitter.background):
            handle.cancel()

    def _begin(self, line: str, cell: str | None) -> Turn:
        __tracebackhide__ = True
        shell, namespace = self.shell, prompt_namespace(self.shell)
        try:
            options = parse_generate(
                line, cell, self._config, lambda text: interpolate(text, namespace), namespace
            )
        except HelpRequested as request:
            print(request)
            return Turn(shell, self._session, None, is_cell=cell is not None)
        engine = self._session.get(options.engine)
        turn = Turn(shell, self._session, engine, is_cell=cell is not None)
        try:
            generation = self._submitter.submit(engine, options)
        except NBEngineError as error:
            raise turn.explained(error) from error.__cause__
        if not options.background:
            turn.generation = generation
            self._bind(options.out, generation.result)
            return turn
        handle = generation.run_in_background(turn.note_death)
        self._submitter.background.add(handle)
        self._bind(options.out, handle)
        turn.keep(handle)
        return turn

    def _bind(self, name: str | None, value: GenerationResult | GenerationHandle) -> None:
        if name is not None:
            self.shell.user_ns[name] = value
