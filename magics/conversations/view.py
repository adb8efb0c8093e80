"""The views of conversations: an answer while it is written, its reasoning folded away, and all turns."""

from __future__ import annotations

from html import escape

from IPython.core.interactiveshell import InteractiveShell

from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.magics.conversations.answer import Answer, answer_in
from nbengine.magics.conversations.conversation import Conversation, Exchange
from nbengine.magics.generation.render import answer_bundle, footer_of, growing
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.view import UPDATE_SECONDS, Appearance, CellView, PromptLine, View
from nbengine.magics.tools.cards import card_html, written
from nbengine.widgets.live import in_kernel
from nbengine.widgets.words import MUTED, PLAIN, PROSE, count, harmless, joined, muted, print_quietly

_PROSE = f"{PROSE};word-break:normal;line-height:1.4;font-family:inherit;margin:0"
_FOLD = (
    f'<details {PLAIN} style="margin:0 0 0.5em 0"><summary style="{MUTED};cursor:pointer">{{}}</summary>'
    f'<pre style="{_PROSE};{MUTED};border-left:3px solid var(--jp-border-color2,#bbb);padding-left:0.8em">{{}}</pre>'
    "</details>"
)
_MESSAGE = f'<div style="{MUTED}">{{}}</div>{{}}<pre {PLAIN} style="{_PROSE};padding-bottom:0.8em">{{}}</pre>'


def chat_bundle(
    answer: Answer, output_format: str, footer: str = "", *, complete: bool = True
) -> dict[str, str]:
    """Make an answer's MIME bundle; reasoning is a folded element above it, and a line of the plain text."""
    if answer.calling and not complete:
        footer = joined(f"calling {answer.calling} …", footer)
    bundle = answer_bundle(answer.text, output_format, footer, complete=complete)
    if not (answer.reasoning or answer.is_reasoning):
        return bundle
    plain = bundle.pop("text/plain")
    ((kind, shown),) = bundle.items()
    gap = "\n\n" if kind == "text/markdown" else ""
    return {"text/plain": f"[{_label(answer)}]\n\n{plain}", kind: f"{_fold(answer)}{gap}{shown}"}


def conversation_bundle(conversation: Conversation) -> dict[str, str]:
    """Show all messages of a conversation, as a MIME bundle."""
    if not (conversation.turns or conversation.system):
        nothing = f"conversation {conversation.name!r} is empty"
        return {"text/plain": nothing, "text/html": muted(nothing)}
    plain, html = [], []
    if conversation.system:
        plain.append(f"system: {conversation.system}")
        html.append(_message_html("system", "", conversation.system))
    for number, turn in enumerate(conversation.turns, 1):
        user, model = f"{number}. user", f"{number}. assistant{_ending(turn)}"
        plain.append(f"{user}: {turn.user}")
        html.append(_message_html(user, "", turn.user))
        for each in turn.rounds:
            plain += [f"{number}. {written(call.name, call.arguments)}: {call.result}" for call in each.calls]
            html += [
                _said_html(f"{number}. assistant", each.text, each.reasoning),
                *map(card_html, each.calls),
            ]
        note = f"[{_label(Answer(turn.text, turn.reasoning))}] " if turn.reasoning else ""
        plain.append(f"{model}: {note}{turn.text}")
        html.append(_said_html(model, turn.text, turn.reasoning))
    return {"text/plain": "\n\n".join(plain), "text/html": "".join(html)}


class AnswerNotes:
    """The notes under an answer, besides its figures."""

    def __init__(self, dropped: int, max_model_len: int) -> None:
        self._dropped = dropped
        self._max_model_len = max_model_len

    def of(self, result: GenerationResult) -> str:
        """Join the notes of a complete answer."""
        size = result.num_prompt_tokens + len(result.token_ids)
        is_full = result.finish_reason == "length" and size >= self._max_model_len
        return joined(
            f"{count(self._dropped, 'later turn')} dropped" if self._dropped else "",
            f"the context of {self._max_model_len:,} tokens is full: %chat --undo or --reset"
            if is_full
            else "",
        )


