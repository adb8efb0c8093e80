"""The bodies of `/v1/embeddings`, `/score`, `/rerank` and `/classify`."""

from __future__ import annotations

from typing import Literal

import msgspec


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields that all of these requests take."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    user: str | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """The body of `POST /score`: each of `text_1` with its counterpart, or one with all of `text_2`."""

    text_1: str | list[str]
    text_2: str | list[str]
    use_activation: bool | None = None


class RerankDocument(msgspec.Struct):
    """A document that is given as an object."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """The body of `POST /rerank`, as Jina and Cohere define it."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """The body of `POST /classify`."""

    input: str | list[str | int | list[int]]
    use_activation: bool | None = None
