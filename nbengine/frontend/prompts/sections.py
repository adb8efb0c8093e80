"""The text of a kept prompt: a message, or several behind lines that name their roles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.text.interpolate import paths_in

_ROLE = re.compile(r"(?P<escape>\\?)(?P<role>system|user|assistant):[ \t]*")


@dataclass(frozen=True, slots=True)
class Section:
    """A message: its role, and its text with fields in it."""

    role: str
    text: str


def sections_of(source: str, *, raw: bool) -> tuple[Section, ...]:
    r"""Divide a text at the lines `system:`, `user:` and `assistant:`; without them, or `raw`, it is one of the user.

    A line `\user:` is the text `user:`.

    Raises:
        InvalidArgumentError: the sections make no conversation that ends with the user, or a field in them cannot be
            filled.
    """
    found = (Section("user", source),) if raw else _conversation(source.split("\n"))
    for section in found:
        for path in paths_in(section.text):
            _check_path(path)
    return found


def has_roles(source: str) -> bool:
    """Return whether a line of the text names a role."""
    return any(match is not None and not match["escape"] for _, match in _lines(source.split("\n")))


def root_of(path: str) -> str:
    """Return the name of the variable with which a path begins."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _conversation(lines: list[str]) -> tuple[Section, ...]:
    found: list[tuple[str, int, list[str]]] = []
    for number, (line, match) in enumerate(_lines(lines), 1):
        if match is not None and not match["escape"]:
            found.append((match["role"], number, []))
            continue
        if not found:
            found.append(("", number, []))
        found[-1][2].append(line if match is None else line[1:])
    if found and not found[0][0]:
        if len(found) == 1:
            return (Section("user", "\n".join(found[0][2])),)
        if any(line.strip() for line in found[0][2]):
            raise _wrong(found[1][1], f"{found[1][0]}:", "the first line where a line names a role")
        del found[0]
    sections = []
    for position, (role, number, texts) in enumerate(found):
        text = "\n".join(texts).strip("\n")
        if not text.strip():
            raise _wrong(number, f"{role}:", "followed by a text")
        if role == "system" and position:
            raise _wrong(number, "system:", "the first section, if there is one")
        sections.append(Section(role, text))
    if sections[-1].role != "user":
        raise _wrong(found[-1][1], f"{sections[-1].role}:", "followed by a section `user:`, which comes last")
    return tuple(sections)


def _lines(lines: list[str]) -> Iterator[tuple[str, re.Match[str] | None]]:
    return ((line, _ROLE.fullmatch(line)) for line in lines)


def _wrong(number: int, line: str, allowed: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"line {number} of the prompt", line, allowed)


def _check_path(path: str) -> None:
    """Refuse what would read the insides of an object: a prompt may come from somebody else."""
    for node in ast.walk(ast.parse(path, mode="eval")):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            raise InvalidArgumentError(
                "a field of the prompt", f"{{{path}}}", "without attributes that begin with an underscore"
            )
