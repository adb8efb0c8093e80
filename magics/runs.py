"""`%runs` lists the prompts that were asked, shows and compares them, and asks them again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError, did_you_mean
from nbengine.frontend.runs.run import RunFilter
from nbengine.frontend.runs.store import RunStore
from nbengine.frontend.text.interpolate import interpolate
from nbengine.magics.answers.diff import AnswerDiff, Earlier
from nbengine.magics.arguments import CALLER_ERRORS, HelpRequested, MagicParser, split_words
from nbengine.magics.config import NBEngine
from nbengine.magics.confirm import confirmed
from nbengine.magics.errors import without_traceback
from nbengine.magics.generate import GenerateMagics
from nbengine.magics.generation.turn import Turn
from nbengine.magics.help import documented
from nbengine.magics.kept_runs.arguments import PARSERS, run_number, runs_parser
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.magics.kept_runs.repeating import plan_again, rerun_parser
from nbengine.magics.kept_runs.view import differences, listing, run_bundle
from nbengine.magics.namespace import notebook_name, prompt_namespace
from nbengine.magics.session import NotebookSession
from nbengine.widgets.live import publish, publish_bundle
from nbengine.widgets.words import count, muted, print_quietly


@magics_class
class RunsMagics(Magics):
    """The magic `%runs`, with all that was asked in the user's notebooks."""

    shell: InteractiveShell

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        config: NBEngine,
        recorder: Recorder,
        generate: GenerateMagics,
    ) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._recorder = recorder
        self._generate = generate
        self._commands: dict[str, Callable[[str], Turn | None]] = {
            "show": self._show,
            "diff": self._diff,
            "rerun": self._rerun,
            "pin": self._pin,
            "note": self._note,
            "clear": self._clear,
        }

    @no_var_expand
    @line_magic
    @documented(runs_parser)
    def runs(self, line: str) -> Any:
        """List the prompts that were asked, with their answers."""
        __tracebackhide__ = True
        return self._begin(line).run_blocking()

    async def stream(self, line: str) -> Any:
        """Do what `runs` does, but awaited: a kernel's top-level cell runs this."""
        __tracebackhide__ = True
        return await self._begin(line).run()

    def _begin(self, line: str) -> Turn:
        __tracebackhide__ = True
        command, _, rest = line.strip().partition(" ")
        is_list = not command or command.startswith("-")
        if not is_list and command not in self._commands:
            raise UsageError(
                f"%runs: no command {command!r}{did_you_mean(command, self._commands)} (%runs -h lists them)"
            )
        try:
            self._recorder.close()
            carry_out = self._list if is_list else self._commands[command]
            turn = carry_out(line if is_list else rest)
        except HelpRequested as request:
            print(request)
            turn = None
        except CALLER_ERRORS as error:
            raise UsageError(f"%runs{'' if is_list else f' {command}'}: {error}") from None
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__
        return turn or Turn(self.shell, self._session, None, is_cell=False)

    @property
    def _store(self) -> RunStore:
        return self._recorder.writer.store

    def _words(self, rest: str, command: str = "") -> list[str]:
        namespace = prompt_namespace(self.shell)
        return [interpolate(word, namespace) for word in split_words(rest, f"%runs {command}".rstrip())]

    def _parsed(self, parser: MagicParser, rest: str, command: str = "") -> Any:
        return parser.parse_words(self._words(rest, command))

    def _list(self, line: str) -> None:
        parsed = self._parsed(runs_parser(), line)
        notebook = notebook_name(self.shell) if parsed.here else None
        if notebook == "":
            raise UsageError("%runs: --here: this frontend does not tell which notebook this is")
        name, version = parsed.prompt or (None, None)
        choice = RunFilter(
            prompt_name=name,
            prompt_version=version,
            find=parsed.find,
            model=parsed.model,
            engine=parsed.engine,
            notebook=notebook,
            errors=parsed.errors,
            pinned=parsed.pinned,
            last=parsed.last,
        )
        rows = self._store.select(choice)
        if rows:
            publish_bundle(self.shell, listing(rows[::-1]))
        else:
            print("no run fits" if self._store.select(RunFilter(last=1)) else "no run has been kept yet")
        if not self._config.keep_runs:
            print_quietly("NBEngine.keep_runs is off: what is asked now is not kept")

    def _show(self, rest: str) -> None:
        parsed = self._parsed(PARSERS["show"](), rest, "show")
        row = self._store.get(parsed.number)
        if parsed.out is not None:
            self.shell.user_ns[parsed.out] = row
        publish_bundle(self.shell, run_bundle(row, parsed.format or self._format_of(row)))

    def _format_of(self, row: Mapping[str, Any]) -> str:
        constraint = row["settings"].get("structured_outputs") or {}
        return "json" if "json" in constraint or "json_object" in constraint else self._config.format

    def _diff(self, rest: str) -> None:
        parsed = self._parsed(PARSERS["diff"](), rest, "diff")
        old, new = (self._store.get(number) for number in (parsed.old, parsed.new))
        diff = AnswerDiff(*(Earlier(row["prompt"], row["text"]) for row in (old, new)))
        line = f"run {old['run']} → run {new['run']}: {differences(old, new) or 'the same settings'}"
        publish(self.shell, f"{line}\n{diff}", muted(line) + diff.html)

    def _rerun(self, rest: str) -> Turn:
        words = split_words(rest, "%runs rerun")
        if not words or words[0] in ("-h", "--help"):
            raise HelpRequested(rerun_parser())
        try:
            run = self._store.get(run_number(words[0]))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"%runs rerun: {error}") from None
        plan = plan_again(run, words[1:], self._config, prompt_namespace(self.shell))
        return self._generate.begin(plan, is_cell=False, against=Earlier(run["prompt"], run["text"]))

    def _pin(self, rest: str) -> None:
        parsed = self._parsed(PARSERS["pin"](), rest, "pin")
        self._store.change(parsed.number, pinned=not parsed.off)
        print(f"run {parsed.number} is {'no longer pinned' if parsed.off else 'pinned'}")

    def _note(self, rest: str) -> None:
        # The note is the rest of the line as it was typed, quotes and all.
        number, _, note = rest.strip().partition(" ")
        parsed = PARSERS["note"]().parse_words([number] if number else [])
        self._store.change(parsed.number, note=note.strip())
        print(f"run {parsed.number} has {'a note' if note.strip() else 'no note'}")

    def _clear(self, rest: str) -> None:
        parsed = self._parsed(PARSERS["clear"](), rest, "clear")
        before = None if parsed.age is None else time.time() - parsed.age
        which = "that are not pinned" if parsed.age is None else "that are older and not pinned"
        if not parsed.yes and not confirmed(
            f"forget all runs {which}, of all notebooks?",
            "%runs clear: this frontend cannot ask whether that is meant; --yes says so",
        ):
            print("nothing is forgotten")
            return
        print(f"{count(self._store.forget(before), 'run')} forgotten")
