"""The magic `%playground`."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError
from nbengine.magics.arguments import CALLER_ERRORS, HelpRequested, split_words
from nbengine.magics.config import NBEngine
from nbengine.magics.errors import without_traceback
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.help import documented
from nbengine.magics.kept_prompts.shelf import Shelf
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.magics.playground.arguments import playground_parser
from nbengine.magics.playground.controls import controls
from nbengine.magics.playground.playground import NUM_SIDES, Playground
from nbengine.magics.session import NotebookSession
from nbengine.widgets.live import in_kernel, publish_bundle

_MOST_OPEN = 20
"""The most playgrounds of a notebook; the oldest one is closed beyond them."""
_SIDES = ({"temperature": "0"}, {"temperature": "1"})
"""The settings with which the sides begin, which differ."""


@magics_class
class PlaygroundMagics(Magics):
    """The magic `%playground`, in which a prompt is edited and asked with two settings."""

    shell: InteractiveShell

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        config: NBEngine,
        recorder: Recorder,
        shelf: Shelf,
    ) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._shelf = shelf
        self._submitter = Submitter(shell, config, session, recorder)
        self._shown: list[tuple[Playground, Any]] = []
        session.on_close.append(self._leave)

    @no_var_expand
    @line_magic
    @documented(playground_parser)
    def playground(self, line: str) -> None:
        """Edit a prompt and ask it with two settings side by side."""
        __tracebackhide__ = True
        try:
            parsed = playground_parser().parse_words(split_words(line, "%playground"))
            state = self._state(parsed.prompt)
        except HelpRequested as request:
            print(request)
            return
        except CALLER_ERRORS as error:
            raise UsageError(f"%playground: {error}") from None
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__
        if not in_kernel(self.shell):
            raise UsageError("%playground: it is a widget, and a terminal shows none; %generate asks there")
        self._open(state)

    def _state(self, wanted: tuple[str, int | None] | None) -> dict[str, Any]:
        prompt = None if wanted is None else self._shelf.find(*wanted)
        if prompt is not None and prompt.raw:
            raise UsageError(
                f"%playground: prompt {prompt.reference} is --raw, which the editor cannot hold; %generate asks with it"
            )
        examples = () if prompt is None else prompt.examples
        return {
            "name": "" if prompt is None else prompt.name,
            "text": "" if prompt is None else prompt.source,
            "values": {} if prompt is None else dict(prompt.defaults),
            "examples": [{"question": each.question, "answer": each.answer} for each in examples],
            "sides": [
                {"engine": "", "raw": False, "settings": dict(_SIDES[side])} for side in range(NUM_SIDES)
            ],
        }

    def _open(self, state: dict[str, Any]) -> None:
        try:
            from nbengine.widgets.playground.widget import PlaygroundWidget
        except ImportError as error:
            raise UsageError(f"%playground: its widget cannot be shown: {error}") from None
        playground = Playground(self.shell, self._session, self._config, self._submitter, self._shelf)
        widget = PlaygroundWidget(playground.receive, controls=controls(), state=state)
        playground.widget = widget
        self._shown.append((playground, widget))
        while len(self._shown) > _MOST_OPEN:
            self._close(self._shown.pop(0))
        plain = "a playground, which needs a kernel: run the cell"
        publish_bundle(self.shell, {**widget.mime_bundle(), "text/plain": plain})

    def _leave(self) -> None:
        while self._shown:
            self._close(self._shown.pop())

    def _close(self, shown: tuple[Playground, Any]) -> None:
        playground, widget = shown
        playground.close()
        playground.widget = None
        widget.close()
