"""The bodies of `/v1/embeddings`, `/score`, `/rerank` and `/classify` and their answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from api_answers import openai_client
from openai.types import CreateEmbeddingResponse

from nbengine.errors import InvalidArgumentError
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from nbengine.sampling_params import PoolingParams
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from nbengine.server.translate.pooling import (
    MAX_INPUTS,
    classify_body,
    embedding_body,
    embedding_params,
    head_params,
    input_prompts,
    rerank_body,
    rerank_texts,
    score_body,
    score_texts,
)


def decoded(kind: Any, **fields: Any) -> Any:
    return msgspec.json.decode(json.dumps(fields), type=kind)


def pooled(*numbers: float, tokens: int = 3) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput("r", PoolingOutput(np.array(numbers, np.float32)), list(range(tokens)))


def scored(score: float, tokens: int = 3) -> ScoringRequestOutput:
    return ScoringRequestOutput("r", ScoringOutput(score), list(range(tokens)))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_input_is_one_prompt_or_several_as_texts_or_tokens(given: Any, wanted: list[Any]) -> None:
    assert input_prompts(decoded(EmbeddingRequest, input=given).input) == wanted


@pytest.mark.parametrize("given", [[], [1, "a"], [1, [2]], ["a"] * (MAX_INPUTS + 1)])
def test_input_that_is_no_list_of_prompts_is_refused(given: Any) -> None:
    with pytest.raises(ApiError, match="input must be") as caught:
        input_prompts(decoded(ClassifyRequest, input=given).input)
    assert caught.value.param == "input"


def test_the_parameters_reach_the_engine() -> None:
    request = decoded(EmbeddingRequest, input="a", dimensions=8, normalize=False, truncate_prompt_tokens=-1)
    assert embedding_params(request) == PoolingParams(
        task="embed", dimensions=8, normalize=False, truncate_prompt_tokens=-1
    )
    request = decoded(ClassifyRequest, input="a", use_activation=False, truncate_prompt_tokens=5)
    assert head_params(request) == PoolingParams(use_activation=False, truncate_prompt_tokens=5)
    with pytest.raises(InvalidArgumentError, match="dimensions"):
        embedding_params(decoded(EmbeddingRequest, input="a", dimensions=0))


@pytest.mark.parametrize("wanted", ["float", "base64"])
def test_openais_client_reads_the_vectors_exactly(wanted: str) -> None:
    vectors = [(0.1, -2.5, 1e-8), (3.0, 0.0, -0.3)]
    outputs = [pooled(*vector, tokens=4) for vector in vectors]
    request = decoded(EmbeddingRequest, input=["a", "b"], encoding_format=wanted)
    body = embedding_body(request, "tiny", outputs)
    answer = openai_client(body).embeddings.create(model="tiny", input=["a", "b"])
    for given, entry in zip(vectors, answer.data, strict=True):
        assert np.array_equal(np.array(entry.embedding, np.float32), np.array(given, np.float32))
    assert [entry.index for entry in answer.data] == [0, 1]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (8, 8)
    if wanted == "float":
        CreateEmbeddingResponse.model_validate(body)


def test_scores_come_in_the_order_of_the_texts() -> None:
    body = score_body("score-1", 17, "tiny", [scored(0.5), scored(-0.25, 2)], 5)
    assert body == {
        "id": "score-1",
        "object": "list",
        "created": 17,
        "model": "tiny",
        "data": [
            {"object": "score", "index": 0, "score": 0.5},
            {"object": "score", "index": 1, "score": -0.25},
        ],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


@pytest.mark.parametrize(
    ("one", "two"), [(["a", "b"], ["c"]), ([], ["a"]), ("a", []), (["a"] * 2, ["a"] * 3)]
)
def test_texts_that_do_not_pair_up_are_refused(one: Any, two: Any) -> None:
    with pytest.raises(ApiError, match=r"text_[12] "):
        score_texts(decoded(ScoreRequest, text_1=one, text_2=two))


def test_texts_pair_up_one_with_one_with_all_or_each_with_its_own() -> None:
    for one, two in (("a", "b"), ("a", ["b", "c"]), (["a", "b"], ["c", "d"])):
        assert score_texts(decoded(ScoreRequest, text_1=one, text_2=two)) == (one, two)


def test_documents_are_ranked_by_falling_score_and_equal_ones_stay_in_order() -> None:
    request = decoded(RerankRequest, query="q", documents=["a", {"text": "b"}, "c", "d"], top_n=3)
    texts = rerank_texts(request)
    body = rerank_body(
        "rerank-1", "tiny", request, texts, [scored(score) for score in (0.1, 0.7, 0.1, 0.9)], 12
    )
    assert texts == ["a", "b", "c", "d"]
    assert body["results"] == [
        {"index": 3, "relevance_score": 0.9, "document": {"text": "d"}},
        {"index": 1, "relevance_score": 0.7, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0.1, "document": {"text": "a"}},
    ]
    assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}


def test_documents_are_left_out_where_nobody_wants_them() -> None:
    request = decoded(RerankRequest, query="q", documents=["a"], return_documents=False)
    body = rerank_body("rerank-1", "tiny", request, ["a"], [scored(0.5)], 3)
    assert body["results"] == [{"index": 0, "relevance_score": 0.5}]


@pytest.mark.parametrize(("fields", "param"), [({"documents": []}, "documents"), ({"top_n": 0}, "top_n")])
def test_ranks_that_are_not_possible_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        rerank_texts(decoded(RerankRequest, **{"query": "q", "documents": ["a"], **fields}))
    assert caught.value.param == param


def test_a_class_has_its_label_and_the_numbers_of_all() -> None:
    body = classify_body("classify-1", 17, "tiny", ["bad", "good"], [pooled(0.25, 0.75), pooled(0.5, 0.25)])
    assert [entry["label"] for entry in body["data"]] == ["good", "bad"]
    assert body["data"][0] == {"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}
