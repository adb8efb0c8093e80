"""The magics `%generate` and `%%generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError
from nbengine.magics.answers.diff import Earlier
from nbengine.magics.answers.rerun import EarlierAnswers
from nbengine.magics.arguments import HelpRequested
from nbengine.magics.comparison.arguments import ComparisonPlan, parse_request
from nbengine.magics.comparison.run import Comparison, begin_comparison
from nbengine.magics.config import NBEngine
from nbengine.magics.errors import without_traceback
from nbengine.magics.generation.arguments import GenerateOptions, generate_parser
from nbengine.magics.generation.readiness import make_ready
from nbengine.magics.generation.request import send_all
from nbengine.magics.generation.stream import Stream
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.turn import Turn
from nbengine.magics.help import documented
from nbengine.magics.kept_prompts.calls import FindPrompt
from nbengine.magics.kept_runs.recording import Occasion, Recorder
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.session import NotebookSession
from nbengine.widgets.live import in_kernel


@magics_class
class GenerateMagics(Magics):
    """The magics `%generate` and `%%generate`, which send prompts to the notebook's engines."""

    shell: InteractiveShell

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        config: NBEngine,
        recorder: Recorder,
        find_prompt: FindPrompt,
    ) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._recorder = recorder
        self._find_prompt = find_prompt
        self._submitter = Submitter(shell, config, session, recorder)
        self._earlier = EarlierAnswers(shell, recorder)

    @no_var_expand
    @line_cell_magic
    @documented(generate_parser)
    def generate(self, line: str, cell: str | None = None) -> Any:
        """Send a prompt to the engine; the answer streams into the cell."""
        __tracebackhide__ = True
        return self._begin(line, cell).run_blocking()

    async def stream(self, line: str, cell: str | None = None) -> Any:
        """Do what `generate` does, but awaited: a kernel's top-level cell runs this."""
        __tracebackhide__ = True
        return await self._begin(line, cell).run()

    def _begin(self, line: str, cell: str | None) -> Turn:
        __tracebackhide__ = True
        shell, is_cell = self.shell, cell is not None
        try:
            plan = parse_request(line, cell, self._config, prompt_namespace(shell), self._find_prompt)
        except HelpRequested as asked:
            print(asked)
            return Turn(shell, self._session, None, is_cell=is_cell)
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__
        return self.begin(plan, is_cell=is_cell)

    def begin(self, plan: ComparisonPlan, *, is_cell: bool, against: Earlier | None = None) -> Turn:
        """Send the requests of a plan, and return the turn that waits for them.

        `against` is what the answers are compared with; None: what the running cell had before.

        Raises:
            UsageError: a request is not possible.
            NBEngineError: an engine cannot be reached, or has refused all requests.
        """
        __tracebackhide__ = True
        shell = self.shell
        engines = [self._session.get(combination.options.engine) for combination in plan.combinations]
        judge = plan.scores.judge
        judging = None if judge is None or judge.engine is None else self._session.get(judge.engine)
        turn = Turn(shell, self._session, None if plan.axes else engines[0], is_cell=is_cell)
        options = plan.options
        try:
            request = None if plan.axes else self._submitter.prepare(engines[0], options, Occasion())
            if request is None:
                # A line that is refused wakes no engine.
                for engine, combination in zip(engines, plan.combinations, strict=True):
                    self._submitter.check_rank(engine, combination.options)
            # What differs from an earlier answer is shown by the cell that has waited for the new one.
            can_wait = in_kernel(shell) and not options.diff
            asked = engines if judging is None else [*engines, judging]
            if make_ready([engine.client for engine in asked], can_wait=can_wait):
                options = replace(options, background=True)
            note = self._earlier.begin(against, looks_back=options.diff and against is None)
            stream: Stream[Any]
            if request is None:
                stream = begin_comparison(
                    shell,
                    Comparison(plan, engines, uuid4().hex, judging),
                    self._submitter,
                    self._recorder,
                    lambda position, sent: note(plan.combinations[position].settings, sent),
                    foreground=not options.background,
                )
            else:
                send_all([request], foreground=not options.background)
                note({}, request)
                stream = self._submitter.stream(engines[0], request, options)
                turn.diff = options.diff
        except NBEngineError as error:
            raise turn.explained(error) from error.__cause__
        self._run(turn, stream, options)
        return turn

    def _run(self, turn: Turn, stream: Stream[Any], options: GenerateOptions) -> None:
        """Let the turn wait for the stream, or run it in the background."""
        if options.timeout is not None:
            stream.end_after(options.timeout)
        if not options.background:
            turn.generation = stream
            self._bind(options.out, stream.result)
            return
        handle = stream.run_in_background()
        self._session.ongoing.add_background(handle)
        self._bind(options.out, handle)
        turn.keep(handle)

    def _bind(self, name: str | None, value: object) -> None:
        if name is not None:
            self.shell.user_ns[name] = value
