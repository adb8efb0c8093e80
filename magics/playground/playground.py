"""A playground: what its widget asks for is sent to engines, kept as a prompt, or written as code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.frontend.prompts.prompt import Prompt
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.arguments import GenerateOptions
from nbengine.magics.generation.readiness import wake_if_asleep
from nbengine.magics.generation.result import GenerationHandle
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.kept_prompts.shelf import Shelf
from nbengine.magics.kept_prompts.view import kept_line
from nbengine.magics.kept_runs.recording import Occasion
from nbengine.magics.namespace import notebook_name, prompt_namespace
from nbengine.magics.playground.drafts import State, as_cell, as_python, is_plain, options_of_side, prompt_of
from nbengine.magics.playground.side import Side
from nbengine.magics.session import NotebookSession

Frame = dict[str, Any]
NUM_SIDES = 2
_CELL_NOTE = (
    "It is copied: paste it into a cell, or run any cell, and the notebook puts it below that one (JupyterLab, "
    "Notebook, VS Code)."
)


class _Hello(msgspec.Struct, tag_field="kind", tag="hello"):
    pass


class _Read(msgspec.Struct, tag_field="kind", tag="read"):
    text: str


class _Run(msgspec.Struct, tag_field="kind", tag="run"):
    side: int
    state: State


class _Stop(msgspec.Struct, tag_field="kind", tag="stop"):
    side: int


class _Keep(msgspec.Struct, tag_field="kind", tag="keep"):
    state: State


class _Cell(msgspec.Struct, tag_field="kind", tag="cell"):
    side: int
    state: State


class _Python(msgspec.Struct, tag_field="kind", tag="python"):
    side: int
    state: State


class Widget(Protocol):
    """The part of `PlaygroundWidget` that a playground uses."""

    state: Frame
    answers: Sequence[Frame]

    def send(self, content: Frame) -> None:
        """Send a message to the script."""


class Playground:
    """The kernel's side of a widget; it asks as `%generate` does, and its runs are kept like any others."""

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        config: NBEngine,
        submitter: Submitter,
        shelf: Shelf,
    ) -> None:
        self.widget: Widget | None = None
        self._shell = shell
        self._session = session
        self._config = config
        self._submitter = submitter
        self._shelf = shelf
        self._sides = [Side(number, self._send, self._keep_answers) for number in range(NUM_SIDES)]

    def receive(self, content: object) -> None:
        """Do what the script asks for; what is not possible is told in the widget.

        Raises:
            msgspec.ValidationError: the content is nothing that the script sends.
        """
        request = msgspec.convert(content, _Hello | _Read | _Run | _Stop | _Keep | _Cell | _Python)
        try:
            self._carry_out(request)
        except (UsageError, NBEngineError) as error:
            self._refuse(request, str(error))

    def close(self) -> None:
        """End the answers that are being written."""
        for side in self._sides:
            side.stop()

    def _carry_out(self, request: object) -> None:
        match request:
            case _Hello():
                self._send({"kind": "reset", **self._reset()})
            case _Read(text=text):
                self._send({"kind": "read", **_variables_of(text)})
            case _Run(side=side, state=state):
                self._run(self._sides[side], side, state)
            case _Stop(side=side):
                self._sides[side].stop()
            case _Keep(state=state):
                self._notice(kept_line(*self._keep(state)))
            case _Cell(side=side, state=state):
                self._insert(side, state)
            case _Python(side=side, state=state):
                options = self._options(side, state)
                engine = self._session.get(options.engine)
                assert options.kept is not None
                text = as_python(options, options.kept, engine, self._config)
                self._send({"kind": "code", "what": "python", "text": text, "note": "It is copied."})

    def _refuse(self, request: object, error: str) -> None:
        if isinstance(request, _Run):
            self._sides[request.side].fail(error)
        else:
            self._notice(error, error=True)

    def _options(self, side: int, state: State) -> GenerateOptions:
        return options_of_side(state, side, self._config, prompt_namespace(self._shell))

    def _run(self, side: Side, number: int, state: State) -> None:
        if side.is_running:
            return
        options = replace(self._options(number, state), background=True)
        engine = self._session.get(options.engine)
        wake_if_asleep(engine.client)
        request = self._submitter.prepare(engine, options, Occasion())
        side.begin()
        request.send(foreground=False)
        stream = self._submitter.stream(engine, request, options, own=side)
        handle = stream.run_in_background()
        assert isinstance(handle, GenerationHandle)
        side.handle = handle
        self._session.ongoing.add_background(handle)

    def _keep(self, state: State) -> tuple[Prompt, str]:
        prompt = prompt_of(state)
        return self._shelf.keep(replace(prompt, notebook=notebook_name(self._shell)))

    def _insert(self, side: int, state: State) -> None:
        prompt = prompt_of(state)
        self._options(side, state)
        if not is_plain(prompt):
            prompt, _ = self._keep(state)
        text = as_cell(prompt, state, side)
        self._shell.set_next_input(text)
        self._send({"kind": "code", "what": "cell", "text": text, "note": _CELL_NOTE})

    def _reset(self) -> Frame:
        text = "" if self.widget is None else str(self.widget.state.get("text", ""))
        engines = [engine.name for engine in self._session.engines]
        return {**_variables_of(text), "engines": engines, "sides": [side.whole() for side in self._sides]}

    def _notice(self, text: str, *, error: bool = False) -> None:
        self._send({"kind": "notice", "text": text, "error": error})

    def _keep_answers(self) -> None:
        if self.widget is not None:
            self.widget.answers = [side.whole() for side in self._sides]

    def _send(self, frame: Frame) -> None:
        if self.widget is not None:
            self.widget.send(frame)


def _variables_of(text: str) -> Frame:
    """Return the variables of a text, or why it is no prompt."""
    if not text.strip():
        return {"variables": [], "error": ""}
    try:
        return {"variables": list(Prompt("playground", text).variables), "error": ""}
    except NBEngineError as error:
        return {"variables": [], "error": str(error)}
