"""A kept prompt in a line: `@NAME x=…` is found, and its variables get their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.prompts.prompt import NAME, Filled, Prompt, named
from nbengine.frontend.prompts.store import missing
from nbengine.frontend.text.interpolate import is_text
from nbengine.magics.arguments import MagicParser, split_body, split_words
from nbengine.magics.comparison.axes import Bindings
from nbengine.magics.scores.scorers import fields_of

FindPrompt = Callable[[str, int | None], Prompt]
"""A function that finds a version of a kept prompt, the current one if none is given, or raises."""
_REFERENCE = re.compile(rf"@{NAME.pattern}(?::\S*)?(?=\s|\Z)")
_VALUE = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class PromptCall:
    """A kept prompt, the values that the line gives, and the cell's body if there is one; fields in both are open."""

    prog: str
    prompt: Prompt
    given: Mapping[str, str]
    body: str | None = None

    def fill(self, bindings: Bindings, elements: Mapping[str, Any], expand: Callable[[str], str]) -> Filled:
        """Fill the prompt: from the line, `--each`, the fields of its elements, the body, defaults, the notebook.

        `elements` are those of `--each`, by their names.

        Raises:
            UsageError: a variable has no value or two, or there is no variable for a value.
        """
        values: dict[str, object] = {name: expand(text) for name, text in self.given.items()}
        for name in values:
            if name in elements:
                raise UsageError(f"{self.prog}: {name} has two values: {name}=… and --each {name}")
        for name in self.prompt.variables:
            if name not in values and name in bindings.own:
                values[name] = bindings[name]
        self._take_fields(values, bindings, elements)
        if self.body is not None:
            values[self._for_body(values)] = expand(self.body)
        for name in self.prompt.variables:
            if name not in values and name not in self.prompt.defaults and is_text(bindings.get(name, str)):
                values[name] = bindings[name]
        try:
            return self.prompt.fill(values)
        except InvalidArgumentError as error:
            raise UsageError(f"{self.prog}: {error}") from None

    def _take_fields(
        self, values: dict[str, object], bindings: Bindings, elements: Mapping[str, Any]
    ) -> None:
        for each, element in elements.items():
            fields = fields_of(element)
            for name in self.prompt.variables:
                if name not in values and name in fields:
                    values[name] = fields[name]
                    bindings.used.add(each)

    def _for_body(self, values: Mapping[str, object]) -> str:
        """Return the variable whose value is the body."""
        open_ones = [
            name for name in self.prompt.variables if name not in values and name not in self.prompt.defaults
        ]
        if len(open_ones) == 1:
            return open_ones[0]
        reason = f"{', '.join(open_ones)} have none" if open_ones else "all have one"
        raise UsageError(
            f"{self.prog}: the body is the value of one variable of prompt {self.prompt.reference}, and {reason}"
        )


def no_prompt(name: str, version: int | None) -> Prompt:
    """Find no prompt, where none are kept."""
    raise missing(name, version, ())


def names_prompt(line: str, prompt: str) -> bool:
    """Return whether the prompt at the end of a line names a kept one; behind a lone `--` it is a text."""
    before = line.strip().removesuffix(prompt).split()
    return before[-1:] != ["--"] and _REFERENCE.match(prompt) is not None


def split_call(
    line: str, body: str | None, parser: MagicParser, what: str, find: FindPrompt
) -> tuple[list[str], str, PromptCall | None]:
    """Return the words of a magic's flags, its text, and the kept prompt that stands in the text's place if one does.

    `what` names the text, as in `split_body`.

    Raises:
        UsageError: the line cannot be divided, or names a kept prompt that does not exist.
    """
    words, text = split_body(line, body, parser, what)
    if body is None and names_prompt(line, text):
        words, text = [*words, *split_words(text, parser.prog)], ""
    words, call = take_call(words, text if body is not None else None, parser, find)
    return words, text, call


def take_call(
    words: Sequence[str], body: str | None, parser: MagicParser, find: FindPrompt
) -> tuple[list[str], PromptCall | None]:
    """Take `@NAME` and the values behind it out of the words of a line; return the others, and what was taken.

    Raises:
        UsageError: the prompt does not exist, or has no variable of a name.
    """
    own = _positions(words, parser)
    first = next((position for position in own if words[position].startswith("@")), None)
    taken = [] if first is None else [position for position in own if position >= first]
    rest = [word for position, word in enumerate(words) if position not in taken]
    found = [words[position] for position in taken]
    if not found:
        return rest, None
    prog = parser.prog
    try:
        prompt = find(*named(found[0][1:]))
        pairs = [_value(word, prog) for word in found[1:]]
        given = dict(pairs)
        prompt.check_given(list(given))
    except InvalidArgumentError as error:
        hint = "" if body is not None else " (a text that begins with @ stands behind --)"
        raise UsageError(f"{prog}: {error}{hint if error.argument == 'prompt' else ''}") from None
    for name in given:
        if sum(name == other for other, _ in pairs) > 1:
            raise UsageError(
                f"{prog}: {name}=… stands there twice; --each {name}=a,b asks with several values"
            )
    return rest, PromptCall(prog, prompt, given, None if body is None or not body.strip() else body)


def positionals_of(words: Sequence[str], parser: MagicParser) -> list[str]:
    """List the words that are neither flags nor their values."""
    return [words[position] for position in _positions(words, parser)]


def _positions(words: Sequence[str], parser: MagicParser) -> list[int]:
    found = []
    wants_value = may_stand_alone = False
    for position, word in enumerate(words):
        is_flag = len(word) > 1 and word.startswith("-")
        if wants_value and not (may_stand_alone and is_flag):
            wants_value = False
        elif is_flag:
            flag, has_equals, _ = word.partition("=")
            # What stands behind an unknown flag may be its value: the parser complains about the flag.
            wants_value = not has_equals and parser.takes_value(flag) is not False
            may_stand_alone = parser.value_is_optional(flag)
        else:
            found.append(position)
    return found


def _value(word: str, prog: str) -> tuple[str, str]:
    match = _VALUE.fullmatch(word)
    if match is None:
        raise UsageError(f"{prog}: unexpected {word!r}: behind @NAME stand values (country=Peru) and flags")
    return match["name"], match["value"]
