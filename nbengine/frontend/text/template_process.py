"""This module renders chat templates: plain ones here, all others in a process whose time and memory the
kernel limits.

A template comes from a model's files or from a caller, and is a program: fifty characters can take a year or
all memory. jinja2's sandbox keeps a template from the file system, not from that.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
from typing import Any

import msgspec

from nbengine.config.chat_template import MAX_TEMPLATE_LENGTH
from nbengine.errors import RequestError
from nbengine.frontend.text.template_cost import is_cheap, plain
from nbengine.runtime.limited_process import LimitedProcess, serve

RENDER_SECONDS = 2.0
"""The processor time that a template may take; a usual one takes a hundredth of it for a megabyte of
messages."""
RENDER_BYTES = 512 << 20
"""The memory that a template may take, beside what the process has at its start."""
_MAX_REASON_LENGTH = 1000
_COMPLAINT = re.compile(r"(?:(?P<place>line \d+): )?TemplateError: (?P<text>.*)", re.DOTALL)
"""The reason that `reason_of` gives where a template has called `raise_exception`."""
_TEMPLATE_FILE = "<template>"
"""The name of the file in the frames that jinja2 makes for a template without one."""


class TemplateCall(msgspec.Struct, frozen=True, array_like=True):
    """A template and what it is to render."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class RenderedTemplate(msgspec.Struct, array_like=True):
    """The text, or the reason for which there is none."""

    text: str = ""
    error: str = ""


class TemplateProcess(LimitedProcess):
    """The client's end of the rendering process, which is started when it is first needed. It is safe on any
    thread."""

    def __init__(self, max_seconds: float = RENDER_SECONDS, max_bytes: int = RENDER_BYTES) -> None:
        super().__init__(__name__, "renders chat templates", "to render", max_seconds, max_bytes)
        self._lock = threading.Lock()

    def render(self, call: TemplateCall) -> str:
        """Render a template in the process and return the text.

        Raises:
            RequestError: the template fails, or takes too long or too much memory.
            NBEngineError: the process cannot be used.
        """
        question = msgspec.msgpack.encode(call)
        with self._lock:
            answer = self._ask(question)
        rendered = msgspec.msgpack.decode(answer, type=RenderedTemplate)
        if rendered.error:
            raise RequestError(rendered.error)
        return rendered.text


_process = TemplateProcess()
atexit.register(_process.shutdown)


def render_template(call: TemplateCall) -> str:
    """Render a template, in this process if it is sure to take little, else in the other one.

    Raises:
        RequestError: the template is too long, fails, or takes too long or too much memory.
        NBEngineError: the process cannot be used.
    """
    length = len(call.template)
    if length > MAX_TEMPLATE_LENGTH:
        raise RequestError(f"it has {length:,} characters, at most {MAX_TEMPLATE_LENGTH:,} are allowed")
    call = msgspec.structs.replace(
        call, messages=plain(call.messages), tools=plain(call.tools), variables=plain(call.variables)
    )
    try:
        is_here = is_cheap(call.template, {"messages": call.messages, "tools": call.tools}, call.variables)
        return _rendered(call) if is_here else _process.render(call)
    except RequestError:
        raise
    except Exception as error:
        # A template is somebody else's program, and may fail in any way.
        raise RequestError(reason_of(error)) from error


def _rendered(call: TemplateCall) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    # Many templates take a key whose value is None for a key that has a value.
    messages = [{key: value for key, value in m.items() if value is not None} for m in call.messages]
    (text,), _ = render_jinja_template(
        conversations=[messages],
        tools=call.tools,
        chat_template=call.template,
        continue_final_message=call.continue_final_message,
        add_generation_prompt=call.add_generation_prompt,
        **call.variables,
    )
    return str(text)


def reason_of(error: BaseException) -> str:
    """Return what went wrong with a template, and in which of its lines."""
    if isinstance(error, MemoryError):
        return "it takes too much memory to render; simplify it"
    line, message = _line(error), getattr(error, "message", None) or str(error)
    place = "" if line is None else f"line {line}: "
    return f"{place}{type(error).__name__}: {message}"[:_MAX_REASON_LENGTH]


def complaint_in(reason: str) -> tuple[str, str] | None:
    """Return what a template says itself (`raise_exception`) and the line where it does, None if it has
    failed in another way; `reason` is that of `reason_of`."""
    found = _COMPLAINT.fullmatch(reason)
    return None if found is None else (found["text"], found["place"] or "")


def _line(error: BaseException) -> int | None:
    """Return the line of the template that an error is about: jinja2 puts the template's own frames into the
    traceback."""
    line = getattr(error, "lineno", None)
    place = error.__traceback__
    while line is None and place is not None:
        if place.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = place.tb_lineno
        place = place.tb_next
    return line


def _answer(question: bytes) -> bytes:
    try:
        rendered = RenderedTemplate(_rendered(msgspec.msgpack.decode(question, type=TemplateCall)))
        return msgspec.msgpack.encode(rendered)
    except Exception as error:  # noqa: BLE001 (whatever the template raises is about the template)
        return msgspec.msgpack.encode(RenderedTemplate(error=reason_of(error)))


if __name__ == "__main__":
    import transformers.utils.chat_template_utils  # noqa: F401 (before there are limits)

    sys.exit(serve(_answer, float(sys.argv[1]), int(sys.argv[2]), beyond_present=True))
