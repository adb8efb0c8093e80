"""Checks what a grammar is to be made of, in a small process that may not take long or grow large.

llguidance bounds the work of a step, but not what it does to find out whether a schema makes sense: fourteen
intersected patterns, 400 bytes of schema, take seconds and hundreds of megabytes, and each further one four times
as many. So every new text is first compiled in this process (`python -m nbengine.engine.grammar_check`), whose
time and memory are limited by the kernel, and which is started anew when a text has ended it.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys

import msgspec

from nbengine.engine.processes import child_environment, describe_status
from nbengine.errors import NBEngineError, RequestError
from nbengine.units import size

CHECK_SECONDS = 2.0
"""Processor time that a check may take; a realistic schema takes less than a millisecond."""
CHECK_BYTES = 1 << 30
"""Address space of the checking process."""
MAX_SOURCE_BYTES = 64 * 1024
MAX_REASON_LENGTH = 1000
WHITESPACE = r" ?|\r?\n[ \t]{0,32}"
"""Between the parts of a JSON text: a space, or a line break and an indentation. Without a limit a small model that
has begun with white space often never ends it."""

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_JSON_OBJECT = '{"type": "object"}'


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """A constraint as the library takes it; `kind` is the field of `StructuredOutputsParams`."""

    kind: str
    text: str
    """A JSON schema, a regular expression, a JSON list of choices, or a grammar."""
    whitespace: str | None = WHITESPACE
    """Regular expression of the white space in JSON; None: there is none."""


class CheckedGrammar(msgspec.Struct, array_like=True):
    """What a check came to: the grammar in the library's own form, or why there is none."""

    grammar: str = ""
    error: str = ""


class GrammarChecker:
    """The other end of the checking process, which is started when it is first needed. For one thread at a time."""

    def __init__(self, max_seconds: float = CHECK_SECONDS, max_bytes: int = CHECK_BYTES) -> None:
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, source: GrammarSource) -> str:
        """Return the grammar in the library's own form.

        Raises:
            RequestError: the text is too long, not valid, or takes too long or too much memory to compile.
            NBEngineError: the process cannot be used.
        """
        num_bytes = len(source.text.encode())
        if num_bytes > MAX_SOURCE_BYTES:
            raise RequestError(f"it has {num_bytes:,} bytes, at most {MAX_SOURCE_BYTES:,} are allowed")
        answer = self._exchange(msgspec.json.encode(source) + b"\n")
        if not answer:
            raise self._why_it_ended()
        checked = msgspec.json.decode(answer, type=CheckedGrammar)
        if checked.error:
            raise RequestError(checked.error)
        return checked.grammar

    def shutdown(self) -> None:
        """End the process and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, question: bytes) -> bytes:
        for _ in range(2):
            process = self._running()
            if process.stdin is None or process.stdout is None:
                raise NBEngineError("the process that checks grammars has no pipes")
            try:
                process.stdin.write(question)
                process.stdin.flush()
            except BrokenPipeError:
                # It was ended while it had nothing to do: the text is not to blame.
                self.shutdown()
                continue
            return process.stdout.readline()
        return b""

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            safe_path = ["-P"] if sys.flags.safe_path else []
            self._process = subprocess.Popen(
                [sys.executable, *safe_path, "-m", __name__, str(self._max_seconds), str(self._max_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
            )
        return self._process

    def _why_it_ended(self) -> NBEngineError:
        process = self._process
        status = 0 if process is None else process.wait()
        self.shutdown()
        if status == -signal.SIGPROF:
            return RequestError(f"it takes more than {self._max_seconds:g} s to compile; simplify it")
        if status == -signal.SIGABRT:
            return RequestError(f"it takes more than {size(self._max_bytes)} to compile; simplify it")
        return NBEngineError(f"the process that checks grammars {describe_status(status)}")


def guidance_grammar(source: GrammarSource) -> str:
    """Translate a constraint into llguidance's own form.

    Raises:
        Exception: the library cannot read it; the message says why.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match source.kind:
        case "json" | "json_object":
            spaces = source.whitespace
            options = {"whitespace_flexible": False} if spaces is None else {"whitespace_pattern": spaces}
            schema = source.text if source.kind == "json" else _JSON_OBJECT
            grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=options)
        case "regex":
            grammar = LLMatcher.grammar_from_regex(source.text)
        case "choice":
            grammar = LLMatcher.grammar_from_lark(
                "start: " + " | ".join(map(_literal, json.loads(source.text)))
            )
        case _:
            text = gbnf_to_lark(source.text) if _GBNF_RULE.search(source.text) else source.text
            grammar = LLMatcher.grammar_from_lark(text)
    return grammar


def parser_limits() -> object:
    """What the library may spend: its own limits, but for the states that it keeps (2 KiB each)."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _literal(choice: str) -> str:
    """A string of the library's Lark dialect, which has JSON's escapes and takes no control characters."""
    return json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f")


def _checked(line: bytes) -> CheckedGrammar:
    from llguidance import LLMatcher

    try:
        grammar = guidance_grammar(msgspec.json.decode(line, type=GrammarSource))
        error = LLMatcher.validate_grammar(grammar, limits=parser_limits())
    except Exception as failure:  # noqa: BLE001 (whatever the library raises is about the text)
        return CheckedGrammar(error=str(failure).strip()[:MAX_REASON_LENGTH] or type(failure).__name__)
    if error and not error.startswith("WARNING"):
        return CheckedGrammar(error=error.strip()[:MAX_REASON_LENGTH])
    return CheckedGrammar(grammar)


def main(max_seconds: float, max_bytes: int) -> int:
    """Answer one line with one line until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        # The signal is not handled: it ends the process, wherever the library is.
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        answer = _checked(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
