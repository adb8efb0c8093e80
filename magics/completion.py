"""Tab completion of the magics' lines: commands, flags, and the values that these take."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.config.cache import KV_CACHE_DTYPES
from nbengine.config.model import ACTIVATION_DTYPES, DEVICES, DTYPES, LOAD_FORMATS, MODEL_IMPLS, ROUNDINGS
from nbengine.config.parallel import DATA_PARALLEL_BACKENDS, EXECUTOR_BACKENDS
from nbengine.config.scheduler import POLICIES
from nbengine.errors import NBEngineError
from nbengine.frontend.prompts.prompt import named
from nbengine.frontend.text.interpolate import is_text, unfinished_field
from nbengine.magics.arguments import MagicParser, split_prompt
from nbengine.magics.conversations.arguments import chat_parser
from nbengine.magics.conversations.conversation import Conversations
from nbengine.magics.dashboard_arguments import dashboard_parser
from nbengine.magics.engine import EngineMagics
from nbengine.magics.generation.arguments import generate_parser
from nbengine.magics.kept_prompts.arguments import PARSERS as PROMPTS_PARSERS
from nbengine.magics.kept_prompts.arguments import prompt_parser, prompts_parser
from nbengine.magics.kept_prompts.calls import positionals_of
from nbengine.magics.kept_prompts.shelf import Shelf
from nbengine.magics.kept_runs.arguments import PARSERS as RUNS_PARSERS
from nbengine.magics.kept_runs.arguments import runs_parser
from nbengine.magics.playground.arguments import playground_parser
from nbengine.magics.session import NotebookSession, live_engines
from nbengine.models.checkpoints.files import list_aliases

_LINE = re.compile(r"\s*(?:[\w.\[\]'\", ]+=\s*)?(?P<sign>%%?)(?P<magic>\w+)\s")
CHOICES: Mapping[str, Iterable[str | None]] = {
    "dtype": DTYPES,
    "device": DEVICES,
    "load_format": LOAD_FORMATS,
    "model_impl": MODEL_IMPLS,
    "quantization": tuple(ROUNDINGS),
    "activation_dtype": ACTIVATION_DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "scheduling_policy": POLICIES,
    "distributed_executor_backend": EXECUTOR_BACKENDS,
    "data_parallel_backend": DATA_PARALLEL_BACKENDS,
}
"""Values of the flags whose parsers leave the check to the engine's configuration."""
_OF_THIS_NOTEBOOK = ("stop", "detach", "restart", "load", "config", "status", "serve", "history")
"""Commands of `%engine` that take attached engines; others also take engines that merely run."""

_WITH_PROMPTS = ("generate", "chat")
_KEPT_PROMPTS = ("prompt", "prompts", "first", "second")
"""The arguments that name kept prompts."""
Parsers = Mapping[str, Callable[[], MagicParser]]
_WITH_COMMANDS: Mapping[str, tuple[Parsers, Callable[[], MagicParser]]] = {
    "runs": (RUNS_PARSERS, runs_parser),
    "prompts": (PROMPTS_PARSERS, prompts_parser),
}
"""Magics with commands: the commands' parsers, and that of the line without one."""

Matcher = Callable[[CompletionContext], SimpleMatcherResult]


