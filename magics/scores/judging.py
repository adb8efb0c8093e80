"""A model as judge, which grades answers or says which of two is better."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Protocol

from nbengine.errors import NBEngineError
from nbengine.frontend.text.interpolate import interpolate
from nbengine.magics.generation.arguments import GenerateOptions
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.scores.asking import Questions
from nbengine.magics.scores.scorers import JudgePrompt, Row, ScorePlan, answer_text
from nbengine.magics.scores.table import Place, Score, Scores
from nbengine.magics.session import AttachedEngine

GRADES = ("1", "2", "3", "4", "5")
"""All grades, from the worst to the best."""
SIDES = ("A", "B")
"""The choices between two answers."""
_GRADED = "{rule}\n\nThe prompt:\n{prompt}\n\nThe answer:\n{answer}"
_SCALE = f"\n\nGive one grade from {GRADES[0]} (worst) to {GRADES[-1]} (best)."
_PAIR = "{rule}\n\nThe prompt:\n{prompt}\n\nAnswer A:\n{answer_a}\n\nAnswer B:\n{answer_b}"
_WHICH = "\n\nWhich answer is better, A or B?"

Pair = tuple[Place, Place]
"""Two answers of a prompt: the first is shown as answer A."""


class Judge(Protocol):
    """A judge of a comparison's answers."""

    def ask(self, place: Place, answer: GenerationResult) -> None:
        """Take an answer that has ended, and ask what can be asked of it now.

        Raises:
            NBEngineError: a request is not possible, or the engine cannot be reached.
        """

    def take(self) -> Iterator[tuple[Place, Score | NBEngineError]]:
        """Yield the scores that have come since the last time, each an error where there is none."""

    def abort(self) -> None:
        """Ask the engines to end what has not ended."""

    def end(self) -> None:
        """Expect nothing more."""


class GradingJudge:
    """A judge that grades each answer by itself."""

    def __init__(self, prompt: JudgePrompt, rows: Sequence[Row], questions: Questions[Place]) -> None:
        self._prompt = prompt
        self._rows = rows
        self._questions = questions
        self.abort, self.end = questions.abort, questions.end

    def ask(self, place: Place, answer: GenerationResult) -> None:
        """Ask for the grade of an answer."""
        text = grade_request(self._prompt, self._rows[place[0]], answer)
        self._questions.ask(place, place[0], text)

    def take(self) -> Iterator[tuple[Place, int | NBEngineError]]:
        """Yield the grades that have come, as numbers."""
        for place, grade in self._questions.take():
            yield place, grade if isinstance(grade, NBEngineError) else int(grade)


class PairingJudge:
    """A judge that compares the answers of different settings to the same prompt, two at a time.

    Each two are asked about twice, with their positions swapped. An answer wins (1) where it is preferred both
    times, and where the two choices are not the same answer there is a tie (0.5). The score of an answer is
    the mean over all others. Unless one engine judges all, that which has written answer A is asked, so that of two
    engines each judges once.
    """

    def __init__(
        self,
        prompt: JudgePrompt,
        plan: ScorePlan,
        results: Sequence[GenerationResult],
        questions: Questions[Pair],
    ) -> None:
        self._prompt = prompt
        self._plan = plan
        self._results = results
        self._questions = questions
        self._answers: dict[Place, GenerationResult] = {}
        self._waiting: list[Place] = []
        """The answers without a score."""
        self._preferred: dict[Pair, bool | NBEngineError] = {}
        """For each pair, whether answer A was preferred."""
        self._asked: defaultdict[Place, list[Place]] = defaultdict(list)
        """For each answer, the others that it is compared with."""
        self.abort, self.end = questions.abort, questions.end

    def ask(self, place: Place, answer: GenerationResult) -> None:
        """Ask which is better, this answer or each one of the same prompt that has ended before."""
        others = [other for other in self._rivals(place) if other in self._answers]
        self._answers[place] = answer
        self._waiting.append(place)
        for other in others:
            self._asked[place].append(other)
            self._asked[other].append(place)
            for pair in ((other, place), (place, other)):
                try:
                    self._questions.ask(pair, pair[0][0], self._text(pair))
                except NBEngineError as error:
                    self._preferred[pair] = error

    def take(self) -> Iterator[tuple[Place, float | NBEngineError]]:
        """Yield the score of each answer that has been compared with all others."""
        for pair, choice in self._questions.take():
            self._preferred[pair] = choice if isinstance(choice, NBEngineError) else choice == SIDES[0]
        for place in self._waiting[:]:
            score = self._score(place)
            if score is not None:
                self._waiting.remove(place)
                yield place, score

    def _rivals(self, place: Place) -> list[Place]:
        """List the answers of the same prompt and number with other settings, whether they exist or not."""
        position, number = place
        return [(other, number) for other in self._plan.same_prompt(position) if other != position]

    def _score(self, place: Place) -> float | NBEngineError | None:
        for rival in self._rivals(place):
            if rival not in self._answers and not self._results[rival[0]].finished:
                return None  # It may still come.
        points = []
        for rival in self._asked[place]:
            pairs = ((place, rival), (rival, place))
            if not all(pair in self._preferred for pair in pairs):
                return None
            as_first, as_second = (self._preferred[pair] for pair in pairs)
            if isinstance(as_first, NBEngineError):
                return as_first
            if isinstance(as_second, NBEngineError):
                return as_second
            points.append((as_first + (not as_second)) / 2)
        return mean(points) if points else NBEngineError("no other setting has an answer to this prompt")

    def _text(self, pair: Pair) -> str:
        first, second = (self._answers[place] for place in pair)
        row = self._plan.rows[pair[0][0]]
        return pair_request(self._prompt, row, first, second)


def judge_of(
    plan: ScorePlan,
    results: Sequence[GenerationResult],
    engines: Sequence[AttachedEngine],
    options: Sequence[GenerateOptions],
    submitter: Submitter,
    scores: Scores,
) -> Judge | None:
    """Make the judge that a plan asks for; `results`, `engines` and `options` come by position, the last two being
    those of the questions.

    `scores` has what a judge has chosen before.
    """
    prompt = plan.judge
    if prompt is None:
        return None
    if prompt.in_pairs:
        pairs = Questions[Pair](SIDES, engines, options, submitter, scores)
        return PairingJudge(prompt, plan, results, pairs)
    return GradingJudge(prompt, plan.rows, Questions[Place](GRADES, engines, options, submitter, scores))


def grade_request(prompt: JudgePrompt, row: Row, answer: GenerationResult) -> str:
    """Make the text that asks for a grade: the rule, and prompt and answer unless the rule names the answer."""
    values = {"prompt": answer.prompt, "answer": answer_text(answer)}
    return _filled(prompt, row, values, _GRADED) + _SCALE


def pair_request(prompt: JudgePrompt, row: Row, first: GenerationResult, second: GenerationResult) -> str:
    """Make the text that asks for the better answer: the rule, and what it does not name."""
    values = {"prompt": first.prompt, "answer_a": answer_text(first), "answer_b": answer_text(second)}
    return _filled(prompt, row, values, _PAIR) + _WHICH


def _filled(prompt: JudgePrompt, row: Row, values: dict[str, str], layout: str) -> str:
    rule = interpolate(prompt.text, {**prompt.namespace, **row.elements, **values})
    answers = dict.fromkeys(values.keys() - {"prompt"}, "")
    if interpolate(prompt.text, answers) != prompt.text:
        return rule
    return layout.format(rule=rule, **values)
