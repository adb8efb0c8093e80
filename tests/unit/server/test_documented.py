"""docs/server.md has every route and every field, and nothing that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from starlette.routing import Route

from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.completions import CompletionRequest
from nbengine.server.protocol.fields import StreamOptions
from nbengine.server.protocol.messages import CountTokensRequest, MessagesRequest
from nbengine.server.protocol.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from nbengine.server.protocol.responses import ResponsesRequest
from nbengine.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from nbengine.server.routes import ROUTES

PAGE = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
CODE = re.compile(r"`([^`\n]+)`")
PARAMETERS = "Parameters"
CONVERSATIONS = "Responses and messages"
VECTORS = "Vectors, scores and classes"
TOKENS = "Tokens"
BODIES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    PARAMETERS: (ChatCompletionRequest, CompletionRequest),
    CONVERSATIONS: (ResponsesRequest, MessagesRequest, CountTokensRequest),
    VECTORS: (EmbeddingRequest, ScoreRequest, RerankRequest, ClassifyRequest),
    TOKENS: (TokenizeRequest, DetokenizeRequest),
}
"""The bodies whose fields a section of the page explains."""


def section(title: str) -> str:
    """The text below a heading, as far as the next one of its level."""
    _, _, rest = PAGE.partition(f"\n## {title}\n")
    assert rest, title
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> Iterable[list[str]]:
    """The cells of the rows of a section's tables, without headings."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))]


def fields(bodies: Iterable[type[msgspec.Struct]]) -> set[str]:
    return {name for body in bodies for name in body.__struct_encode_fields__}


def documented_routes() -> set[tuple[str, str]]:
    """Methods and paths of the page's table; a cell's methods are those of all its paths."""
    found = set()
    for cell, _ in rows(section("Routes")):
        paths = re.findall(r"/[\w/]+", cell)
        methods = re.findall(r"[A-Z]+", re.sub(r"/[\w/]+", "", cell))
        found |= {(method, re.sub(r"[A-Z]+$", "{}", path)) for method in methods for path in paths}
    return found


def test_the_page_has_the_routes_of_the_application_and_no_others() -> None:
    offered = set()
    for route in ROUTES:
        assert isinstance(route, Route)
        path = re.sub(r"\{\w+(:path)?\}", "{}", route.path)
        offered |= {(method, path) for method in (route.methods or ()) if method != "HEAD"}
    assert documented_routes() == offered


@pytest.mark.parametrize("title", BODIES)
def test_every_field_of_a_body_is_in_its_section(title: str) -> None:
    named = set(CODE.findall(section(title)))
    assert sorted(fields(BODIES[title]) - named) == []


@pytest.mark.parametrize("title", BODIES)
def test_every_field_in_a_table_is_a_field_of_a_body(title: str) -> None:
    known = fields([*BODIES[title], StreamOptions])
    named = [word for cell, *_ in rows(section(title)) for word in CODE.findall(cell)]
    assert len(named) > 2
    assert [word for word in named if word not in known and not word.startswith("/")] == []


UNKNOWN: dict[Any, set[str]] = {
    ResponseCreateParamsBase: {"access_programs", "background_options", "image", "prompt_cache_options"},
    MessageCreateParamsBase: {"diagnostics", "speed", "user_profile_id", "workspace_id"},
}
"""Fields of the clients that this server does not know: they are ignored, and named in its log."""


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (ChatParams, ChatCompletionRequest),
        (CompletionParams, CompletionRequest),
        (ResponseCreateParamsBase, ResponsesRequest),
        (EmbeddingCreateParams, EmbeddingRequest),
        (MessageCreateParamsBase, MessagesRequest),
    ],
    ids=lambda given: given.__name__,
)
def test_what_the_clients_can_send_is_known_or_listed(params: Any, body: type[msgspec.Struct]) -> None:
    sent = set(get_type_hints(params))
    assert sent - fields([body]) == UNKNOWN.get(params, set())
    for name in UNKNOWN.get(params, ()):
        assert f"`{name}`" in section(CONVERSATIONS), name