class Completion:
    """The completion of the magics' lines in `shell`; `parsers` has those of magics with flags, by name."""

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        conversations: Conversations,
        engine: EngineMagics,
        shelf: Shelf,
    ) -> None:
        self.parsers: dict[str, Callable[[], MagicParser]] = {
            "generate": generate_parser,
            "chat": chat_parser,
            "dashboard": dashboard_parser,
            "prompt": prompt_parser,
            "playground": playground_parser,
        }
        self._shell = shell
        self._session = session
        self._conversations = conversations
        self._engine = engine
        self._shelf = shelf
        self._matcher = self._make_matcher()

    def install(self) -> None:
        """Add this completion to the shell's."""
        self._shell.Completer.custom_matchers.append(self._matcher)

    def uninstall(self) -> None:
        """Remove this completion from the shell's."""
        self._shell.Completer.custom_matchers.remove(self._matcher)

    def complete(self, text: str) -> tuple[str, list[str]]:
        """Complete a cell's text up to the cursor: return the end that is replaced, and its replacements."""
        before, _, line = text.rpartition("\n")
        if _takes_variables(text.lstrip(), line) and (field := unfinished_field(line)) is not None:
            owner, begun = field
            return begun, [name for name in self._fields(owner) if name.startswith(begun)]
        match = _LINE.match(line)
        if match is None or (match["sign"] == "%%" and before.strip()):
            return "", []
        rest = line[match.end() :]
        fragment = re.split(r"\s", rest)[-1]
        words = rest[: len(rest) - len(fragment)].split()
        if match["magic"] == "engine" and match["sign"] == "%":
            fragment, candidates = self._of_engine(words, fragment)
        elif match["magic"] in ("runs", "prompts") and match["sign"] == "%":
            commands, listing = _WITH_COMMANDS[match["magic"]]
            fragment, candidates = self._of_commands(commands, listing, words, fragment, match["magic"])
        elif match["magic"] in self.parsers:
            parser = self.parsers[match["magic"]]()
            is_line = match["sign"] == "%"
            if match["magic"] in _WITH_PROMPTS:
                call = self._of_call(parser, words, fragment)
                if call is not None:
                    return fragment, call
            if is_line and not parser.positionals and _has_prompt(rest[: len(rest) - len(fragment)], parser):
                return "", []
            fragment, candidates = self._of_flags(
                parser, words, fragment, match["magic"], offers_flags=not is_line
            )
        else:
            return "", []
        return fragment, [word for word in candidates if word.startswith(fragment)]

    def _make_matcher(self) -> Matcher:
        @context_matcher(identifier="nbengine", priority=100)  # type: ignore[untyped-decorator]
        def matcher(context: CompletionContext) -> SimpleMatcherResult:
            lines = context.full_text.split("\n")[: context.cursor_line + 1]
            lines[-1] = lines[-1][: context.cursor_position]
            fragment, words = self.complete("\n".join(lines))
            if not words:
                return {"completions": []}
            completions = [SimpleCompletion(text=word, type="magic") for word in words]
            return {"completions": completions, "matched_fragment": fragment, "suppress": True}

        made: Matcher = matcher
        return made

    def _of_engine(self, words: list[str], fragment: str) -> tuple[str, list[str]]:
        commands = self._engine.command_names
        if not words or words == ["help"]:
            return fragment, commands
        parser = self._engine.parser_of(words[0])
        if parser is None:
            return fragment, []
        return self._of_flags(parser, words[1:], fragment, words[0], offers_flags=True)

    def _of_commands(
        self,
        commands: Parsers,
        listing: Callable[[], MagicParser],
        words: list[str],
        fragment: str,
        magic: str,
    ) -> tuple[str, list[str]]:
        """Complete a line that begins with one of `commands`, or has the flags of `listing`."""
        if not words and not fragment.startswith("-"):
            return fragment, list(commands)
        command = words[0] if words and words[0] in commands else ""
        if words and not command and not words[0].startswith("-"):
            return fragment, []
        parser = commands[command]() if command else listing()
        return self._of_flags(parser, words[bool(command) :], fragment, magic, offers_flags=True)

    def _of_call(self, parser: MagicParser, words: list[str], fragment: str) -> list[str] | None:
        """Complete `@NAME` and the values behind it; None where the line names no kept prompt."""
        last = words[-1] if words else ""
        if parser.takes_value(last):
            return None
        own = [word for word in positionals_of(words, parser) if word != "--"]
        if not own:
            names = [f"@{name}" for name in self._shelf.names()] if fragment.startswith("@") else []
            return [name for name in names if name.startswith(fragment)] or None
        if not own[0].startswith("@"):
            return None
        if fragment.startswith("-"):
            return (
                [flag for flag in parser.flags if flag.startswith(fragment)] if "=" not in fragment else None
            )
        try:
            prompt = self._shelf.find(*named(own[0][1:]))
        except NBEngineError:
            return None
        given = {word.partition("=")[0] for word in own[1:]}
        values = [f"{name}=" for name in prompt.variables if name not in given]
        return [value for value in values if value.startswith(fragment)] or None

    def _of_flags(
        self, parser: MagicParser, words: list[str], fragment: str, command: str, *, offers_flags: bool
    ) -> tuple[str, list[str]]:
        """Complete a word behind others that `parser` reads: a flag, a flag's value, or a positional."""
        flag, has_equals, value = fragment.partition("=")
        if has_equals and parser.takes_value(flag):
            return self._values(parser.action_of(flag), value, command)
        last = words[-1] if words else ""
        if parser.takes_value(last) and not (parser.value_is_optional(last) and fragment.startswith("-")):
            return self._values(parser.action_of(last), fragment, command)
        if fragment.startswith("-"):
            return fragment, parser.flags
        own = parser.positionals
        taken = _num_positionals(words, parser)
        found = self._values(own[taken], fragment, command)[1] if taken < len(own) else []
        return fragment, found or (parser.flags if offers_flags and not fragment else [])

    def _values(self, action: argparse.Action | None, fragment: str, command: str) -> tuple[str, list[str]]:
        if action is None:
            return fragment, []
        if action.choices is not None:
            return fragment, list(map(str, action.choices))
        if action.dest in CHOICES:
            return fragment, [choice for choice in CHOICES[action.dest] if choice is not None]
        if action.dest in ("engine", "judge_engine"):
            return fragment.rpartition(",")[2], [engine.name for engine in self._session.engines]
        if action.dest == "name":
            return fragment, self._names(command)
        if action.dest in _KEPT_PROMPTS:
            return fragment, self._shelf.names()
        if action.dest == "model":
            return fragment, list(model_names(fragment))
        if action.dest == "json":
            return fragment, self._variables(_is_schema)
        if action.dest in ("tools", "score"):
            return fragment.rpartition(",")[2], self._variables(inspect.isroutine)
        if action.dest == "each":
            # In NAME=SOURCE the user chooses NAME freely, so only SOURCE is completed.
            return fragment.rpartition("=")[2], self._variables(_has_several)
        return fragment, []

    def _names(self, command: str) -> list[str]:
        if command == "prompt":
            return self._shelf.names()
        if command == "chat":
            return self._conversations.names
        if command in _OF_THIS_NOTEBOOK:
            return [engine.name for engine in self._session.engines]
        return [info.name for info in live_engines()] if command != "start" else []

    def _fields(self, owner: str | None) -> list[str]:
        """List what may stand in braces: variables, or the attributes of one, listed without being read."""
        if owner is None:
            return self._variables(is_text)
        if owner not in self._shell.user_ns:
            return []
        return [name for name in dir(self._shell.user_ns[owner]) if not name.startswith("_")]

    def _variables(self, fits: Callable[[object], bool]) -> list[str]:
        """List the notebook's variables that fit a purpose."""
        own = self._shell.user_ns.items()
        hidden = self._shell.user_ns_hidden
        return sorted(
            name for name, value in own if not name.startswith("_") and name not in hidden and fits(value)
        )


