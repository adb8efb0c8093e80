"""This module plans the pooling requests that the scores of texts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.requests.input_processor import PromptType, prompt_list
from nbengine.frontend.requests.pooling_inputs import PoolingInputs
from nbengine.pooling_outputs import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    as_score,
)
from nbengine.sampling_params import PoolingParams

Pooled = PoolingRequestOutput[PoolingOutput]


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The requests to be made, `params` for each of `prompts`, and the way from their outputs to scores."""

    prompts: list[PromptType]
    params: list[PoolingParams]
    num_first: int | None
    """Number of prompts that are first texts, where a score is the cosine of two texts' vectors; None where
    each prompt is a pair."""

    def scores(self, outputs: Sequence[Pooled]) -> list[ScoringRequestOutput]:
        """Return the scores, given the outputs of `prompts` in their order."""
        if self.num_first is None:
            return [as_score(output) for output in outputs]
        second = outputs[self.num_first :]
        first = list(outputs[: self.num_first]) * (len(second) // self.num_first)
        return [_cosine(one, other) for one, other in zip(first, second, strict=True)]


def plan_scores(
    inputs: PoolingInputs,
    text_1: PromptType | Sequence[PromptType],
    text_2: PromptType | Sequence[PromptType],
    params: PoolingParams,
) -> ScorePlan:
    """Plan the scores of each of `text_1` with its counterpart, or of one with all of `text_2`.

    A model with a head of one label judges the two texts together (cross-encoder); of any other model the
    score is the cosine of the texts' embeddings.

    Raises:
        InvalidArgumentError: the texts do not pair up, or the model can do neither.
        InvalidTypeError: a text is none, where two are judged together.
    """
    first, second = prompt_list(text_1, "text_1"), prompt_list(text_2, "text_2")
    if not second or len(first) not in (1, len(second)):
        counts = f"{len(first)} and {len(second)}"
        raise InvalidArgumentError("text_1 and text_2", counts, "1 and 1, 1 and N, or N and N texts")
    inputs.check_task("score")
    if not inputs.has_head:
        params = msgspec.structs.replace(params, task="embed")
        return ScorePlan([*first, *second], [params] * (len(first) + len(second)), len(first))
    params = msgspec.structs.replace(params, task="score")
    repeated = first * (len(second) // len(first))
    pairs = [
        inputs.paired(_text(one), _text(other), params) for one, other in zip(repeated, second, strict=True)
    ]
    return ScorePlan([prompt for prompt, _ in pairs], [own for _, own in pairs], None)


def _cosine(one: Pooled, other: Pooled) -> ScoringRequestOutput:
    import numpy as np

    first, second = one.outputs.data, other.outputs.data
    norms = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(float(first @ second) / norms if norms else 0.0),
        one.prompt_token_ids + other.prompt_token_ids,
        num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
    )


def _text(prompt: PromptType) -> str:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str):
        raise InvalidTypeError("text", prompt, "a string: this model judges two texts together")
    return text
