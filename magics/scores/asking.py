"""Questions to a judge: a grammar sees to it that each answer is one of the given choices and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from IPython.core.error import UsageError

from nbengine.errors import IncompleteOutputError, NBEngineError
from nbengine.magics.generation.arguments import GenerateOptions
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.thinking import TemplateOptions
from nbengine.magics.kept_runs.recording import Occasion
from nbengine.magics.scores.scorers import answer_text
from nbengine.magics.scores.table import Scores
from nbengine.magics.session import AttachedEngine
from nbengine.sampling_params import StructuredOutputsParams

Key = TypeVar("Key")
_OCCASION = Occasion("judge", "judge")
_MAX_TOKENS = 512
"""Enough for a choice behind the thoughts of a model that always thinks."""


class Questions(Generic[Key]):
    """The questions to a judge that have not been answered, each under a key.

    They are none of the notebook's prompts: `%engine recover` does not show them, and no run is kept of them. What was
    chosen is kept with the run of the answer in question, and the same is not asked again.
    """

    def __init__(
        self,
        choices: Sequence[str],
        engines: Sequence[AttachedEngine],
        options: Sequence[GenerateOptions],
        submitter: Submitter,
        scores: Scores,
    ) -> None:
        """Make the questions; `engines` and `options` are those of a comparison's combinations, by position."""
        self._choices = choices
        self._sampling = {
            "temperature": 0.0,
            "max_tokens": _MAX_TOKENS,
            "structured_outputs": StructuredOutputsParams(choice=list(choices)),
        }
        self._engines = engines
        self._options = options
        self._submitter = submitter
        self._scores = scores
        self._known: list[tuple[Key, str]] = []
        """Choices that were made before."""
        self._pending: dict[Key, Request] = {}
        self._asked: dict[Key, tuple[int, str]] = {}
        """The position and the digest of each question that is pending."""

    def ask(self, key: Key, position: int, text: str) -> None:
        """Ask the engine of the combination at `position`.

        Raises:
            NBEngineError: the request is not possible, or the engine cannot be reached.
        """
        options = self._options[position]
        own = replace(
            options,
            prompt=text,
            system=None,
            sampling=self._sampling,
            parse_json=False,
            template=TemplateOptions(),
            messages=(),
            tools={},
            kept=None,
        )
        try:
            question = self._submitter.question(self._engines[position], own, _OCCASION)
            choice = self._scores.judged.get(position, {}).get(question)
            if choice is not None:
                self._known.append((key, choice))
                return
            request = self._submitter.prepare(self._engines[position], own, None)
        except UsageError as error:
            raise NBEngineError(str(error)) from None
        request.send(foreground=not options.background, kept=False)
        self._pending[key] = request
        self._asked[key] = position, question

    def take(self) -> Iterator[tuple[Key, str | NBEngineError]]:
        """Yield the choices that have come since the last time, each an error where there is none."""
        known, self._known = self._known, []
        yield from known
        for key, request in list(self._pending.items()):
            choice: str | NBEngineError | None
            try:
                choice = self._choice(request)
            except NBEngineError as error:
                request.fail(error)
                choice = error
            if choice is not None:
                del self._pending[key]
                position, question = self._asked.pop(key)
                if isinstance(choice, str):
                    self._scores.note_choice(position, question, choice)
                yield key, choice

    def abort(self) -> None:
        """Ask the engines to end what has not ended."""
        # The thread of a background comparison takes answers out meanwhile.
        for request in list(self._pending.values()):
            request.abort()

    def end(self) -> None:
        """Expect no further answer."""
        for request in self._pending.values():
            request.end(shown=request.stop())
        self._pending.clear()

    def _choice(self, request: Request) -> str | None:
        """Return the choice if the request has ended.

        Raises:
            NBEngineError: the request has failed, or what it has brought is no choice.
        """
        assert request.collector is not None, "a request that has ended is no longer pending"
        output = request.collector.get_nowait()
        if output is None:
            return None
        request.result.absorb(output)
        if not request.result.finished:
            return None
        request.end(shown=request.stop())
        text = answer_text(request.result).strip()
        if text not in self._choices:
            allowed = ", ".join(self._choices)
            raise IncompleteOutputError(f"the judge has answered none of {allowed}: {text!r}")
        return text
