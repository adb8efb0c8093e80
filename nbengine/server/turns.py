"""One turn of a conversation: what every API of conversations asks of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import HARMONY
from nbengine.frontend.parsing.reading import ANSWER_KEY, added_token_ids_of
from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.sampling_params import SamplingParams
from nbengine.server.outputs import Outputs
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.errors import bad_request
from nbengine.server.service import EngineService
from nbengine.server.translate.answers import AnswerPart, AnswerReader, PlainText
from nbengine.server.translate.chat_request import (
    chat_params,
    check_available,
    render_options,
    template_messages,
)
from nbengine.server.translate.conversation import own_names
from nbengine.server.translate.names import constraint_names, field_names
from nbengine.server.translate.sampling import copies_of
from nbengine.server.translate.tool_choice import ToolUse, constrained, tool_use
from nbengine.server.translate.usage import Usage


class ChatTurn:
    """A turn that has been checked and rendered, and is not sent yet; `open_turn` makes it."""

    def __init__(
        self,
        service: EngineService,
        request: ChatCompletionRequest,
        request_id: str,
        model: str,
        prompt: dict[str, Any],
        params: SamplingParams,
        names: Mapping[str, str],
    ) -> None:
        self.model = model
        self.names = names
        """The fields that an error about the request is to name."""
        self.prompt = prompt
        self.params = params
        self._service = service
        self._request = request
        self._request_id = request_id
        self._copies = copies_of(request, params)
        reading: AnswerReading | None = prompt.pop(ANSWER_KEY, None)
        self._reader = AnswerReader(
            PlainText if reading is None else reading.parser,
            completions_per_prompt=params.n * self._copies,
            copies=self._copies,
            count_tokens=lambda text: len(
                service.engine.input_processor.encoder.encode(text, add_special_tokens=False)
            ),
            divides_logprobs=params.logprobs is not None,
            has_prompt_logprobs=params.prompt_logprobs is not None,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of the rendered conversation."""
        return len(self.prompt["prompt_token_ids"])

    def leave_room(self, most: int | None) -> None:
        """Have the beginning of a prompt cut off that leaves no room for an answer of `most` tokens, None: for any.

        The answer then has that room, but at most half of the model's context; without `most` it has a quarter.
        """
        context = self._service.max_model_len
        if self.num_prompt_tokens + (1 if most is None else most) > context:
            room = min(context // 4 if most is None else most, context // 2)
            self.params.truncate_prompt_tokens = context - max(1, room)

    async def send(self) -> Outputs:
        """Send the request and return its outputs, for `take`: several for each completion if the request is a stream,
        else one. Errors are those of `EngineService.send`."""
        return await self._service.send(
            [self.prompt],
            self.params,
            self._request_id,
            copies=self._copies,
            priority=self._request.priority or 0,
            data_parallel_rank=self._request.data_parallel_rank,
            reports_prompts=self._request.wants_progress,
        )

    def take(self, position: int, output: RequestOutput | PromptProgress) -> list[AnswerPart]:
        """Return the parts of the answer that one of the outputs brings; raises as `AnswerReader.take` does."""
        return self._reader.take(position, output)

    def usage(self) -> Usage:
        """Return the tokens of the parts that have come."""
        return self._reader.usage()


async def open_turn(service: EngineService, request: ChatCompletionRequest, request_id: str) -> ChatTurn:
    """Check and render a request.

    Raises:
        ApiError: it cannot be answered; the error names the field.
    """
    names = field_names(request, "messages")
    with own_names(names):
        return await _opened(service, request, request_id, names)


async def _opened(
    service: EngineService, request: ChatCompletionRequest, request_id: str, names: Mapping[str, str]
) -> ChatTurn:
    model = service.check_model(request.model)
    check_available(request)
    if request.chat_template is not None and not service.settings.trust_request_templates:
        raise bad_request(
            "chat_template is not taken from requests here (--trust-request-templates)",
            "chat_template",
            "unsupported_parameter",
        )
    tools = tool_use(request)
    params = chat_params(request, service.engine.default_sampling_params())
    prompt = await asyncio.to_thread(_rendered, service, request, tools)
    reading: AnswerReading | None = prompt.get(ANSWER_KEY)
    if reading is not None and request.skip_special_tokens is False:
        # The caller wants to see those, too, that are no marks of the answer's parts.
        reading = prompt[ANSWER_KEY] = replace(reading, special_tokens=frozenset())
    free = params.structured_outputs
    params = constrained(params, reading, tools, added_token_ids_of(service.tokenizer))
    if params.structured_outputs is not free:
        names = {**names, **constraint_names("tools")}
    if params.structured_outputs is not free and reading is not None and reading.format.tools == HARMONY:
        # The grammar of these calls contains the reasoning, and begins with the answer.
        prompt["reasoning"] = None
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    return ChatTurn(service, request, request_id, model, prompt, params, names)


def _rendered(service: EngineService, request: ChatCompletionRequest, tools: ToolUse) -> dict[str, Any]:
    template = service.chat_template(request.chat_template, has_tools=bool(tools.tools))
    return service.engine.render_chat(
        template_messages(request, template),
        tools=tools.tools or None,
        reasoning_parser=service.settings.reasoning_parser,
        tool_parser=service.settings.tool_parser,
        **render_options(request),
    )