class ChatCellView(CellView):
    """A view that shows an answer as one output of the cell, replaced in place; its reasoning stays folded.

    `reading` says how reasoning is told from the answer.
    """

    def __init__(
        self, shell: InteractiveShell, appearance: Appearance, reading: AnswerReading, notes: AnswerNotes
    ) -> None:
        super().__init__(shell, appearance)
        self._reading = reading
        self._notes = notes

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Replace the answer by its final form, with the footer; an empty answer leaves no output."""
        super().finish(result, joined(self._notes.of(result), note))

    def _bundle(self, result: GenerationResult, footer: str = "", *, complete: bool = True) -> dict[str, str]:
        answer = answer_in(result.text, self._reading, complete=complete)
        bundle = chat_bundle(answer, self._appearance.format, footer, complete=complete)
        return bundle if complete else growing(bundle, self.key)


class ChatTerminalView:
    """A view that prints an answer as it comes; of its reasoning it prints only the length."""

    interval = UPDATE_SECONDS
    key = ""

    def __init__(self, appearance: Appearance, reading: AnswerReading, notes: AnswerNotes) -> None:
        self._appearance = appearance
        self._reading = reading
        self._notes = notes
        self._printed = 0
        self._is_reasoning = False
        self._line = PromptLine()

    def update(self, result: GenerationResult) -> None:
        """Print the part that has been added."""
        if self._line.show(result):
            return
        self._line.erase()
        if self._appearance.stream:
            self._print(answer_in(result.text, self._reading, complete=False))

    def show_waiting(self, line: str) -> bool:
        """Return that nothing printed can be replaced."""
        del line
        return False

    def finish(self, result: GenerationResult, note: str = "") -> None:
        """Print the remaining text and the footer."""
        self._line.erase()
        answer = answer_in(result.text, self._reading)
        self._print(answer)
        if self._is_reasoning:
            print(f" {_words(answer.reasoning)}, not finished]", end="")
        print()
        footer = joined(footer_of(result) if self._appearance.footer else "", self._notes.of(result), note)
        if footer:
            print_quietly(footer)

    def _print(self, answer: Answer) -> None:
        if (answer.is_reasoning or answer.reasoning) and not (self._is_reasoning or self._printed):
            self._is_reasoning = True
            print("[reasoning …", end="", flush=True)
        if self._is_reasoning and not answer.is_reasoning:
            self._is_reasoning = False
            print(f" {_words(answer.reasoning)}]\n", flush=True)
            self._printed = -1
        start = max(0, self._printed)
        if len(answer.text) > start:
            print(harmless(answer.text[start:]), end="", flush=True)
            self._printed = len(answer.text)


def chat_view(
    shell: InteractiveShell, appearance: Appearance, reading: AnswerReading, notes: AnswerNotes
) -> View[GenerationResult]:
    """Make the view of the running cell."""
    if in_kernel(shell):
        return ChatCellView(shell, appearance, reading, notes)
    return ChatTerminalView(appearance, reading, notes)


def _said_html(role: str, text: str, reasoning: str) -> str:
    return _message_html(role, _fold(Answer(text, reasoning)) if reasoning else "", text)


def _message_html(role: str, fold: str, text: str) -> str:
    return _MESSAGE.format(escape(role), fold, escape(text))


def _fold(answer: Answer) -> str:
    # The text is one line: a blank line would end a block of HTML in Markdown, and a dollar sign or a
    # backslash would begin mathematics.
    text = escape(answer.reasoning).replace("$", "&#36;").replace("\\", "&#92;").replace("\n", "&#10;")
    return _FOLD.format(escape(_label(answer)), text)


def _label(answer: Answer) -> str:
    ending = " …" if answer.is_reasoning else ""
    return f"reasoning, {_words(answer.reasoning)}{ending}"


def _words(text: str) -> str:
    return count(len(text.split()), "word")


def _ending(turn: Exchange) -> str:
    endings = {
        "abort": " (interrupted)",
        "length": " (stopped at the limit)",
        "tool_calls": " (stopped after its calls)",
    }
    return endings.get(turn.finish_reason or "", "")
