"""The argument `chat_template`: the text of a template, or the path of a file that has it."""

from __future__ import annotations

from pathlib import Path

from nbengine.checks import require_utf8
from nbengine.errors import InvalidArgumentError

MAX_TEMPLATE_LENGTH = 1 << 18
"""The most characters of a template; the longest in use have some ten thousand."""
_MARKS = ("{{", "{%")
_ALLOWED = "the path of a file, or a template's text, which has {{ or {%"


def template_text(given: str | None) -> str | None:
    """Return the text of the template that an argument gives or names.

    Raises:
        InvalidArgumentError: it is neither a text with Jinja's marks nor a file that can be read, or too long.
    """
    if given is None:
        return None
    text = given if is_template(given) else _in_file(given)
    require_utf8("chat_template", text)
    if len(text) > MAX_TEMPLATE_LENGTH:
        raise InvalidArgumentError(
            "chat_template", given, f"at most {MAX_TEMPLATE_LENGTH:,} characters long (it has {len(text):,})"
        )
    return text


def is_template(text: str) -> bool:
    """Return whether a text has the marks of a Jinja template, without which it says the same whatever it is given."""
    return any(mark in text for mark in _MARKS)


def _in_file(given: str) -> str:
    try:
        path = Path(given).expanduser()
        if not path.is_file():
            raise InvalidArgumentError("chat_template", given, f"{_ALLOWED} (there is no such file)")
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_LENGTH + 1)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError("chat_template", given, f"a file of UTF-8 text ({error})") from error
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError("chat_template", given, f"{_ALLOWED} ({error})") from error
