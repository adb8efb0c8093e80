"""`%%prompt` keeps a prompt under a name; `%prompts` lists, shows, compares and deletes what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError, did_you_mean
from nbengine.frontend.prompts.prompt import Prompt
from nbengine.frontend.prompts.store import Listed
from nbengine.magics.arguments import CALLER_ERRORS, HelpRequested, MagicParser, split_words
from nbengine.magics.confirm import confirmed
from nbengine.magics.errors import without_traceback
from nbengine.magics.help import documented
from nbengine.magics.kept_prompts.arguments import PARSERS, prompt_parser, prompts_parser
from nbengine.magics.kept_prompts.examples import examples_of
from nbengine.magics.kept_prompts.exchange import read_prompts, write_prompts
from nbengine.magics.kept_prompts.shelf import Shelf
from nbengine.magics.kept_prompts.view import difference_bundle, kept_line, listing, prompt_bundle
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.magics.namespace import notebook_name, prompt_namespace
from nbengine.widgets.live import publish_bundle
from nbengine.widgets.words import count


@magics_class
class PromptsMagics(Magics):
    """The magics `%%prompt` and `%prompts`."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, shelf: Shelf, recorder: Recorder) -> None:
        super().__init__(shell)
        self._shelf = shelf
        self._recorder = recorder
        self._commands: dict[str, Callable[[Any], None]] = {
            "show": self._show,
            "diff": self._diff,
            "delete": self._delete,
            "export": self._export,
            "import": self._import,
        }

    @no_var_expand
    @cell_magic
    @documented(prompt_parser)
    def prompt(self, line: str, cell: str) -> None:
        """Keep the cell's body as a prompt."""
        __tracebackhide__ = True
        self._carry_out("%%prompt", prompt_parser(), line, lambda parsed: self._keep(parsed, cell))

    @no_var_expand
    @line_magic
    @documented(prompts_parser)
    def prompts(self, line: str) -> None:
        """List the kept prompts."""
        __tracebackhide__ = True
        command, _, rest = line.strip().partition(" ")
        if not command or command.startswith("-"):
            self._carry_out("%prompts", prompts_parser(), line, self._list)
        elif command in self._commands:
            self._carry_out(f"%prompts {command}", PARSERS[command](), rest, self._commands[command])
        else:
            hint = did_you_mean(command, self._commands)
            raise UsageError(f"%prompts: no command {command!r}{hint} (%prompts -h lists them)")

    def _carry_out(self, prog: str, parser: MagicParser, line: str, action: Callable[[Any], None]) -> None:
        """Read a line and do what it says, with errors as the user should see them."""
        __tracebackhide__ = True
        try:
            action(parser.parse_words(split_words(line, prog)))
        except HelpRequested as request:
            print(request)
        except CALLER_ERRORS as error:
            raise UsageError(f"{prog}: {error}") from None
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__

    def _keep(self, parsed: Any, body: str) -> None:
        if parsed.answer is not None and parsed.examples is None:
            raise UsageError("%%prompt: --answer names the answer of --examples, and there are none")
        prompt = Prompt(
            parsed.name,
            body.removesuffix("\n"),
            parsed.raw,
            dict(parsed.default),
            notebook=notebook_name(self.shell),
        )
        if parsed.examples is not None:
            column = parsed.answer or "answer"
            namespace = prompt_namespace(self.shell)
            prompt = replace(
                prompt, examples=examples_of(prompt, parsed.examples, column, namespace, "%%prompt")
            )
        kept, reason = self._shelf.keep(prompt)
        if parsed.out is not None:
            self.shell.user_ns[parsed.out] = kept
        print(kept_line(kept, reason))

    def _list(self, parsed: Any) -> None:
        self._recorder.close()
        rows = [each for each in self._shelf.select() if parsed.versions or each.is_current]
        if rows:
            publish_bundle(self.shell, listing(rows))
        else:
            print("no prompt has been kept yet: %%prompt NAME keeps one")

    def _show(self, parsed: Any) -> None:
        self._recorder.close()
        listed = self._listed(*parsed.prompt)
        if parsed.out is not None:
            self.shell.user_ns[parsed.out] = listed.prompt
        publish_bundle(self.shell, prompt_bundle(listed))

    def _diff(self, parsed: Any) -> None:
        first = self._shelf.find(*parsed.first)
        if parsed.second is not None:
            old, new = first, self._shelf.find(*parsed.second)
        else:
            earlier = [
                each.prompt
                for each in self._shelf.select()
                if each.prompt.name == first.name and each.prompt.version < first.version
            ]
            if not earlier:
                raise UsageError(f"%prompts diff: {first.reference} is the earliest version of it")
            old, new = earlier[-1], first
        publish_bundle(self.shell, difference_bundle(old, new))

    def _delete(self, parsed: Any) -> None:
        name, version = parsed.prompt
        self._shelf.find(name, version)
        which = f"prompt {name}, all its versions" if version is None else f"prompt {name}:{version}"
        if not parsed.yes and not confirmed(
            f"forget {which}?",
            "%prompts delete: this frontend cannot ask whether that is meant; --yes says so",
        ):
            print("nothing is forgotten")
            return
        print(f"{count(self._shelf.delete(name, version), 'version')} of prompt {name} forgotten")

    def _export(self, parsed: Any) -> None:
        if parsed.prompts:
            prompts = [self._shelf.find(*wanted) for wanted in parsed.prompts]
        else:
            prompts = [each.prompt for each in self._shelf.select() if each.is_current]
        write_prompts(Path(parsed.file).expanduser(), prompts, replace=parsed.force)
        print(f"{count(len(prompts), 'prompt')} written into {parsed.file}")

    def _import(self, parsed: Any) -> None:
        notebook = notebook_name(self.shell)
        prompts = read_prompts(Path(parsed.file).expanduser())
        kept = self._shelf.take_over([replace(prompt, notebook=notebook) for prompt in prompts])
        names = ", ".join(prompt.reference for prompt in kept)
        print(f"{count(len(kept), 'prompt')} kept: {names}" if kept else "there is no prompt in it")

    def _listed(self, name: str, version: int | None) -> Listed:
        wanted = self._shelf.find(name, version)
        return next(each for each in self._shelf.select() if each.prompt.reference == wanted.reference)
