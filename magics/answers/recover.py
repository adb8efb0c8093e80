"""`%engine recover` shows what was written for this notebook before a page reload or a kernel restart."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.magics.answers.kept import (
    MAX_ANSWERS,
    Answer,
    answer_of_run,
    kept_answer,
    merged,
    selected,
)
from nbengine.magics.answers.kept_view import heading, listing
from nbengine.magics.arguments import MagicParser, variable_name
from nbengine.magics.config import FORMATS, NBEngine
from nbengine.magics.generation.view import Appearance, view_for
from nbengine.magics.interrupts import Interrupted
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.magics.session import AttachedEngine, EngineClient, NotebookSession, live_engines
from nbengine.runtime.connection import newest
from nbengine.widgets.live import publish
from nbengine.widgets.words import count

Answered = TypeVar("Answered")
MAX_SHOWN = 10
"""The most answers that are shown at once without `--all`."""
_DESCRIPTION = """\
Show what was written for this notebook, also before its page was reloaded or its kernel restarted.

  %engine recover           what has not been shown yet; if all has, the latest answer again
  %engine recover -l        a list, the latest first
  %engine recover 2         the latest but one; or an ID of the list
  %engine recover -o NAME   bind it to a variable, too

A kernel has its own answers. An engine keeps those of the notebook also when its kernel restarts, is interrupted or
dies: all that was written until then. It keeps the latest (those go first that have been shown) until it ends. Where
neither has any, the notebook's answers come from the kept runs (%runs), which `--clear` leaves alone."""
_FROM_RUNS = "from the kept runs, since neither this kernel nor an engine has an answer of this notebook"


class RecoverCommands:
    """The command of `%engine` that shows answers again; `attach` joins the notebook's own engines."""

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        config: NBEngine,
        recorder: Recorder,
        attach: Callable[[], None],
    ) -> None:
        self._shell = shell
        self._session = session
        self._config = config
        self._recorder = recorder
        self._attach = attach
        self.commands: dict[str, Callable[[Sequence[str]], None]] = {"recover": self._recover}

    def _recover(self, words: Sequence[str]) -> None:
        parsed = _parse(words)
        inquiry = _Inquiry(self._engines(), parsed.session)
        apart = self._not_attached() if parsed.session is None else []
        if parsed.clear:
            print(f"{count(self._clear(inquiry), 'answer')} forgotten")
            notes = inquiry.notes
        elif answers := self._answers(inquiry):
            rest = self._show_some(inquiry, answers, parsed)
            notes = inquiry.notes + _about_rest(rest)
        else:
            is_all = not (inquiry.notes or apart)
            others = _other_sessions(inquiry)
            notes = [_nothing(inquiry, is_all=is_all), *inquiry.notes, *others]
        for note in notes + apart:
            print(note)

    def _engines(self) -> list[AttachedEngine]:
        if not self._session.engines and self._session.ledger.among(live_engines()):
            self._attach()
        return self._session.engines

    def _not_attached(self) -> list[str]:
        """Name the engines of this notebook that cannot be asked, because its kernel has restarted since."""
        return [
            f"engine {info.name!r} of this notebook is not attached: `%engine attach {info.name}`, then "
            "`%engine recover` again"
            for info in self._session.ledger.among(live_engines())
            if self._session.find(info.name) is None
        ]

    def _answers(self, inquiry: _Inquiry) -> list[Answer]:
        """List all answers, the latest first."""
        session = inquiry.session
        kept: list[Answer] = []
        for engine, transcripts in inquiry.ask(lambda client: client.transcripts_blocking(session)):
            kept += [kept_answer(transcript, engine.name) for transcript in transcripts]
            inquiry.notes += _losses(engine)
        own = self._session.ongoing.answers.newest_first() if session is None else []
        return merged(own, kept) or self._kept_runs(inquiry)

    def _kept_runs(self, inquiry: _Inquiry) -> list[Answer]:
        """List the answers that are kept as runs, the latest first: those of an engine that has ended, too."""
        if inquiry.session is not None:
            return []
        answers = [answer_of_run(row) for row in reversed(self._recorder.of_notebook(MAX_ANSWERS))]
        inquiry.notes += [_FROM_RUNS] if answers else []
        return answers

    def _show_some(
        self, inquiry: _Inquiry, answers: list[Answer], parsed: argparse.Namespace
    ) -> list[Answer]:
        """Show the answers that are asked for, and return the others that have not been shown."""
        if parsed.list:
            publish(self._shell, *listing(answers))
            return []
        chosen, rest = _chosen(answers, parsed)
        self._show_all(chosen, parsed)
        _note_read(inquiry, chosen)
        return rest

    def _show_all(self, answers: Sequence[Answer], parsed: argparse.Namespace) -> None:
        if parsed.out is not None:
            self._shell.user_ns[parsed.out] = answers[0].result
        if len(answers) == 1:
            hook: Any = self._shell.displayhook
            hook.update_user_ns(answers[0].result)
        for answer in answers:
            try:
                self._show(answer, parsed.format or self._config.format)
            except KeyboardInterrupt:
                raise Interrupted("no longer shown; what is being written goes on") from None

    def _show(self, answer: Answer, output_format: str) -> None:
        """Show an answer; one that is still being sent to this kernel streams on until its end."""
        publish(self._shell, *heading(answer))
        view = view_for(self._shell, Appearance(output_format, footer=self._config.footer))
        result = answer.result
        try:
            while not (result.finished or answer.from_engine):
                view.update(result)
                time.sleep(view.interval)
        finally:
            view.finish(result, answer.cause if result.finished else "still being written")
        answer.is_new = False

    def _clear(self, inquiry: _Inquiry) -> int:
        """Forget the answers that have ended, and return their number."""
        gone: set[str] = set()
        for _, ids in inquiry.ask(lambda client: _forget(client, inquiry.session), "forgotten"):
            gone |= ids
        if inquiry.session is None:
            gone.update(self._session.ongoing.answers.clear())
        return len(gone)


