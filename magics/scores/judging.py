"""A model as judge: it grades answers, and a grammar sees to it that it gives a grade and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from IPython.core.error import UsageError

from nbengine.errors import IncompleteOutputError, NBEngineError
from nbengine.magics.generation.arguments import GenerateOptions
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.thinking import TemplateOptions
from nbengine.magics.interpolate import interpolate
from nbengine.magics.scores.scorers import JudgePrompt, Row, answer_text
from nbengine.magics.scores.table import Place
from nbengine.magics.session import AttachedEngine
from nbengine.sampling_params import StructuredOutputsParams

GRADES = (1, 2, 3, 4, 5)
"""All grades, from the worst to the best."""
_SAMPLING = {
    "temperature": 0.0,
    "max_tokens": 512,
    "structured_outputs": StructuredOutputsParams(choice=list(map(str, GRADES))),
}
_BOTH = "{rule}\n\nThe prompt:\n{prompt}\n\nThe answer:\n{answer}"
_SCALE = f"\n\nGive one grade from {GRADES[0]} (worst) to {GRADES[-1]} (best)."


class Judge:
    """A judge of a comparison's answers: each is graded by the engine that has written it, in one request.

    Such a request is none of the notebook's prompts: `%engine recover` does not show it.
    """

    def __init__(
        self,
        prompt: JudgePrompt,
        rows: Sequence[Row],
        engines: Sequence[AttachedEngine],
        options: Sequence[GenerateOptions],
        submitter: Submitter,
    ) -> None:
        """Make the judge; `rows`, `engines` and `options` are those of the combinations, by position."""
        self._prompt = prompt
        self._rows = rows
        self._engines = engines
        self._options = options
        self._submitter = submitter
        self._pending: dict[Place, Request] = {}

    def ask(self, place: Place, answer: GenerationResult) -> None:
        """Ask for the grade of an answer.

        Raises:
            NBEngineError: the request is not possible, or the engine cannot be reached.
        """
        position = place[0]
        text = judge_request(self._prompt, self._rows[position], answer)
        options = self._options[position]
        own = replace(
            options,
            prompt=text,
            system=None,
            sampling=_SAMPLING,
            parse_json=False,
            template=TemplateOptions(),
        )
        try:
            request = self._submitter.prepare(self._engines[position], own)
        except UsageError as error:
            raise NBEngineError(str(error)) from None
        request.send(foreground=not options.background, kept=False)
        self._pending[place] = request

    def take(self) -> Iterator[tuple[Place, int | NBEngineError]]:
        """Yield the grades that have come since the last time, each an error where there is none."""
        for place, request in list(self._pending.items()):
            try:
                grade = _grade(request)
            except NBEngineError as error:
                request.fail(error)
                grade = error
            if grade is not None:
                del self._pending[place]
                yield place, grade

    def abort(self) -> None:
        """Ask the engines to end what has not ended."""
        for request in self._pending.values():
            request.abort()

    def end(self) -> None:
        """Expect no further grade."""
        for request in self._pending.values():
            request.end(shown=request.stop())
        self._pending.clear()


def judge_request(prompt: JudgePrompt, row: Row, answer: GenerationResult) -> str:
    """Make the text that asks for a grade: the rule, and prompt and answer unless the rule names the answer."""
    values = {"prompt": answer.prompt, "answer": answer_text(answer)}
    rule = interpolate(prompt.text, {**prompt.namespace, **row.elements, **values})
    if interpolate(prompt.text, {"answer": ""}) == prompt.text:
        rule = _BOTH.format(rule=rule, **values)
    return rule + _SCALE


def _grade(request: Request) -> int | NBEngineError | None:
    """Return the grade if the request has ended.

    Raises:
        NBEngineError: the request has failed, or what it has brought is no grade.
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
    if text not in map(str, GRADES):
        raise IncompleteOutputError(
            f"the judge has given no grade from {GRADES[0]} to {GRADES[-1]}: {text!r}"
        )
    return int(text)
