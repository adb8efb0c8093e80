"""`/v1/embeddings`, `/score`, `/rerank` and `/classify` answer over HTTP."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine, http_to

from nbengine.errors import RequestError
from nbengine.sampling_params import PoolingParams
from nbengine.server.protocol.pooling import EmbeddingRequest

TEXTS = ["a", "b c", "def"]
"""Texts whose vectors are [1, 0], [3, 1] and [3, 0]."""


@pytest.mark.parametrize("encoding", ["float", None])
async def test_openais_client_gets_a_vector_for_each_text_in_order(encoding: Any) -> None:
    engine = ScriptedEngine()
    # Without a choice of its user the client asks for base64, and reads it itself.
    fields: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
    async with http_to(engine) as http:
        client = AsyncOpenAI(base_url="http://localhost/v1", api_key="key", http_client=http)
        answer = await client.embeddings.create(model="tiny", input=TEXTS, dimensions=2, **fields)
    assert [list(entry.embedding) for entry in answer.data] == [[1, 0], [3, 1], [3, 0]]
    assert (answer.model, answer.usage.prompt_tokens) == ("tiny", 7)
    assert engine.pooled == [PoolingParams(task="embed", dimensions=2)] * 3


async def test_more_texts_than_places_are_answered_group_by_group() -> None:
    engine = ScriptedEngine()
    async with http_to(engine, max_concurrent_requests=2) as http:
        reply = await http.post("/v1/embeddings", json={"input": ["x" * size for size in range(1, 6)]})
    assert [entry["embedding"][0] for entry in reply.json()["data"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_are_the_cosines_of_the_texts(path: str) -> None:
    async with http_to(ScriptedEngine()) as http:
        reply = await http.post(path, json={"model": "tiny", "text_1": "a", "text_2": ["def", "b c"]})
    assert [entry["score"] for entry in reply.json()["data"]] == pytest.approx([1, 0.9**0.5])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_back_by_falling_score(path: str) -> None:
    engine = ScriptedEngine()
    fields = {"query": "a", "documents": ["b c", {"text": "def"}], "top_n": 1, "priority": 3}
    async with http_to(engine) as http:
        body = (await http.post(path, json=fields)).json()
    assert body["results"] == [{"index": 1, "relevance_score": pytest.approx(1), "document": {"text": "def"}}]
    assert engine.priorities == [3, 3, 3]


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_classes_have_labels(path: str) -> None:
    engine = ScriptedEngine()
    async with http_to(engine) as http:
        body = (await http.post(path, json={"input": TEXTS, "use_activation": False})).json()
    assert [entry["label"] for entry in body["data"]] == ["bad"] * 3
    assert engine.pooled == [PoolingParams(task="classify", use_activation=False)] * 3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    async with http_to(ScriptedEngine()) as http:
        reply = await http.post(path, json=fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_a_request_that_the_engine_refuses_fails_as_a_whole() -> None:
    engine = ScriptedEngine()
    engine.error = RequestError("the text is too strange")
    async with http_to(engine) as http:
        client = AsyncOpenAI(base_url="http://localhost/v1", api_key="key", max_retries=0, http_client=http)
        with pytest.raises(openai.BadRequestError, match="too strange"):
            await client.embeddings.create(model="tiny", input=TEXTS)
        engine.error = None
        assert len((await client.embeddings.create(model="tiny", input=TEXTS)).data) == 3


def test_null_means_the_same_as_to_leave_a_field_out() -> None:
    optional = set(EmbeddingRequest.__struct_fields__) - {"input"}
    assert EmbeddingRequest(input="a", **dict.fromkeys(optional)) == EmbeddingRequest(input="a")