class _Inquiry:
    """A question to engines about a session, the notebook's own if None.

    An engine that does not answer is named in `notes` and not asked again.
    """

    def __init__(self, engines: Iterable[AttachedEngine], session: str | None) -> None:
        self.engines = list(engines)
        self.session = session
        self.notes: list[str] = []

    def ask(
        self, call: Callable[[EngineClient], Answered], purpose: str = "read"
    ) -> list[tuple[AttachedEngine, Answered]]:
        """Ask each engine, and return the answers."""
        answers = []
        for engine in list(self.engines):
            try:
                answer = call(engine.client)
            except (NBEngineError, TimeoutError) as error:
                self.engines.remove(engine)
                reason = str(error) or "no answer"
                self.notes.append(f"what engine {engine.name!r} has kept cannot be {purpose}: {reason}")
            else:
                answers.append((engine, answer))
        return answers


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = MagicParser("%engine recover", _DESCRIPTION)
    parser.add_argument("which", nargs="?", metavar="N|ID", help="which answer: 1 is the latest")
    parser.add_argument("-l", "--list", action="store_true", help="list all of them")
    parser.add_argument("--all", action="store_true", help="show all of them")
    parser.add_argument("--clear", action="store_true", help="forget them, here and in the engine")
    parser.add_argument(
        "-o", "--out", metavar="NAME", type=variable_name, help="bind the result to a variable"
    )
    parser.add_argument("-f", "--format", choices=FORMATS, metavar="F", help="text, markdown, json or code")
    parser.add_argument(
        "--session", metavar="S", help="recover answers of another notebook, by its name in the engine"
    )
    parsed = parser.parse_words(words)
    several = [flag for flag in ("list", "all", "clear") if getattr(parsed, flag)]
    if len(several) > 1:
        parser.error(f"--{several[0]} does not go with --{several[1]}")
    if several and (parsed.which is not None or parsed.out is not None):
        what = "-o NAME" if parsed.which is None else f"{parsed.which!r}"
        parser.error(f"{what} means one answer, --{several[0]} all of them")
    if parsed.session == "":
        parser.error("--session needs a name")
    return parsed


def _chosen(answers: list[Answer], parsed: argparse.Namespace) -> tuple[list[Answer], list[Answer]]:
    """Choose the answers to show, and those that have not been shown besides."""
    if parsed.all:
        return answers, []
    if parsed.which is not None:
        answer = selected(answers, parsed.which)
        if answer is None:
            raise UsageError(
                f"%engine recover: no answer {parsed.which!r}; there are 1 to {len(answers)}, the latest first "
                "(%engine recover -l lists them with their IDs)"
            )
        return [answer], []
    new = [answer for answer in answers if answer.is_new]
    return (new[:MAX_SHOWN], new[MAX_SHOWN:]) if new else (answers[:1], [])


def _about_rest(rest: Sequence[Answer]) -> list[str]:
    return [f"{count(len(rest), 'more answer')}: `%engine recover` again, or -l for a list"] if rest else []


def _losses(engine: AttachedEngine) -> list[str]:
    """Name the engine cores whose answers are lost."""
    again = [core.rank for core in newest(engine.client.connection).ready if core.incarnation]
    return [
        f"engine core {rank} of engine {engine.name!r} has died and was started again: what it had kept is lost"
        for rank in again
    ]


def _note_read(inquiry: _Inquiry, answers: Iterable[Answer]) -> None:
    shown: dict[str, list[str]] = {}
    for answer in answers:
        if answer.from_engine:
            shown.setdefault(answer.engine, []).append(answer.request_id)

    def note(client: EngineClient) -> None:
        if client.name in shown:
            client.read_transcripts(shown[client.name], inquiry.session)

    inquiry.ask(note, "marked as read")


def _forget(client: EngineClient, session: str | None) -> set[str]:
    kept = [item for item in client.transcripts_blocking(session) if item.output.finished]
    client.forget_transcripts_blocking(None, session)
    return {item.request_id for item in kept}


def _nothing(inquiry: _Inquiry, *, is_all: bool) -> str:
    """Say that there are no answers; `is_all`: there are none anywhere else, either."""
    session = inquiry.session
    if not is_all:
        return "nothing found" if session is None else f"nothing found of session {session!r}"
    if session is not None:
        return f"nothing has been kept of session {session!r}"
    if inquiry.engines:
        return "nothing to recover: no answer of this notebook is kept"
    alive = ", ".join(info.name for info in live_engines())
    if alive:
        return f"nothing to recover: this notebook is attached to no engine (`%engine attach`: {alive})"
    return "nothing to recover: no engine runs, and what an engine has kept is gone with it"


def _other_sessions(inquiry: _Inquiry) -> list[str]:
    """Name the sessions with answers if this notebook has none: its kernel may have had another name."""
    if inquiry.session is not None:
        return []
    return [
        f"engine {engine.name!r} has {count(number, 'answer')} that nobody has read: %engine recover --session {name}"
        for engine, sessions in inquiry.ask(lambda client: client.transcript_sessions_blocking())
        for name, number in sessions.items()
        if number
    ]
