"""The scoring of a comparison: each answer's scores are found when it has ended, beside the stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from nbengine.errors import InvalidTypeError, NBEngineError
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.scores.judging import Judge
from nbengine.magics.scores.running import ScoreCalls
from nbengine.magics.scores.scorers import JUDGE, ScorePlan, Scorer
from nbengine.magics.scores.table import Place, Scores, score_of


class Scoring:
    """The work that fills the scores of a comparison; without scores in its plan it has nothing to do.

    `keep` is called with each position of which something has been found.
    """

    def __init__(
        self, plan: ScorePlan, scores: Scores, judge: Judge | None, keep: Callable[[int], object]
    ) -> None:
        self._plan = plan
        self._scores = scores
        self._judge = judge
        self._keep = keep
        self._calls: ScoreCalls[tuple[str, Place]] = ScoreCalls()

    @property
    def is_done(self) -> bool:
        """Return whether every answer that has ended has its scores."""
        return self._scores.num_open == 0

    def begin(self, position: int, result: GenerationResult) -> None:
        """Find the scores of the answers of a result that has ended."""
        self._begin(position, result, self._plan.scorers)

    def begin_again(self, position: int, results: Sequence[GenerationResult]) -> list[int]:
        """Find the scores of a result whose answers are others now; return the positions whose scores change.

        A judge that compares answers judges all answers to that prompt again.
        """
        judge, scores = self._plan.judge, self._scores
        scores.renew(position)
        self.begin(position, results[position])
        if judge is None or not judge.in_pairs:
            return [position]
        positions = list(self._plan.same_prompt(position))
        for other in positions:
            if other != position and results[other].finished:
                scores.forget(other, [JUDGE])
                self._begin(other, results[other], ())
        return positions

    def _begin(self, position: int, result: GenerationResult, scorers: Sequence[Scorer]) -> None:
        names = [*(scorer.name for scorer in scorers), *([JUDGE] if self._judge is not None else [])]
        for number, answer in _answers(result):
            place = position, number
            self._scores.begin(place, names)
            for scorer in scorers:
                self._calls.begin((scorer.name, place), partial(scorer.score, position, answer))
            if self._judge is not None:
                try:
                    self._judge.ask(place, answer)
                except NBEngineError as error:
                    self._scores.note(JUDGE, place, error)

    def step(self) -> None:
        """Take the scores that have come."""
        for (name, place), value in self._calls.take():
            try:
                outcome = value if isinstance(value, BaseException) else score_of(value, name)
            except InvalidTypeError as error:
                outcome = error
            self._scores.note(name, place, outcome)
        if self._judge is not None:
            for place, grade in self._judge.take():
                self._scores.note(JUDGE, place, grade)
        for position in sorted(self._scores.take_changed()):
            self._keep(position)

    def abort(self) -> None:
        """Ask the engines to end what the judge has not answered."""
        if self._judge is not None:
            self._judge.abort()

    def end(self) -> None:
        """Take what has come, and expect nothing more."""
        self.step()
        self._calls.end()
        if self._judge is not None:
            self._judge.end()
        self._scores.give_up()


def _answers(result: GenerationResult) -> Iterator[tuple[int, GenerationResult]]:
    """Yield a result's whole answers with their numbers, each as a result of its own where there are several."""
    for completion in result.outputs:
        if completion.finish_reason in ("abort", "error"):
            continue
        if len(result.outputs) == 1:
            yield 0, result
            return
        one = copy.copy(result)
        one.outputs = [msgspec.structs.replace(completion, index=0)]
        yield completion.index, one
