"""The declaration of an engine argument: its default, and what people are told about it."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, Literal

_KEY = "argument"


@dataclass(frozen=True, slots=True)
class Argument:
    """The text of an argument, and the way it is written on a command line."""

    help: str
    flags: tuple[str, ...] = ()
    """Shorter flags, in addition to the one that is made from the argument's name."""
    reads: Literal["json", "names", "bytes"] | None = None
    """The way in which a flag's text is read if it is not a plain number or string: as a JSON object, as
    names with commas between them, or as a size such as 512MiB."""
    metavar: str | None = None


def argument(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    reads: Literal["json", "names", "bytes"] | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare an engine argument, as a field of a dataclass."""
    return field(default=default, metadata={_KEY: Argument(help, flags, reads, metavar)})


def argument_of(declared: Field[Any]) -> Argument:
    """Return the declaration of a field that `argument` made."""
    found: Argument = declared.metadata[_KEY]
    return found


def flag_of(name: str) -> str:
    """Return the flag of the argument with this name."""
    return "--" + name.replace("_", "-")


def shown_default(default: object) -> str:
    """Write a default value as people read it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)
