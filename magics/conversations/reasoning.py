"""Telling a model's reasoning from its answer, also while both are being written."""

from __future__ import annotations

from dataclasses import dataclass

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""What models write around their reasoning."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model has written: its answer, and the reasoning before it. `is_reasoning` while that has no end."""

    text: str
    reasoning: str = ""
    is_reasoning: bool = False


def tag_opened_by(prompt: str) -> str | None:
    """The tag that will end the reasoning which a prompt's end has begun; None if it has begun none."""
    ending = prompt.rstrip()
    return next((closing for opening, closing in TAGS if ending.endswith(opening)), None)


def split_reasoning(text: str, closing: str | None = None, *, complete: bool = True) -> Answer:
    """Divide what a model has written.

    Reasoning is what stands between a pair of `TAGS` at the very beginning. Anywhere else a tag is text.

    Args:
        text: all of it so far.
        closing: the tag that ends reasoning which the prompt has begun (`tag_opened_by`).
        complete: nothing more will come; else a tag of which only a part is there is held back.
    """
    start = text.lstrip()
    opening = next((opening for opening, _ in TAGS if start.startswith(opening)), None)
    if opening is not None and closing in (None, dict(TAGS)[opening]):
        closing = dict(TAGS)[opening]
        start = start[len(opening) :]
    elif closing is None:
        if not complete and start and any(opening.startswith(start) for opening, _ in TAGS):
            return Answer("")
        return Answer(text)
    reasoning, ended, answer = start.partition(closing)
    if ended:
        return Answer(answer.lstrip(), reasoning.strip())
    if not complete:
        reasoning = reasoning[: len(reasoning) - _begun(reasoning, closing)]
    return Answer("", reasoning.strip(), is_reasoning=True)


def _begun(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
