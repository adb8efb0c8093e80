"""The result of a comparison: the results by position and by settings, as rows and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from nbengine.errors import InvalidArgumentError, NBEngineError
from nbengine.magics.comparison.axes import Axis
from nbengine.magics.generation.result import GenerationResult, Handle, ShownOnce
from nbengine.magics.generation.waits import WaitNotice
from nbengine.magics.scores.summary import difference_rows, summary_rows
from nbengine.magics.scores.table import Scores
from nbengine.metrics.frames import frame_of
from nbengine.outputs import CompletionOutput

Settings = dict[str, Any]


class ComparisonResult(ShownOnce):
    """The answers to all combinations of what was varied; they grow while they stream.

    `comparison[2]` is the third result; `comparison[{"temperature": 0}]` is the one with these settings.
    `settings[i]` has what distinguishes `results[i]`; `axes` has the values of each setting, of which the
    last one changes fastest. `errors` has the errors by position: the result of such a request is empty or
    cut off, and its `finish_reason` is "error". `scores` has what `--score`, `--expect` and `--judge` have
    found, `thumbs` what a person has said of results in the grid.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        settings: Sequence[Settings],
        results: Sequence[GenerationResult],
        *,
        num_each: int = 0,
        scores: Sequence[str] = (),
    ) -> None:
        """Make the result; the first `num_each` axes come from `--each`, and `scores` are the scores' names."""
        self.axes: dict[str, list[Any]] = {axis.name: axis.settings for axis in axes}
        self.settings = list(settings)
        self.results = list(results)
        self.errors: dict[int, NBEngineError] = {}
        self.num_each = num_each
        self.scores = Scores(scores)
        self.thumbs: dict[int, int] = {}
        """The thumbs that a person has given results in the grid, by position: 1 is up, -1 is down."""
        self.pinned: set[int] = set()
        """The positions of results whose kept runs a person has pinned."""

    @property
    def finished(self) -> bool:
        """Return whether all answers have ended."""
        return all(result.finished for result in self.results)

    def select(self, **settings: Any) -> list[GenerationResult]:
        """Find the results that have all these settings.

        Raises:
            InvalidArgumentError: nothing of that name was varied.
        """
        return [self.results[index] for index in self._positions(settings)]

    def rows(self) -> list[dict[str, Any]]:
        """List one row for each answer, of which a result has several with `-n`; times are seconds.

        A setting that has the name of one of the answer's columns gets the suffix `_given`. The scores are the
        last columns; of one that could not be found everywhere, NAME_error says why.
        """
        has_samples = any(len(result.outputs) > 1 for result in self.results)
        has_logprobs = any(
            answer.cumulative_logprob is not None for result in self.results for answer in result.outputs
        )
        return [
            self._row(index, completion, has_samples=has_samples, has_logprobs=has_logprobs)
            for index, result in enumerate(self.results)
            for completion in result.outputs or [CompletionOutput(0, "", [])]
        ]

    def to_frame(self) -> Any:
        """Return `rows()` as a pandas DataFrame.

        Raises:
            NotSupportedError: pandas is not installed.
        """
        return frame_of(self.rows())

    def summary(self) -> list[dict[str, Any]]:
        """List the mean of each score with each setting: the settings of flags, not the elements of `--each`.

        A row has the setting's values, `score` (the name), `mean`, `low`, `high` and `n`. The mean of truth
        values is the share that is true, with Wilson's interval; that of numbers has Student's. Both are 95 %
        intervals, and None where the scores are too few. `n` counts the answers; with `-n` and several prompts it
        counts prompts, each with the mean of its answers' scores.
        """
        return summary_rows(self)

    def differences(self) -> list[dict[str, Any]]:
        """List how much greater each score is with one setting than with another, over the same prompts.

        A row has `score` (the name), the settings `first` and `second`, and of second less first the `mean`,
        the 95 % interval from `low` to `high`, and `n`, the number of prompts with both scores. Pairing takes
        out how hard the prompts are. The interval is that of Bonett and Price for truth values, and Student's
        for numbers.
        """
        return difference_rows(self)

    @overload
    def __getitem__(self, key: int | Mapping[str, Any]) -> GenerationResult: ...

    @overload
    def __getitem__(self, key: slice) -> list[GenerationResult]: ...

    def __getitem__(self, key: int | slice | Mapping[str, Any]) -> GenerationResult | list[GenerationResult]:
        if not isinstance(key, Mapping):
            return self.results[key]
        found = self._positions(key)
        if len(found) != 1:
            raise KeyError(f"{len(found) or 'no'} results have {dict(key)!r}; .select(…) gives all that do")
        return self.results[found[0]]

    def __iter__(self) -> Iterator[GenerationResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        varied = " × ".join(f"{len(values)} {name}" for name, values in self.axes.items())
        failed = f", {len(self.errors)} failed" if self.errors else ""
        state = "" if self.finished else ", running"
        return f"ComparisonResult({len(self)} results: {varied}{failed}{state})"

    def _positions(self, settings: Mapping[str, Any]) -> list[int]:
        for name in settings:
            if name not in self.axes:
                raise InvalidArgumentError("setting", name, f"one that was varied: {', '.join(self.axes)}")
        return [
            index
            for index, given in enumerate(self.settings)
            if all(given[name] == value for name, value in settings.items())
        ]

    def _row(
        self, index: int, completion: CompletionOutput, *, has_samples: bool, has_logprobs: bool
    ) -> dict[str, Any]:
        result = self.results[index]
        metrics = result.metrics
        row: dict[str, Any] = {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": result.num_tokens_of(completion),
            "ttft": result.kept_figures.get("ttft", metrics.time_to_first_token),
            "tokens_per_second": result.kept_figures.get("tokens_per_second", metrics.tokens_per_second),
            "prompt_tokens": result.num_prompt_tokens,
            "cached_tokens": result.num_cached_tokens,
        }
        if has_samples:
            row = {"sample": completion.index, **row}
        if has_logprobs:
            row["logprob"] = completion.cumulative_logprob
        if self.errors:
            error = self.errors.get(index)
            row["error"] = None if error is None else str(error)
        if self.thumbs:
            row["thumb"] = self.thumbs.get(index)
        given = {
            f"{name}_given" if name in row else name: value for name, value in self.settings[index].items()
        }
        return {**given, **row, **self.scores.columns((index, completion.index))}


class ComparisonHandle(Handle[ComparisonResult]):
    """A comparison that goes on while other cells run."""

    def __init__(self, partial: ComparisonResult, cancel: Callable[[], None], waits: WaitNotice) -> None:
        super().__init__(f"{len(partial)} results", partial, cancel, waits)

    @property
    def results(self) -> list[GenerationResult]:
        """Return the results as far as they have come."""
        return self._partial.results
