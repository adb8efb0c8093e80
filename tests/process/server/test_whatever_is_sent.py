"""Whatever stands in a body: an answer, or an error of the caller that names the field; and the engine goes on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from asgi import Reply, call
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbengine import AsyncLLM
from nbengine.frontend.text import template_process
from nbengine.frontend.text.template_process import TemplateCall, TemplateProcess
from nbengine.server.app import make_app
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.completions import CompletionRequest
from nbengine.server.protocol.messages import CountTokensRequest, MessagesRequest
from nbengine.server.protocol.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from nbengine.server.protocol.responses import ResponsesRequest
from nbengine.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from nbengine.server.routes import ROUTES
from nbengine.server.service import EngineService
from nbengine.server.settings import ServerSettings
from tests.support.odd_values import ANYTHING, LARGE, LONGEST, SURROGATE
from tests.support.thorough import amount

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "x", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (ResponsesRequest, {"input": "x"}),
    "/v1/messages": (MessagesRequest, {"model": "random-tiny", "messages": MESSAGES, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"model": "random-tiny", "messages": MESSAGES}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "x"}),
    **dict.fromkeys(("/score", "/v1/score"), (ScoreRequest, {"text_1": "x", "text_2": "y"})),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"), (RerankRequest, {"query": "x", "documents": ["y"]})
    ),
    **dict.fromkeys(("/classify", "/v1/classify"), (ClassifyRequest, {"input": "x"})),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
"""Of each route its body's type, and a body."""
TRIED = [
    path for path in BODIES if path.count("/") == 1 or (path.startswith("/v1") and path[3:] not in BODIES)
]
"""Routes that differ in more than their path."""


def in_json(value: Any) -> Any:
    """A value that a body can hold: JSON has no word for infinity. What is no JSON is another test's."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): in_json(item) for key, item in value.items()}
    return [in_json(item) for item in value] if isinstance(value, list) else value


SPECIFIC = (
    st.integers(-3, 40)
    | st.floats(-1, 3)
    | st.booleans()
    | st.text(max_size=5)
    | st.lists(st.text(max_size=5) | st.integers(-1, 300), max_size=3)
    | st.sampled_from(["auto", "none", "required", "<s>", "\0", SURROGATE, "x" * 20_000, LARGE, [SURROGATE]])
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "function", "enabled"])},
        optional={
            "text": st.text(max_size=5),
            "json_schema": st.fixed_dictionaries(
                {"name": st.text(max_size=5), "schema": ANYTHING.map(in_json)}
            ),
            "function": st.fixed_dictionaries(
                {"name": st.text(max_size=5), "parameters": ANYTHING.map(in_json)}
            ),
        },
    )
    | st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]),
        ANYTHING.map(in_json),
        max_size=2,
    )
    | st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": ANYTHING.map(in_json)}
        ),
        max_size=2,
    )
)
VALUES = SPECIFIC | ANYTHING.map(in_json)


def test_every_route_that_takes_a_body_is_tried() -> None:
    posts = {route.path for route in ROUTES if "POST" in (route.methods or ())}  # type: ignore[attr-defined]
    assert posts == {*BODIES}
    for path in posts - {*TRIED}:
        assert BODIES[path] in [BODIES[tried] for tried in TRIED]


class Service:
    """A server's application in front of a real engine, on one loop."""

    def __init__(self, llm: AsyncLLM, runner: asyncio.Runner) -> None:
        self._runner = runner
        service = EngineService(ServerSettings())
        runner.run(service.attach(llm))
        self.app = make_app(service)
        self.close = service.close

    def send(self, path: str, body: Any) -> Reply:
        return self._runner.run(call(self.app, path, body))


@pytest.fixture(scope="module")
def service(no_leftovers_of_module: None) -> Iterator[Service]:
    templates = TemplateProcess()
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        # Messages that may take long are rendered in a process. It stays, so that it must not begin in a test.
        patch.setattr(template_process, "_process", templates)
        templates.render(TemplateCall(TEMPLATE, [{"role": "user", "content": "x"}], None, {}, True, False))
        llm = AsyncLLM("random-tiny", num_gpu_blocks_override=256, max_model_len=200, chat_template=TEMPLATE)
        service = Service(llm, runner)
        yield service
        service.close()
        llm.shutdown()
        templates.shutdown()


def complaint(reply: Reply) -> str:
    """The words of an error, which are one short line."""
    error = reply.json()["error"]
    message = error["message"]
    assert isinstance(message, str)
    assert 0 < len(message) <= LONGEST
    assert message.isprintable(), message
    return f"{message} {error.get('param')}"


WORDS = {
    "thinking_budget": ["budget_tokens"],  # Anthropic's word for it
    "input": ["prompt", "message"],
    "messages": ["message", "content", "prompt"],
    "system": ["message", "content", "prompt"],
    "instructions": ["message", "content", "prompt"],
    "text_1": ["prompt"],
    "text_2": ["prompt"],
    "query": ["prompt"],
    "documents": ["document", "prompt"],
}
"""Other words with which an error speaks of a field."""


@pytest.mark.parametrize("path", TRIED)
def test_any_value_of_any_field_is_answered_or_refused_by_the_name_of_its_field(
    service: Service, path: str
) -> None:
    kind, body = BODIES[path]
    # The model has no head that classifies, and says so.
    assert service.send(path, body).status == (400 if "classify" in path else 200)

    @given(st.sampled_from(kind.__struct_encode_fields__), VALUES, st.booleans())
    @example("model", SURROGATE, False)
    @settings(max_examples=amount(60, thorough=5000), deadline=None)
    def send(field: str, value: Any, stream: bool) -> None:
        asked = {**body, **({"stream": True} if stream and "stream" in kind.__struct_encode_fields__ else {})}
        reply = service.send(path, {**asked, field: value})
        assert reply.complete
        assert reply.status in range(200, 300) or reply.status in (400, 404, 413, 422), reply.body
        if reply.status >= 400:
            said = complaint(reply)
            assert any(word in said for word in [field, *WORDS.get(field, []), "task"]), said

    send()
    assert service.send("/v1/completions", BODIES["/v1/completions"][1]).status == 200


@given(
    st.binary(max_size=30) | st.recursive(st.just(b"1"), lambda inner: inner.map(lambda b: b"[" + b + b"]"))
)
@example(b"[" * 100_000)
@example(b'{"prompt": "\xff"}')
@example(b'{"prompt": "x", "prompt": 1}')
@example(b'{"prompt": NaN}')
@settings(max_examples=amount(60, thorough=5000), deadline=None)
def test_any_bytes_are_refused_as_no_body(service: Service, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        reply = service.send(path, body)
        assert reply.status == 400
        complaint(reply)


def test_json_of_any_kind_is_no_body(service: Service) -> None:
    for path in TRIED:
        for body in (json.dumps(value).encode() for value in (None, 1, "x", [], [{}], True)):
            assert service.send(path, body).status == 400
