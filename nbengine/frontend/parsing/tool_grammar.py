"""The grammar that makes a model call tools as the caller wants it: at all, which ones, and with which arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbengine.errors import InvalidArgumentError, NotSupportedError
from nbengine.frontend.parsing.formats import AnswerFormat
from nbengine.frontend.parsing.grammars.lark import Lark, Tool
from nbengine.frontend.parsing.grammars.styles import STYLES
from nbengine.frontend.parsing.schemas import ToolSchema
from nbengine.json_schemas import warn_of_unenforced
from nbengine.sampling_params import StructuredOutputsParams

ToolChoice = str | Mapping[str, Any]
_SHORTEST_MARKER = 3
_ALLOWED = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


def tool_grammar(
    format: AnswerFormat,
    tools: Sequence[ToolSchema],
    tool_choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    strict: bool = False,
    added_token_ids: Mapping[str, int] | None = None,
) -> StructuredOutputsParams | None:
    """Make the grammar of an answer with calls; None if any text will do.

    With "auto" there is a grammar only if a tool is strict or one call is to be the last: the text is free until a
    call begins. The grammar is that of the text behind the reasoning, except for gpt-oss, whose reasoning it contains.

    Args:
        format: the format of the answer.
        tools: `{"type": "function", "function": {...}}`; with `"strict": True` in the inner object the
            arguments of a tool follow its schema, otherwise they are any JSON object.
        tool_choice: "none", "auto", "required", or the one tool to be called.
        parallel: allow several calls in one answer.
        strict: take all tools as strict.
        added_token_ids: the ids of the tokenizer's added tokens by their texts (`added_token_ids_of`): a grammar
            has to name those by their ids.

    Raises:
        InvalidArgumentError: the choice is none of these, or names no tool.
        NotSupportedError: the format has no calls.
    """
    name = _named(tool_choice)
    described = [_tool(schema, strict=strict) for schema in tools]
    if name is None and tool_choice not in ("none", "auto", "required"):
        raise InvalidArgumentError("tool_choice", tool_choice, _ALLOWED)
    if name is not None:
        described = [tool for tool in described if tool.name == name]
        if not described:
            names = ", ".join(_tool(schema, strict=False).name for schema in tools) or "none is given"
            raise InvalidArgumentError("tool_choice", name, f"the name of a tool ({names})")
    if tool_choice == "none" or (tool_choice == "auto" and not _binds(format, described, parallel=parallel)):
        return None
    if not described:
        raise InvalidArgumentError("tool_choice", tool_choice, '"none" or "auto" without tools')
    if format.tools is None:
        raise NotSupportedError(
            "tool_choice and strict tools need a model whose way of calling tools is known; name the parser of "
            "its calls (tool_parser)"
        )
    for tool in described:
        if tool.is_strict:
            warn_of_unenforced(f"parameters of the tool {tool.name}", tool.parameters)
    # An added token may also be something common, such as two line breaks: only markers are named by their ids.
    markers = {
        text: token_id
        for text, token_id in (added_token_ids or {}).items()
        if any(text in marker for marker in format.markers) and len(text) >= _SHORTEST_MARKER
    }
    lark = Lark(markers)
    style = STYLES[format.tools](lark, described)
    if tool_choice == "auto":
        style.write_optional(parallel=parallel)
    else:
        style.write_required(parallel=parallel and name is None)
    return StructuredOutputsParams(grammar=lark.text())


def _binds(format: AnswerFormat, tools: Sequence[Tool], *, parallel: bool) -> bool:
    """Tell whether an answer that may call tools must do it in some way."""
    # Without a form of calls none is ever read, so that there are never several.
    only_one = not parallel and bool(tools) and format.tools is not None
    return only_one or any(tool.is_strict for tool in tools)


def _named(tool_choice: ToolChoice) -> str | None:
    if not isinstance(tool_choice, Mapping):
        return None
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if tool_choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidArgumentError("tool_choice", dict(tool_choice), _ALLOWED)
    return name


def _tool(schema: ToolSchema, *, strict: bool) -> Tool:
    function = schema["function"]
    parameters = function.get("parameters")
    return Tool(
        function["name"],
        parameters if isinstance(parameters, Mapping) else {},
        strict or function.get("strict") is True,
    )
