"""Embeddings, scores, ranks and classes: the prompts that a body asks for, and the answer that is made of their
outputs."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from nbengine.sampling_params import PoolingParams
from nbengine.server.protocol.errors import ApiError, bad_request
from nbengine.server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankDocument,
    RerankRequest,
    ScoreRequest,
)

if TYPE_CHECKING:
    from nbengine.frontend.requests.input_processor import PromptType

Pooled = PoolingRequestOutput[PoolingOutput]
Body = dict[str, Any]

MAX_INPUTS = 2048
"""Most texts of one request, as OpenAI has it for embeddings."""


def input_prompts(given: str | list[str | int | list[int]]) -> list[PromptType]:
    """Return the prompts of the field `input`: one text or several, or tokens in their place.

    Raises:
        ApiError: there is no input, there are too many, or texts and tokens of one are mixed.
    """
    if isinstance(given, str):
        return [given]
    ints = sum(isinstance(entry, int) for entry in given)
    if given and ints == len(given):
        return [cast("list[int]", given)]
    if ints:
        raise _wrong(
            "input", "input must be a text, a list of texts, a list of token ids, or a list of those"
        )
    _check_count("input", len(given))
    return list(cast("list[str | list[int]]", given))


def places_of(name: str, given: Sequence[object] | str, prompts: Sequence[object]) -> list[str]:
    """Return the place in the body of each prompt of a field: `input[3]`, or `input` where it is one prompt itself."""
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    return [name] if is_one else [f"{name}[{index}]" for index in range(len(prompts))]


def embedding_params(request: EmbeddingRequest) -> PoolingParams:
    """Return the parameters of an embedding.

    Raises:
        InvalidArgumentError: one is out of range.
    """
    return PoolingParams(
        task="embed",
        dimensions=request.dimensions,
        normalize=request.normalize,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )


def head_params(request: ScoreRequest | RerankRequest | ClassifyRequest) -> PoolingParams:
    """Return the parameters of a score or a class; the task is left to what makes the prompts.

    Raises:
        InvalidArgumentError: one is out of range.
    """
    return PoolingParams(
        use_activation=request.use_activation, truncate_prompt_tokens=request.truncate_prompt_tokens
    )


def score_texts(request: ScoreRequest) -> tuple[str | list[str], str | list[str]]:
    """Return the texts to be compared.

    Raises:
        ApiError: there are none, too many, or numbers that do not pair up.
    """
    counts = [1 if isinstance(texts, str) else len(texts) for texts in (request.text_1, request.text_2)]
    for name, count in zip(("text_1", "text_2"), counts, strict=True):
        _check_count(name, count)
    if counts[0] not in (1, counts[1]):
        message = (
            f"text_1 and text_2 must be 1 and 1, 1 and N, or N and N texts, got {counts[0]} and {counts[1]}"
        )
        raise _wrong("text_1", message)
    return request.text_1, request.text_2


def rerank_texts(request: RerankRequest) -> list[str]:
    """Return the texts of the documents.

    Raises:
        ApiError: there are none or too many, or `top_n` is no number of documents.
    """
    _check_count("documents", len(request.documents))
    if request.top_n is not None and request.top_n < 1:
        raise _wrong("top_n", f"top_n must be at least 1, got {request.top_n}")
    return [
        document.text if isinstance(document, RerankDocument) else document for document in request.documents
    ]


def embedding_body(request: EmbeddingRequest, model: str, outputs: Sequence[Pooled]) -> Body:
    """Return the answer of `/v1/embeddings`."""
    as_text = request.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(output) if as_text else output.outputs.data.tolist(),
        }
        for index, output in enumerate(outputs)
    ]
    return {"object": "list", "data": data, "model": model, "usage": _usage(num_tokens_of(outputs))}


def score_body(
    body_id: str, created: int, model: str, outputs: Sequence[ScoringRequestOutput], num_tokens: int
) -> Body:
    """Return the answer of `/score`; `num_tokens` is the number that the engine has read."""
    data = [
        {"object": "score", "index": index, "score": output.outputs.score}
        for index, output in enumerate(outputs)
    ]
    return _list_body(body_id, created, model, data, _usage(num_tokens))


def rerank_body(
    body_id: str,
    model: str,
    request: RerankRequest,
    texts: Sequence[str],
    outputs: Sequence[ScoringRequestOutput],
    num_tokens: int,
) -> Body:
    """Return the answer of `/rerank`: the documents by falling score, equal ones in their order; `num_tokens` is the
    number that the engine has read."""
    order = sorted(range(len(outputs)), key=lambda index: -outputs[index].outputs.score)
    results: list[Body] = []
    for index in order[: request.top_n]:
        result: Body = {"index": index, "relevance_score": outputs[index].outputs.score}
        if request.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return {"id": body_id, "model": model, "results": results, "usage": _usage(num_tokens)}


def classify_body(
    body_id: str, created: int, model: str, labels: Sequence[str], outputs: Sequence[Pooled]
) -> Body:
    """Return the answer of `/classify`: the likeliest label of each input, and the numbers of all."""
    data: list[Body] = []
    for index, output in enumerate(outputs):
        numbers = output.outputs.data.tolist()
        label = labels[int(output.outputs.data.argmax())]
        data.append({"index": index, "label": label, "probs": numbers, "num_classes": len(numbers)})
    return _list_body(body_id, created, model, data, _usage(num_tokens_of(outputs)))


def num_tokens_of(outputs: Sequence[Pooled]) -> int:
    """Return the number of tokens that the engine has read."""
    return sum(len(output.prompt_token_ids) for output in outputs)


def _list_body(body_id: str, created: int, model: str, data: list[Body], usage: Body) -> Body:
    return {
        "id": body_id,
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": usage,
    }


def _usage(num_tokens: int) -> Body:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _base64(output: Pooled) -> str:
    # OpenAI's clients read little-endian float32 on every machine.
    return base64.b64encode(output.outputs.data.astype("<f4").tobytes()).decode("ascii")


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise _wrong(name, f"{name} must be 1 to {MAX_INPUTS} texts, got {count}")


def _wrong(param: str, message: str) -> ApiError:
    return bad_request(message, param, "invalid_value")
