"""`/v1/embeddings`, `/score`, `/rerank` and `/classify` answer over HTTP."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from scripted_engine import MAX_MODEL_LEN, ScriptedEngine, http_to
from word_tokenizer import bert_tokenizer

from nbengine.config import EngineConfig, ModelConfig
from nbengine.errors import (
    EngineUnavailableError,
    InvalidArgumentError,
    RequestAbortedError,
    RequestError,
)
from nbengine.frontend.requests.pooling_inputs import PoolingInputs
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
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


class _WithTokenizer(ScriptedEngine):
    """A scripted engine that cuts texts as the real one does, and judges pairs of them."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        config = EngineConfig(model=ModelConfig("tiny", directory=str(directory)))
        hf_config = {"architectures": ["BertForSequenceClassification"], "hidden_size": 16}
        tasks = ("embed", "score", "classify")
        tokenizer = bert_tokenizer().backend_tokenizer
        self.input_processor.pooling = PoolingInputs(config, hf_config, tokenizer, MAX_MODEL_LEN, tasks)

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams | None = None, *args: Any, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        assert pooling_params is not None
        prompt = self.input_processor.pooling.truncated(prompt, pooling_params)
        tokens = "x" * len(prompt["prompt_token_ids"])
        async for output in super().encode(tokens, pooling_params, *args, **options):
            yield output


@pytest.mark.parametrize(
    ("path", "fields", "least"),
    [
        ("/v1/embeddings", {"input": ["w1 w2 w3", "w4"]}, 2),
        ("/classify", {"input": "w1 w2 w3"}, 2),
        ("/score", {"text_1": "w1 w2", "text_2": ["w3 w4", "w5"]}, 3),
        ("/rerank", {"query": "w1 w2", "documents": ["w3 w4", "w5"]}, 3),
    ],
)
async def test_fewer_tokens_than_the_special_ones_are_refused(
    path: str, fields: dict[str, Any], least: int, tmp_path: Path
) -> None:
    async with http_to(_WithTokenizer(tmp_path)) as http:
        for length in range(1, least):
            refused = await http.post(path, json={**fields, "truncate_prompt_tokens": length})
            error = refused.json()["error"]
            found = (refused.status_code, error["type"], error["param"], error["code"])
            assert found == (400, "invalid_request_error", "truncate_prompt_tokens", "invalid_value")
            assert f"at least {least}" in error["message"]
            assert error["message"].endswith(f"got {length}")
        for length in (least, least + 1):
            answered = await http.post(path, json={**fields, "truncate_prompt_tokens": length})
            num_prompts = 1 if isinstance(fields.get("input"), str) else 2
            assert answered.json()["usage"]["prompt_tokens"] == num_prompts * length


