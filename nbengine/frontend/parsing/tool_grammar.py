"""The grammar that makes a model call tools as the caller wants it: at all, which ones, and with which arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nbengine.errors import InvalidArgumentError, NotSupportedError
from nbengine.frontend.parsing.formats import HARMONY, AnswerFormat
from nbengine.frontend.parsing.grammars.lark import WHITESPACE, Lark, Tool
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
    answer: StructuredOutputsParams | None = None,
    added_token_ids: Mapping[str, int] | None = None,
) -> StructuredOutputsParams | None:
    """Make the grammar of an answer with calls; None if any text will do.

    With "auto" there is a grammar only if a tool is strict, one call is to be the last, or there is an `answer`:
    unless there is one the text is free until a call begins. The grammar is that of the text behind the reasoning,
    except for gpt-oss, whose reasoning it contains.

    Args:
        format: the format of the answer.
        tools: `{"type": "function", "function": {...}}`; with `"strict": True` in the inner object the
            arguments of a tool follow its schema, otherwise they are any JSON object.
        tool_choice: "none", "auto", "required", or the one tool to be called.
        parallel: allow several calls in one answer.
        strict: take all tools as strict.
        answer: the form of an answer without a call: JSON.
        added_token_ids: the ids of the tokenizer's added tokens by their texts (`added_token_ids_of`): a grammar
            has to name those by their ids.

    Raises:
        InvalidArgumentError: the choice is none of these, or names no tool; or `answer` is not JSON.
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
    # A call of gpt-oss ends its answer, so that there is never a second one.
    has_form = answer is not None or not (parallel or format.tools == HARMONY)
    if tool_choice == "none" or (tool_choice == "auto" and not _binds(format, described, has_form=has_form)):
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
    lark = Lark(_marker_ids(format, added_token_ids or {}))
    style = STYLES[format.tools](lark, described)
    if tool_choice != "auto":
        style.write_required(parallel=parallel and name is None)
    elif answer is None:
        style.write_optional(parallel=parallel)
    else:
        spaces = None if answer.disable_any_whitespace else answer.whitespace_pattern or WHITESPACE
        style.write_either(_schema_of(answer), spaces, parallel=parallel)
    return StructuredOutputsParams(grammar=lark.text())


def _binds(format: AnswerFormat, tools: Sequence[Tool], *, has_form: bool) -> bool:
    """Tell whether there is anything to enforce where the model may call tools or not."""
    # Without a way of calling tools no call is ever read: what else the answer is to be needs no grammar with calls.
    return any(tool.is_strict for tool in tools) or (has_form and bool(tools) and format.tools is not None)


def _marker_ids(format: AnswerFormat, added_token_ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of the tokens of which a format's markers are made."""
    # An added token may also be something common, such as two line breaks: only markers are named by their ids.
    return {
        text: token_id
        for text, token_id in added_token_ids.items()
        if any(text in marker for marker in format.markers) and len(text) >= _SHORTEST_MARKER
    }


def _schema_of(answer: StructuredOutputsParams) -> Mapping[str, Any]:
    """Return the schema of an answer without a call."""
    kind, value = answer.constraint
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json":
        raise InvalidArgumentError(
            "structured_outputs", kind, "json or json_object where the answer may be a call of a tool instead"
        )
    schema: Mapping[str, Any] = json.loads(value) if isinstance(value, str) else value
    warn_of_unenforced("structured_outputs.json", schema)
    return schema


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
