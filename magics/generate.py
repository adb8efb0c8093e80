"""`%generate` and `%%generate`."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.magics.arguments import CALLER_ERRORS, HelpRequested
from nbengine.magics.config import NBEngine
from nbengine.magics.errors import without_traceback
from nbengine.magics.generate_arguments import GenerateOptions, parse_generate, sampling_params
from nbengine.magics.interpolate import interpolate
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.result import GenerationHandle, GenerationResult
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.magics.stream import Generation
from nbengine.magics.view import view_for
from nbengine.widgets.live import in_kernel


@magics_class
class GenerateMagics(Magics):
    """Sends prompts to the notebook's engines."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: NotebookSession, config: NBEngine) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._handles: weakref.WeakSet[GenerationHandle] = weakref.WeakSet()

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
        for handle in list(self._handles):
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
            generation = self._submit(engine, options)
        except NBEngineError as error:
            raise turn.explained(error) from error.__cause__
        if not options.background:
            turn.generation = generation
            self._bind(options.out, generation.result)
            return turn
        handle = generation.run_in_background(turn.note_death)
        self._handles.add(handle)
        self._bind(options.out, handle)
        turn.keep(handle)
        return turn

    def _submit(self, engine: AttachedEngine, options: GenerateOptions) -> Generation:
        client = engine.client
        if options.rank is not None and options.rank not in client.engine_ranks:
            ranks = ", ".join(map(str, client.engine_ranks))
            raise UsageError(
                f"-t {options.rank}: the engine cores of engine {engine.name!r} have the ranks {ranks}"
            )
        params = sampling_params(options, client.default_sampling_params(), self._config)
        collector = client.submit(self._prompt(engine, options), params, data_parallel_rank=options.rank)
        view = view_for(
            self.shell,
            options.format,
            stream=options.stream,
            footer=options.footer,
            background=options.background,
        )
        generation = Generation(collector, options.prompt, view, client.abort_soon)
        generation.result.is_json = options.parse_json
        generation.result.names_ranks = len(client.engine_ranks) > 1
        return generation

    def _prompt(self, engine: AttachedEngine, options: GenerateOptions) -> Any:
        client = engine.client
        chat = client.has_chat_template if options.chat is None else options.chat
        if not chat:
            if options.system is not None:
                raise UsageError(f"--system: the model of engine {engine.name!r} has no chat template")
            return options.prompt
        if not client.has_chat_template:
            raise UsageError(f"--chat: the model of engine {engine.name!r} has no chat template")
        system = self._config.system if options.system is None else options.system
        messages = [{"role": "system", "content": system}] if system is not None else []
        return client.render_chat([*messages, {"role": "user", "content": options.prompt}])

    def _bind(self, name: str | None, value: GenerationResult | GenerationHandle) -> None:
        if name is not None:
            self.shell.user_ns[name] = value


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
        self.generation: Generation | None = None
        self.returned: Any = None
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

    def keep(self, value: GenerationResult | GenerationHandle, *, failed: bool = False) -> None:
        """Put the result where the user finds it."""
        if self._is_cell or failed:
            hook: Any = self._shell.displayhook
            hook.update_user_ns(value)
            hook.fill_exec_result(value)
            return
        if isinstance(value, GenerationResult) and in_kernel(self._shell):
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
