"""The tools of a request: which of them the model is told of, and what it must do with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import AnswerFormat
from nbengine.frontend.parsing.tool_grammar import ToolChoice, tool_grammar
from nbengine.sampling_params import SamplingParams
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.errors import bad_request


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a model is told of; with "none" it is told of no tools."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = "none"
    parallel: bool = True


def tool_use(request: ChatCompletionRequest) -> ToolUse:
    """Return the tools of a request.

    Raises:
        ApiError: there is a choice without tools, or a choice of tools that are not given.
    """
    tools = tuple(request.tools or ())
    choice = request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice", "invalid_value")
        return ToolUse()
    if choice is None:
        choice = "auto"
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice.get("allowed_tools"))
    if choice == "none":
        return ToolUse()
    return ToolUse(tools, choice, request.parallel_tool_calls is not False)


def constrained(
    params: SamplingParams,
    reading: AnswerReading | None,
    tools: ToolUse,
    added_token_ids: Mapping[str, int],
) -> SamplingParams:
    """Return the parameters with the grammar of the calls that the request wants, and with special tokens in
    the text where they are needed to read it; `added_token_ids` are those of the tokenizer's added tokens.

    The form of an answer binds those that are no calls.

    Raises:
        InvalidArgumentError, NotSupportedError: the choice is not possible.
    """
    if reading is not None and reading.format.keeps_special_tokens:
        params.skip_special_tokens = False
    if not tools.tools:
        return params
    answer_format = AnswerFormat() if reading is None else reading.format
    grammar = tool_grammar(
        answer_format,
        tools.tools,
        tools.choice,
        parallel=tools.parallel,
        answer=params.structured_outputs,
        added_token_ids=added_token_ids,
    )
    if grammar is None:
        return params
    return msgspec.structs.replace(params, structured_outputs=grammar)


def _allowed(tools: tuple[dict[str, Any], ...], allowed: object) -> tuple[tuple[dict[str, Any], ...], str]:
    if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list):
        mode, names = allowed.get("mode", "auto"), {_name_of(tool) for tool in allowed["tools"]}
        known = {_name_of(tool) for tool in tools}
        if mode in ("auto", "required") and names and None not in names and names <= known:
            return tuple(tool for tool in tools if _name_of(tool) in names), str(mode)
    raise bad_request(
        'tool_choice.allowed_tools must have "mode" (auto or required) and "tools", each the name of a given tool',
        "tool_choice.allowed_tools",
        "invalid_value",
    )


def _name_of(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