TOO_LONG = "x" * (MAX_MODEL_LEN + 1)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": TOO_LONG}, "input"),
        ("/v1/embeddings", {"input": ["a", TOO_LONG, "b"]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", "b", TOO_LONG], "model": "tiny"}, "input[2]"),
        ("/classify", {"input": ["a", TOO_LONG]}, "input[1]"),
        ("/score", {"text_1": TOO_LONG, "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": ["a", TOO_LONG], "text_2": ["a", "b"]}, "text_1[1]"),
        ("/score", {"text_1": "a", "text_2": ["a", TOO_LONG]}, "text_2[1]"),
        ("/rerank", {"query": TOO_LONG, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", {"text": TOO_LONG}]}, "documents[1]"),
    ],
)
async def test_a_text_that_is_too_long_is_named_by_its_place(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with http_to(ScriptedEngine(), max_concurrent_requests=2) as http:
        reply = await http.post(path, json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_a_model_for_other_tasks_is_the_wrong_model(path: str, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()

    def check_task(task: str) -> None:
        raise InvalidArgumentError("task", task, "one of generate, which tiny can do")

    engine.input_processor.pooling.check_task = check_task
    async with http_to(engine) as http:
        reply = await http.post(path, json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "model", "unsupported_value")
    assert "one of generate" in error["message"]
    assert not engine.pooled


async def test_usage_counts_a_text_that_is_compared_with_several_once() -> None:
    async with http_to(ScriptedEngine()) as http:
        score = await http.post("/score", json={"text_1": "abc", "text_2": ["d", "ef"]})
        rank = await http.post("/rerank", json={"query": "abc", "documents": ["d", "ef"]})
    assert score.json()["usage"] == rank.json()["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


async def test_vectors_are_written_as_openai_documents_them() -> None:
    async with http_to(ScriptedEngine()) as http:
        plain = (await http.post("/v1/embeddings", json={"input": TEXTS})).json()
        text = (await http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"})).json()
    numbers = [struct.unpack("<2f", base64.b64decode(entry["embedding"])) for entry in text["data"]]
    assert [list(pair) for pair in numbers] == [entry["embedding"] for entry in plain["data"]]
    assert plain["object"] == text["object"] == "list"
    assert [(entry["object"], entry["index"]) for entry in plain["data"]] == [
        ("embedding", index) for index in range(len(TEXTS))
    ]


WRONG = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": None}, "input"),
    ("/v1/embeddings", {"input": True}, "input"),
    ("/v1/embeddings", {"input": 3}, "input"),
    ("/v1/embeddings", {"input": [None]}, "input[0]"),
    ("/v1/embeddings", {"input": [True]}, "input[0]"),
    ("/v1/embeddings", {"input": [1.5]}, "input[0]"),
    ("/v1/embeddings", {"input": [[1, "a"]]}, "input[0][1]"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "encoding_format": 1}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "dimensions": -1}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1.5}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": "2"}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": True}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "normalize": 1}, "normalize"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "priority": "high"}, "priority"),
    ("/v1/embeddings", {"input": "a", "user": 1}, "user"),
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {"text_1": ["a"], "text_2": []}, "text_2"),
    ("/score", {"text_1": "a", "text_2": [1]}, "text_2[0]"),
    ("/score", {"text_1": "a", "text_2": "b", "use_activation": "no"}, "use_activation"),
    ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ("/rerank", {"query": "a", "documents": "b"}, "documents"),
    ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": 1.5}, "top_n"),
    ("/rerank", {"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents"),
    ("/classify", {"input": []}, "input"),
    ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("/tokenize", {"messages": "a"}, "messages"),
    ("/tokenize", {"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
    ("/tokenize", {"messages": [], "add_special_tokens": True}, "add_special_tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
]


async def test_whatever_is_wrong_is_refused_by_name_and_reaches_no_engine() -> None:
    engine = ScriptedEngine()
    wrong = {}
    async with http_to(engine) as http:
        for path, fields, param in WRONG:
            reply = await http.post(path, json=fields)
            error = reply.json()["error"]
            found = (reply.status_code, error["type"], error["param"])
            if found != (400, "invalid_request_error", param):
                wrong[f"{path} {str(fields)[:80]}"] = found, error["message"][:120]
    assert not wrong
    assert not engine.pooled


async def test_a_text_and_a_conversation_are_tokenized_with_the_fields_of_their_own_form() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": False}
    rendering = {"tools": tools, "add_generation_prompt": False, "chat_template_kwargs": {"x": 1}}
    engine = ScriptedEngine()
    async with http_to(engine) as http:
        text = (await http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": True})).json()
        assert text["tokens"] == [ord("a"), ord("b")]
        # Null means the same as to leave a field out.
        nothing = dict.fromkeys([*rendering, "continue_final_message", "messages"])
        assert (await http.post("/tokenize", json={"prompt": "ab", **nothing})).json() == text
        chat = (await http.post("/tokenize", json={**said, **rendering, "prompt": None})).json()
    assert chat["tokens"] == list(map(ord, "user: a\n"))
    assert engine.messages == said["messages"]
    assert engine.render_options.items() >= rendering.items()


async def test_a_request_that_the_engine_refuses_fails_as_a_whole() -> None:
    engine = ScriptedEngine()
    engine.error = RequestError("the text is too strange")
    async with http_to(engine) as http:
        client = AsyncOpenAI(base_url="http://localhost/v1", api_key="key", max_retries=0, http_client=http)
        with pytest.raises(openai.BadRequestError, match="too strange"):
            await client.embeddings.create(model="tiny", input=TEXTS)
        engine.error = None
        assert len((await client.embeddings.create(model="tiny", input=TEXTS)).data) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestAbortedError("request a was aborted"), "request_aborted"),
        (EngineUnavailableError("request a: the engine is shutting down"), "engine_unavailable"),
    ],
)
async def test_what_is_not_the_callers_fault_may_be_asked_again(error: RequestError, code: str) -> None:
    engine = ScriptedEngine()
    engine.error = error
    async with http_to(engine) as http:
        said = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (("embeddings", {"input": "a"}), ("chat/completions", said)):
            reply = await http.post(f"/v1/{path}", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, code)
            assert int(reply.headers["retry-after"]) >= 1


def test_null_means_the_same_as_to_leave_a_field_out() -> None:
    optional = set(EmbeddingRequest.__struct_fields__) - {"input"}
    assert EmbeddingRequest(input="a", **dict.fromkeys(optional)) == EmbeddingRequest(input="a")