def model_names(fragment: str) -> Iterable[str]:
    """List what a model's name may go on to: aliases, models in the hub's cache, files and directories."""
    yield from list_aliases()
    yield from sorted(_cached_models())
    yield from sorted(_paths(fragment))


def _cached_models() -> Iterable[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    for directory in Path(HF_HUB_CACHE).glob("models--*--*"):
        yield directory.name.removeprefix("models--").replace("--", "/", 1)


def _paths(fragment: str) -> Iterable[str]:
    start = fragment.rpartition("/")[0]
    directory = Path(f"{start}/" if fragment.startswith("/") else start or ".")
    try:
        entries = list(directory.expanduser().iterdir())
    except (OSError, RuntimeError):  # RuntimeError where `~name` names no user
        return
    for entry in entries:
        name = fragment[: len(fragment) - len(fragment.rpartition("/")[2])] + entry.name
        if entry.suffix.lower() == ".gguf" or (entry.is_dir() and (entry / "config.json").is_file()):
            yield name
        elif "/" in fragment and entry.is_dir():
            yield f"{name}/"


def _takes_variables(cell: str, line: str) -> bool:
    """Return whether braces in a cell's last `line` name variables: in a prompt, or a line that has one."""
    in_cell = _LINE.match(cell)
    if in_cell is not None and in_cell["sign"] == "%%":
        return in_cell["magic"] in _WITH_PROMPTS
    in_line = _LINE.match(line)
    return (
        in_line is not None
        and in_line["sign"] == "%"
        and in_line["magic"] in (*_WITH_PROMPTS, "engine", "runs")
    )


def _has_prompt(typed: str, parser: MagicParser) -> bool:
    """Return whether the prompt of a line magic, in which nothing is completed, has begun."""
    try:
        return bool(split_prompt(typed, parser)[1])
    except UsageError:
        return True  # an open quotation mark


def _num_positionals(words: list[str], parser: MagicParser) -> int:
    number = 0
    for before, word in zip(["", *words], words, strict=False):
        number += not word.startswith("-") and not parser.takes_value(before)
    return number


def _is_schema(value: object) -> bool:
    is_class = isinstance(value, type) and hasattr(value, "__dataclass_fields__")
    return is_class or isinstance(value, dict) or hasattr(value, "model_json_schema")


def _has_several(value: object) -> bool:
    return isinstance(value, dict | list | tuple) or hasattr(value, "iterrows")
