"""`%generate` and `%%generate`."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError
from nbengine.magics.arguments import HelpRequested
from nbengine.magics.comparison.arguments import ComparisonPlan, parse_request
from nbengine.magics.comparison.run import ComparisonRun
from nbengine.magics.comparison.view import grid_view_for
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.arguments import GenerateOptions, generate_parser
from nbengine.magics.generation.rerun import EarlierAnswers
from nbengine.magics.generation.stream import Stream
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.turn import Turn
from nbengine.magics.help import documented
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.session import NotebookSession


@magics_class
class GenerateMagics(Magics):
    """Sends prompts to the notebook's engines."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: NotebookSession, config: NBEngine) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._submitter = Submitter(shell, config, session.ongoing)
        self._earlier = EarlierAnswers(shell)

    @no_var_expand
    @line_cell_magic
    @documented(generate_parser)
    def generate(self, line: str, cell: str | None = None) -> Any:
        """Send a prompt to the engine; the answer streams into the cell."""
        __tracebackhide__ = True
        turn = self._begin(line, cell)
        with turn:
            if turn.generation is not None:
                turn.generation.run_blocking()
        turn.show_diff()
        return turn.returned

    async def stream(self, line: str, cell: str | None = None) -> Any:
        """`generate`, awaited: what a kernel's top-level cell runs."""
        __tracebackhide__ = True
        turn = self._begin(line, cell)
        with turn:
            if turn.generation is not None:
                await turn.generation.run()
        turn.show_diff()
        return turn.returned

    def _begin(self, line: str, cell: str | None) -> Turn:
        __tracebackhide__ = True
        shell, namespace = self.shell, prompt_namespace(self.shell)
        try:
            request = parse_request(line, cell, self._config, namespace)
        except HelpRequested as asked:
            print(asked)
            return Turn(shell, self._session, None, is_cell=cell is not None)
        if isinstance(request, ComparisonPlan):
            return self._begin_comparison(request, is_cell=cell is not None)
        engine = self._session.get(request.engine)
        turn = Turn(shell, self._session, engine, is_cell=cell is not None)
        try:
            generation = self._submitter.submit(engine, request)
        except NBEngineError as error:
            raise turn.explained(error) from error.__cause__
        self._earlier.note([({}, generation)])
        turn.diff = request.diff
        self._run(turn, generation, request)
        return turn

    def _begin_comparison(self, plan: ComparisonPlan, *, is_cell: bool) -> Turn:
        __tracebackhide__ = True
        shell, options = self.shell, plan.options
        prepared = [
            self._submitter.prepare(self._session.get(combination.options.engine), combination.options)
            for combination in plan.combinations
        ]
        view_of = grid_view_for(shell, plan, [request.params for request in prepared])
        session = self._session
        run = ComparisonRun(plan, prepared, view_of, session.ongoing, self._submitter.tell, session.drop)
        turn = Turn(shell, self._session, None, is_cell=is_cell)
        try:
            run.send(foreground=not options.background)
        except NBEngineError as error:
            raise turn.explained(error) from error.__cause__
        self._earlier.note(list(zip(run.result.settings, run.requests, strict=True)))
        self._run(turn, run, options)
        return turn

    def _run(self, turn: Turn, stream: Stream[Any], options: GenerateOptions) -> None:
        """Let the turn wait for it, or nobody."""
        if not options.background:
            turn.generation = stream
            self._bind(options.out, stream.result)
            return
        handle = stream.run_in_background(turn.note_death)
        self._session.ongoing.add_background(handle)
        self._bind(options.out, handle)
        turn.keep(handle)

    def _bind(self, name: str | None, value: object) -> None:
        if name is not None:
            self.shell.user_ns[name] = value
