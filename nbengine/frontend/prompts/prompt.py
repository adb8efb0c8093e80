"""A kept prompt: a template with defaults and examples, and what becomes of it with values."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nbengine.checks import require, require_utf8_within
from nbengine.errors import InvalidArgumentError, did_you_mean
from nbengine.frontend.prompts.sections import Section, has_roles, root_of, sections_of
from nbengine.frontend.runs.run import storable
from nbengine.frontend.text.interpolate import fill, look_up, paths_in

NAME = re.compile(r"[^\W\d][\w.-]*")
_NAMED = re.compile(rf"(?P<name>{NAME.pattern})(?::(?P<version>[1-9][0-9]{{0,8}}))?")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """A question and a good answer to it; both are text as it is, without fields."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt with values: the messages for a chat template, and `text` for a model without one.

    `question` is the last message of the user. `text` is None where the prompt has roles, which only a chat
    template can say. `values` has what stands in each field, by what stands in its braces.
    """

    name: str
    version: int
    question: str
    text: str | None
    messages: tuple[Message, ...]
    values: Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """A template under a name, in one of its versions (0 until it is kept).

    Raises:
        InvalidArgumentError: the text has no conversation that ends with the user, or a default is of no variable.
    """

    name: str
    source: str
    """The text as it was written, with its fields and lines of roles."""
    raw: bool = False
    """No line of the text names a role."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    version: int = 0
    time: float = 0.0
    """The `time.time()` at which this version was kept first."""
    notebook: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        require("the prompt", self.source, bool(self.source.strip()), "a text")
        require_utf8_within("the prompt", [self.source, *self.defaults.values()])
        for name in self.defaults:
            if name not in self.variables:
                raise self._no_variable(name, "a default")

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Return the messages, with their fields."""
        return sections_of(self.source, raw=self.raw)

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Return the names of the variables, in the order of the text."""
        return tuple(dict.fromkeys(map(root_of, self.paths)))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Return what the fields name, once each: `country`, `row["country"]`."""
        return tuple(dict.fromkeys(path for part in self.sections for path in paths_in(part.text)))

    @cached_property
    def has_roles(self) -> bool:
        """Return whether lines of the text name roles."""
        return not self.raw and has_roles(self.source)

    @property
    def digest(self) -> str:
        """Return what two versions share that are the same."""
        examples = [[each.question, each.answer] for each in self.examples]
        parts = [self.source, self.raw, sorted(self.defaults.items()), examples]
        return hashlib.sha256(storable(json.dumps(parts)).encode()).hexdigest()

    def check_given(self, names: Sequence[str]) -> None:
        """Refuse values for what is no variable.

        Raises:
            InvalidArgumentError: a name is none; the message names the variables.
        """
        for name in names:
            if name not in self.variables:
                raise self._no_variable(name, "a value")

    def fill(self, values: Mapping[str, object]) -> Filled:
        """Put values into the fields; a default stands in for a value that is not there.

        Raises:
            InvalidArgumentError: a field has no value; the message names all that are missing.
        """
        texts: dict[str, str] = {}
        missing = []
        for path in self.paths:
            root = root_of(path)
            try:
                texts[path] = str(look_up(path, values if root in values else self.defaults))
            except LookupError:
                missing.append(path)
        if missing:
            raise self._missing(missing, values)
        parts = [Section(part.role, fill(part.text, texts)) for part in self.sections]
        question = parts[-1].text
        told = [
            Section(role, text)
            for example in self.examples
            for role, text in (("user", example.question), ("assistant", example.answer))
        ]
        is_plain = not self.has_roles and not told
        messages = [{"role": part.role, "content": part.text} for part in [*parts[:-1], *told, parts[-1]]]
        return Filled(
            name=self.name,
            version=self.version,
            question=question,
            text=None if self.has_roles else "\n\n".join([*map(_completed, self.examples), question]),
            messages=() if is_plain else tuple(messages),
            values=texts,
        )

    def messages(self, **values: object) -> list[Message]:
        """Return the messages with these values, as `LLM.chat` takes them.

        Raises:
            InvalidArgumentError: a variable has no value, or there is none of a name.
        """
        self.check_given(list(values))
        filled = self.fill(values)
        return list(filled.messages) or [{"role": "user", "content": filled.question}]

    def text(self, **values: object) -> str:
        """Return the prompt with these values as one text, as `LLM.generate` takes it, examples before the question.

        Raises:
            InvalidArgumentError: a variable has no value, there is none of a name, or the prompt has roles.
        """
        self.check_given(list(values))
        text = self.fill(values).text
        if text is None:
            raise InvalidArgumentError("the prompt", self.reference, "without roles: those need .messages()")
        return text

    @property
    def reference(self) -> str:
        """Return what names this version: `capital:2`."""
        return f"{self.name}:{self.version}" if self.version else self.name

    def _missing(self, paths: Sequence[str], values: Mapping[str, object]) -> InvalidArgumentError:
        roots = list(dict.fromkeys(root_of(path) for path in paths if root_of(path) not in values))
        if roots:
            example = " ".join(f"{root}=…" for root in roots)
            allowed = f"complete: {', '.join(roots)} {'has' if len(roots) == 1 else 'have'} none ({example})"
        else:
            fields = ", ".join(f"{{{path}}}" for path in paths)
            allowed = f"texts, numbers or what has those where the prompt looks for them ({fields})"
        given = [name for name in self.variables if name in values]
        return InvalidArgumentError(f"the values of prompt {self.reference}", given, allowed)

    def _no_variable(self, name: str, what: str) -> InvalidArgumentError:
        known = ", ".join(self.variables) or "none"
        hint = did_you_mean(name, self.variables)
        if not hint and "{{" + name + "}}" in self.source:
            hint = "; {{" + name + "}} is the text {" + name + "}, and {" + name + "} a variable"
        return InvalidArgumentError(
            f"{what} of prompt {self.reference}", name, f"of one of its variables ({known}{hint})"
        )


def _completed(example: Example) -> str:
    """Write an example as a text that goes on: a blank stands between its halves unless there is one."""
    gap = "" if example.question[-1:].isspace() else " "
    return f"{example.question}{gap}{example.answer}"


def check_name(name: str) -> None:
    """Refuse what cannot name a prompt.

    Raises:
        InvalidArgumentError: the name.
    """
    if NAME.fullmatch(name) is None:
        allowed = "a letter, then letters, digits, dots, dashes and underscores"
        raise InvalidArgumentError("the name of a prompt", name, allowed)


def named(text: str) -> tuple[str, int | None]:
    """Read `NAME` or `NAME:VERSION`; the version is None where the current one is meant.

    Raises:
        InvalidArgumentError: it is neither.
    """
    match = _NAMED.fullmatch(text)
    if match is None:
        raise InvalidArgumentError("prompt", text, "NAME or NAME:VERSION, such as capital or capital:2")
    return match["name"], None if match["version"] is None else int(match["version"])
