"""A fake engine for conversations and vectors, and clients that reach its server without sockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
from fake_service_engine import FakeEngine, FakeServer

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import AnswerFormat
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nbengine.sampling_params import PoolingParams, SamplingParams

MAX_MODEL_LEN = 256


class ScriptedEngine(FakeEngine):
    """A fake engine that takes prompts of `MAX_MODEL_LEN` characters, and makes vectors, too.

    The vector of a text has its length and its number of spaces.
    """

    def __init__(self, pieces: Sequence[str] = ("Hello", " there"), finish_reason: str = "stop") -> None:
        super().__init__(pieces, finish_reason)
        self.config.model.model = "tiny"
        self.stop_reason: int | str | None = None
        self.pooled: list[PoolingParams] = []
        self.priorities: list[int] = []
        self.input_processor.pooling = SimpleNamespace(
            has_head=False, labels=["bad", "good"], check_task=lambda task: None
        )

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation that was rendered last."""
        return self.rendered[-1][0]

    @property
    def render_options(self) -> dict[str, Any]:
        """The options with which it was rendered."""
        return self.rendered[-1][1]

    @property
    def params(self) -> list[SamplingParams]:
        """The sampling parameters of all requests."""
        return [params for _, params, _, _ in self.asked]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        prompt = super().render_chat(messages, **options)
        if len(prompt["prompt"]) > MAX_MODEL_LEN and not options.get("truncated"):
            raise InvalidArgumentError("prompt", prompt["prompt"], f"at most {MAX_MODEL_LEN} tokens long")
        return prompt

    def _outputs(self, prompt: Any, params: SamplingParams, request_id: str) -> Any:
        for output in super()._outputs(prompt, params, request_id):
            if output.finished:
                output.outputs[0].stop_reason = self.stop_reason
            yield output

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        assert pooling_params is not None
        self.pooled.append(pooling_params)
        self.priorities.append(priority)
        if self.error is not None:
            raise self.error
        if len(prompt) > MAX_MODEL_LEN:
            raise InvalidArgumentError("prompt", prompt, f"at most {MAX_MODEL_LEN} tokens long")
        vector = np.array([len(prompt), prompt.count(" ")], np.float32)
        yield PoolingRequestOutput(request_id or "", PoolingOutput(vector), list(range(len(prompt))))


@asynccontextmanager
async def http_to(engine: ScriptedEngine, **settings: Any) -> AsyncGenerator[httpx2.AsyncClient, None]:
    """Open a client of HTTP that reaches a server of `engine`."""
    server = await FakeServer(engine, **settings).start()
    transport = httpx2.ASGITransport(server.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def thinking_engine() -> ScriptedEngine:
    """Make an engine that thinks, says something, and calls a tool; a token is two characters."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    text = f"<think>Where?</think>I look.\n{call}"
    engine = ScriptedEngine([text[place : place + 2] for place in range(0, len(text), 2)])
    engine.reading = AnswerReading(AnswerFormat("qwen3", "hermes"))
    return engine
