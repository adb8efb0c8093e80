"""`nbengine chat`: a conversation in a terminal, whose answers stream, and lines that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from nbengine.errors import InvalidArgumentError, NBEngineError, RequestError, did_you_mean
from nbengine.frontend.async_llm import AsyncLLM
from nbengine.frontend.requests.output_interval import FOR_READERS
from nbengine.magics.conversations.conversation import Conversation, Exchange
from nbengine.outputs import RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams
from nbengine.widgets.words import count, harmless

HELP = """\
A line is a message; one that ends with a backslash goes on in the next line. Ctrl-C ends an answer, Ctrl-D the chat.
  /system [TEXT]     set the system message, or show it
  /set NAME=VALUE    set a sampling parameter, such as temperature=0; /set alone shows them
  /retry             have the last message answered once more
  /undo [N]          take back the last turn, or the last N
  /reset             forget the conversation
  /history           show all that was said
  /save FILE         write it to a file; /load FILE goes on with it
  /help, /quit"""
MAX_TOKENS = 512
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class _Quit(Exception):
    """The user leaves."""


@dataclass
class Chat:
    """A conversation with an engine; `read` gives the next line, and raises EOFError at the end."""

    llm: AsyncLLM
    read: Callable[[str], str]
    out: TextIO
    conversation: Conversation = field(default_factory=Conversation)
    sampling: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """Talk until the user leaves or the input ends; return 1 if a message could not be answered.

        Raises:
            EngineEndError: the engine has ended.
        """
        if not self.llm.has_chat_template:
            raise NBEngineError(
                f"the model of engine {self.llm.name!r} has no chat template, so it cannot hold a conversation"
            )
        self._say(
            f"{self.llm.config.model.model} on engine {self.llm.name!r}; /help lists what else there is"
        )
        failed = False
        while True:
            try:
                line = self._line()
            except EOFError:
                return int(failed)
            except KeyboardInterrupt:
                self._say("\n(Ctrl-D or /quit leaves)")
                continue
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line.strip():
                    self._answer(line)
            except _Quit:
                return int(failed)
            except (InvalidArgumentError, RequestError) as error:
                failed = True
                self._say(f"nbengine: {error}")

    def _line(self) -> str:
        line = self.read("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self.read(". ")
        return line

    def _answer(self, message: str) -> None:
        """Have a message answered; an interrupt ends the answer and keeps what there is of it.

        Raises:
            InvalidArgumentError, RequestError: it cannot be answered; the conversation stays as it was.
        """
        conversation = self.conversation
        messages = [*conversation.messages, {"role": "user", "content": message}]
        defaults = {"max_tokens": MAX_TOKENS, **self.llm.default_sampling_params(), **self.sampling}
        params = SamplingParams(**defaults, output_kind=RequestOutputKind.DELTA)
        prompt = self.llm.render_chat(messages)
        collector = self.llm.submit(prompt, params, output_interval=FOR_READERS)
        writer = _Writer(self.out)
        while not writer.finish_reason:
            try:
                writer.take(collector.get_blocking())
            except KeyboardInterrupt:
                self.llm.abort_soon(collector.engine_request_id)
        writer.end()
        conversation.add(Exchange(message, writer.text, writer.reasoning, writer.finish_reason))

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._say(HELP),
            "quit": self._quit,
            "exit": self._quit,
            "system": self._system,
            "set": self._set,
            "retry": self._retry,
            "undo": self._undo,
            "reset": self._reset,
            "history": self._history,
            "save": self._save,
            "load": self._load,
        }
        if name not in commands:
            self._say(
                f"there is no /{harmless(name)}{did_you_mean(name, commands)} (/help lists what there is)"
            )
            return
        commands[name](rest.strip())

    def _quit(self, rest: str) -> None:
        del rest
        raise _Quit

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        self._say(f"system message: {self.conversation.system or 'none'}")

    def _set(self, text: str) -> None:
        if text:
            name, is_given, value = text.partition("=")
            if not is_given:
                raise InvalidArgumentError("/set", text, "NAME=VALUE, such as temperature=0")
            try:
                read = json.loads(value)
            except ValueError:
                read = value
            known = [each for each in SamplingParams.__struct_fields__ if each not in ("n", "output_kind")]
            if name.strip() not in known:
                allowed = f"a sampling parameter{did_you_mean(name.strip(), known)}"
                raise InvalidArgumentError("/set", name, allowed)
            SamplingParams(**{name.strip(): read})
            self.sampling[name.strip()] = read
        values = {"max_tokens": MAX_TOKENS, **self.llm.default_sampling_params(), **self.sampling}
        self._say(", ".join(f"{name}={value!r}" for name, value in values.items()))

    def _retry(self, rest: str) -> None:
        del rest
        (turn,) = self.conversation.undo()
        try:
            self._answer(turn.user)
        except NBEngineError:
            self.conversation.add(turn)
            raise

    def _undo(self, text: str) -> None:
        if text and not text.isdecimal():
            raise InvalidArgumentError("/undo", text, "a number of turns")
        removed = self.conversation.undo(int(text or 1))
        self._say(f"{count(len(removed), 'turn is', 'turns are')} taken back, {len(self.conversation)} left")

    def _reset(self, rest: str) -> None:
        del rest
        self.conversation.reset()
        self._say("the conversation is empty")

    def _history(self, rest: str) -> None:
        del rest
        for turn in self.conversation.turns:
            ended = " (interrupted)" if turn.interrupted else ""
            self._say(f"> {turn.user}\n{turn.text}{ended}")

    def _save(self, path: str) -> None:
        self._at(path, "save", self.conversation.save)
        self._say(f"{count(len(self.conversation), 'turn')} written to {path}")

    def _load(self, path: str) -> None:
        self.conversation = self._at(path, "load", Conversation.load)
        self._say(f"{count(len(self.conversation), 'turn')} read from {path}")

    def _at(self, path: str, command: str, function: Callable[[str], Any]) -> Any:
        if not path:
            raise InvalidArgumentError(f"/{command}", path, "the name of a file")
        try:
            return function(path)
        except (OSError, NBEngineError) as error:
            raise InvalidArgumentError(f"/{command}", path, f"a file that can be used: {error}") from error

    def _say(self, text: str) -> None:
        print(harmless(text), file=self.out, flush=True)


class _Writer:
    """An answer that is written while it comes: its text, and its reasoning in a paler colour."""

    def __init__(self, out: TextIO) -> None:
        self.text = self.reasoning = ""
        self.finish_reason: str | None = None
        self._out = out
        self._is_terminal = out.isatty()
        self._is_pale = False

    def take(self, output: RequestOutput) -> None:
        """Write what is new."""
        completion = output.outputs[0]
        if completion.reasoning:
            self.reasoning += completion.reasoning
            self._write(completion.reasoning, pale=True)
        content = completion.text if completion.content is None else completion.content
        if content:
            if self._is_pale:
                self._write("\n", pale=False)
            self.text += content
            self._write(content, pale=False)
        self.finish_reason = completion.finish_reason

    def end(self) -> None:
        """End the line, and say so if the answer lacks its end."""
        why = {"abort": "interrupted", "length": "the answer has reached max_tokens, or the context's end"}
        note = why.get(self.finish_reason or "")
        self._write("\n" + (f"({note})\n" if note else ""), pale=False)

    def _write(self, text: str, *, pale: bool) -> None:
        if self._is_terminal and pale != self._is_pale:
            self._out.write(_DIM if pale else _PLAIN)
        self._is_pale = pale
        self._out.write(harmless(text))
        self._out.flush()


def talk(llm: AsyncLLM, system: str | None) -> int:
    """Talk with the model of an engine on standard input and output.

    Raises:
        NBEngineError: the engine has ended, or its model has no chat template.
    """
    if sys.stdin.isatty():
        import readline  # noqa: F401 - importing it gives `input` its editing and its history

        read: Callable[[str], str] = input
    else:

        def read(mark: str) -> str:
            del mark
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\n")

    return Chat(llm, read, sys.stdout, Conversation("default", system)).run()
