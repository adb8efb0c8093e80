"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nbengine.errors import InvalidArgumentError
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.decoding import BodyDecoder
from nbengine.server.protocol.errors import bad_request
from nbengine.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from nbengine.server.replies import json_reply
from nbengine.server.routes.common import service_of
from nbengine.server.service import EngineService
from nbengine.server.translate.chat_request import render_options, template_messages

_tokenize_decoder = BodyDecoder(TokenizeRequest, "/tokenize")
_detokenize_decoder = BodyDecoder(DetokenizeRequest, "/detokenize")
_OF_CONVERSATIONS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""The fields that say how `messages` are rendered."""


async def tokenize(request: Request) -> Response:
    """Return the tokens of a text or a conversation."""
    asked = _tokenize_decoder.decode(await request.body())
    service = service_of(request)
    service.check_model(asked.model)
    _check_form(asked)
    tokens = await asyncio.to_thread(_tokens, service, asked)
    answer = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = service.tokenizer.convert_ids_to_tokens(tokens)
    return json_reply(answer)


def _check_form(asked: TokenizeRequest) -> None:
    """Raise the error for a body that is neither of the two forms, or has a field of one in the other, whose tokens
    would not be those that are meant."""
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("either prompt or messages must be given", "prompt", "missing_required_parameter")
    if asked.prompt is not None:
        for name in _OF_CONVERSATIONS:
            if getattr(asked, name) is not None:
                raise bad_request(
                    f"{name} must be given with messages: a prompt is a text as it stands",
                    name,
                    "invalid_value",
                )
    elif asked.add_special_tokens:
        raise bad_request(
            "add_special_tokens must be given with prompt: the chat template writes those of messages",
            "add_special_tokens",
            "invalid_value",
        )


def _tokens(service: EngineService, asked: TokenizeRequest) -> list[int]:
    if asked.prompt is not None:
        encoder = service.engine.input_processor.encoder
        return encoder.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    chat = ChatCompletionRequest(
        messages=asked.messages or [],
        tools=asked.tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=asked.chat_template_kwargs,
        # A conversation of any length can be counted.
        truncate_prompt_tokens=-1,
    )
    template = service.chat_template(has_tools=bool(asked.tools))
    rendered = service.engine.render_chat(
        template_messages(chat, template), tools=asked.tools, **render_options(chat)
    )
    token_ids: list[int] = rendered["prompt_token_ids"]
    return token_ids


async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    asked = _detokenize_decoder.decode(await request.body())
    service = service_of(request)
    service.check_model(asked.model)
    tokenizer = service.tokenizer
    size = len(tokenizer)
    if asked.tokens and not 0 <= min(asked.tokens) <= max(asked.tokens) < size:
        wrong = min(asked.tokens) if min(asked.tokens) < 0 else max(asked.tokens)
        raise InvalidArgumentError("tokens", wrong, f"token ids in [0, {size})")
    decode = partial(tokenizer.decode, asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens))
    return json_reply({"prompt": await asyncio.to_thread(decode)})


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
