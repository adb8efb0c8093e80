"""Embeddings, scores and classes: the pooling methods of `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from nbengine.checks import one_of
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.offline import Offline, TqdmChoice
from nbengine.frontend.requests.input_processor import prompt_list
from nbengine.frontend.requests.scoring import Pooled, plan_scores
from nbengine.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    as_classification,
    as_embedding,
)
from nbengine.sampling_params import POOLING_TASKS, PoolingParams

if TYPE_CHECKING:
    from nbengine.frontend.requests.input_processor import PromptType

ParamsChoice = PoolingParams | Sequence[PoolingParams] | None


class OfflinePooling(Offline):
    """The pooling methods of `LLM`.

    All of them return one output per prompt, in the order of the prompts, and raise as `LLM.generate` does;
    also `InvalidArgumentError` where the model cannot do what is asked. Like `LLM.generate` they wait for an
    engine that another client has paused; one that pauses or sleeps with `mode="abort"` ends them with a
    `RequestError`, because half a vector is of no use.
    """

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: TqdmChoice = True,
        pooling_params: ParamsChoice = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make one vector of each prompt.

        Args:
            prompts: one prompt or several, as `LLM.generate` takes them.
            truncate_prompt_tokens: keep the first tokens of longer prompts; -1 means `max_model_len`. Fewer than
                the special tokens of a text or a pair are refused.
            use_tqdm: show a progress bar, or a callable that makes one.
            pooling_params: for all prompts, or one for each; None takes the model's own way.
        """
        return [
            as_embedding(output)
            for output in self._pool("embed", prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        ]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: ParamsChoice = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: TqdmChoice = True,
        pooling_task: str | None = None,
    ) -> list[Pooled]:
        """Give the outcome of any pooling task as arrays; the other arguments are those of `embed`.

        Args:
            pooling_task: "encode" for the hidden state of every token, or one of the other tasks; None means
                `pooling_params.task`, "encode" if that is None too.
        """
        if pooling_task is not None:
            one_of("pooling_task", pooling_task, POOLING_TASKS)
        return self._pool(pooling_task, prompts, pooling_params, truncate_prompt_tokens, use_tqdm, "encode")

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: TqdmChoice = True,
        pooling_params: ParamsChoice = None,
    ) -> list[ClassificationRequestOutput]:
        """Give the probability of each of the model's labels; the arguments are those of `embed`."""
        return [
            as_classification(output)
            for output in self._pool("classify", prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        ]

    def score(
        self,
        text_1: PromptType | Sequence[PromptType],
        text_2: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: TqdmChoice = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """Say how well texts fit together: each of `text_1` with its counterpart, or one with all of
        `text_2`.

        A model with a head of one label judges the two texts together (cross-encoder); of any other model the
        score is the cosine of the texts' embeddings. The other arguments are those of `embed`.
        """
        inputs = self.llm_engine.input_processor.pooling
        own = pooling_params or PoolingParams()
        task = "score" if inputs.has_head else "embed"
        plan = plan_scores(inputs, text_1, text_2, _with_task(own, task, truncate_prompt_tokens))
        return plan.scores(self._run(PoolingRequestOutput, plan.prompts, plan.params, use_tqdm))

    def _pool(
        self,
        task: str | None,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: ParamsChoice,
        truncate_prompt_tokens: int | None,
        use_tqdm: TqdmChoice,
        default_task: str | None = None,
    ) -> list[Pooled]:
        sequence = prompt_list(prompts)
        params = [
            _with_task(own, task or own.task or default_task, truncate_prompt_tokens)
            for own in _params_for(pooling_params, len(sequence))
        ]
        return self._run(PoolingRequestOutput, sequence, params, use_tqdm)


def _params_for(pooling_params: ParamsChoice, count: int) -> list[PoolingParams]:
    if pooling_params is None:
        return [PoolingParams()] * count
    if isinstance(pooling_params, PoolingParams):
        return [pooling_params] * count
    if isinstance(pooling_params, (str, Mapping)) or not isinstance(pooling_params, Sequence):
        raise InvalidTypeError("pooling_params", pooling_params, "PoolingParams or a list of them")
    if len(pooling_params) != count:
        raise InvalidArgumentError("pooling_params", pooling_params, f"as long as prompts ({count})")
    for params in pooling_params:
        if not isinstance(params, PoolingParams):
            raise InvalidTypeError("pooling_params", params, "PoolingParams or a list of them")
    return list(pooling_params)


def _with_task(params: PoolingParams, task: str | None, truncate_prompt_tokens: int | None) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise InvalidTypeError("pooling_params", params, "PoolingParams")
    if params.task not in (None, task):
        raise InvalidArgumentError("pooling_params.task", params.task, f"None or {task!r} here")
    params = msgspec.structs.replace(params, task=task)
    if truncate_prompt_tokens is not None:
        params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
    return params
