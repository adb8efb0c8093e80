"""Embeddings, scores and classes: the pooling methods of `LLM`."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from nbengine.errors import InvalidArgumentError, InvalidTypeError, NBEngineError
from nbengine.frontend.input_processor import prompt_list
from nbengine.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    as_classification,
    as_embedding,
    as_score,
)
from nbengine.sampling_params import PoolingParams

if TYPE_CHECKING:
    from nbengine.frontend.input_processor import PromptType
    from nbengine.frontend.llm_engine import LLMEngine

TqdmChoice = bool | Callable[..., Any]
ParamsChoice = PoolingParams | Sequence[PoolingParams] | None
Pooled = PoolingRequestOutput[PoolingOutput]


class OfflinePooling:
    """The pooling methods of `LLM`, which owns the attributes.

    All of them return one output a prompt, in the order of the prompts, and raise as `LLM.generate` does; also
    `InvalidArgumentError` where the model cannot do what is asked.
    """

    llm_engine: LLMEngine
    _request_counter: itertools.count[int]
    _busy: threading.Lock

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
            truncate_prompt_tokens: keep the first tokens of longer prompts; -1 means `max_model_len`.
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
        """Give the outcome of any pooling task as arrays; other arguments as of `embed`.

        Args:
            pooling_task: "encode" for the hidden state of every token, or one of the other tasks; None means
                `pooling_params.task`, "encode" if that is None too.
        """
        return self._pool(pooling_task, prompts, pooling_params, truncate_prompt_tokens, use_tqdm, "encode")

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: TqdmChoice = True,
        pooling_params: ParamsChoice = None,
    ) -> list[ClassificationRequestOutput]:
        """Give the probability of each of the model's labels; arguments as of `embed`."""
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
        """Say how well texts fit together: each of `text_1` with its counterpart, or one with all of `text_2`.

        A model with a head of one label judges the two texts together (cross-encoder); of any other model it is the
        cosine of the texts' embeddings. Other arguments as of `embed`.
        """
        first, second = prompt_list(text_1, "text_1"), prompt_list(text_2, "text_2")
        if not second or len(first) not in (1, len(second)):
            counts = f"{len(first)} and {len(second)}"
            raise InvalidArgumentError("text_1 and text_2", counts, "1 and 1, 1 and N, or N and N texts")
        inputs = self.llm_engine.input_processor.pooling
        inputs.check_task("score")
        if not inputs.has_head:
            return self._score_by_cosine(first, second, pooling_params, truncate_prompt_tokens, use_tqdm)
        params = _with_task(pooling_params or PoolingParams(), "score", truncate_prompt_tokens)
        pairs = [
            inputs.paired(_text(one), _text(other), params)
            for one, other in zip(first * (len(second) // len(first)), second, strict=True)
        ]
        outputs = self._run_pooling([prompt for prompt, _ in pairs], [own for _, own in pairs], use_tqdm)
        return [as_score(output) for output in outputs]

    def _score_by_cosine(
        self,
        first: list[PromptType],
        second: list[PromptType],
        params: PoolingParams | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: TqdmChoice,
    ) -> list[ScoringRequestOutput]:
        outputs = self._pool("embed", [*first, *second], params, truncate_prompt_tokens, use_tqdm)
        ones = outputs[: len(first)] * (len(second) // len(first))
        return [_cosine(one, other) for one, other in zip(ones, outputs[len(first) :], strict=True)]

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
        return self._run_pooling(sequence, params, use_tqdm)

    def _run_pooling(
        self, prompts: Sequence[PromptType], params: Sequence[PoolingParams], use_tqdm: TqdmChoice
    ) -> list[Pooled]:
        engine = self.llm_engine
        with self._busy:
            try:
                positions = {}
                for position, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                    request_id = str(next(self._request_counter))
                    engine.add_request(request_id, prompt, own)
                    positions[request_id] = position
                return self._collect(positions, use_tqdm)
            except BaseException:
                engine.abort_all()
                raise

    def _collect(self, positions: dict[str, int], use_tqdm: TqdmChoice) -> list[Pooled]:
        outputs: dict[int, Pooled] = {}
        with _progress_bar(len(positions), use_tqdm) as advance:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    position = positions.get(output.request_id)
                    if position is not None and isinstance(output, PoolingRequestOutput):
                        outputs[position] = output
                        advance()
        if len(outputs) < len(positions):
            raise NBEngineError(f"{len(positions) - len(outputs)} requests ended without an output")
        return [outputs[position] for position in range(len(positions))]


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


@contextlib.contextmanager
def _progress_bar(total: int, use_tqdm: TqdmChoice) -> Iterator[Callable[[], object]]:
    if not use_tqdm or not total:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    with contextlib.closing(make(total=total, desc="Processed prompts", dynamic_ncols=True)) as bar:
        yield lambda: bar.update(1)
