"""The forms of answers with calls, one class for each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbengine.frontend.parsing import harmony
from nbengine.frontend.parsing.grammars.lark import GAP, TEXT, Lark, Tool, either
from nbengine.frontend.parsing.grammars.values import GEMMA, PYTHON, Written
from nbengine.frontend.parsing.json_text import quoted
from nbengine.frontend.parsing.schemas import STRING, types_of
from nbengine.frontend.parsing.tools import deepseek, glm, qwen3_coder

Schema = Mapping[str, Any]


class Style:
    """The base of the forms: calls one after the other, each from `marker` on.

    A family defines `body`, the rest of a call behind the marker.
    """

    marker = ""

    def __init__(self, lark: Lark, tools: Sequence[Tool]) -> None:
        self.lark = lark
        self.tools = tools

    def body(self) -> str:
        """Write a call behind its marker."""
        raise NotImplementedError

    def write_required(self, *, parallel: bool) -> None:
        """Write the grammar of an answer that is a call, or several."""
        call = self.lark.rule("call", f"{GAP} {self.lark.literal(self.marker)} {self.body()}")
        self.lark.rule("start", f"{call}{'+' if parallel else ''} {GAP}")

    def write_optional(self, *, parallel: bool) -> None:
        """Write the grammar of an answer that is text, with calls in it or without."""
        begun = self.lark.text_up_to("begun", self.marker)
        call = self.lark.rule("call", f"{begun} {self.body()}")
        self.lark.rule("start", f"{call}* {TEXT}" if parallel else f"{TEXT} | {call} {GAP}")

    def write_either(self, answer: Schema, spaces: str | None, *, parallel: bool) -> None:
        """Write the grammar of an answer that is a call, or several, or else JSON that follows the schema `answer`,
        with the white space `spaces`."""
        self.write_required(parallel=parallel)
        calls = self.lark.rule("calls", self.lark.rule_body("start"))
        self.lark.rule("start", f"{calls} | {self.lark.json('answer', answer, spaces)}")

    def arguments(self, index: int) -> str:
        """Return the rule of a tool's arguments as JSON."""
        return self.lark.json(f"arguments_{index}", self.tools[index].schema)

    def each(self, before: str, behind: str) -> str:
        """Write a call of any of the tools: `before` with its name in the place of NAME, arguments, `behind`."""
        calls = [
            f"{self.lark.literal(before.replace('NAME', tool.name))} {self.arguments(index)} "
            f"{self.lark.literal(behind)}"
            for index, tool in enumerate(self.tools)
        ]
        return either(*calls)

    def objects(self, key: str) -> str:
        """Write a call as one JSON object."""
        return self.lark.rule("object", self.each(f'{{"name": "NAME", {quoted(key)}: ', "}"))


class Hermes(Style):
    """The form of Hermes and Qwen."""

    marker = "<tool_call>"

    def body(self) -> str:
        return f"{self.lark.literal(chr(10))} {self.objects('arguments')} {self.lark.literal(chr(10) + '</tool_call>')}"


class Llama3Json(Style):
    """The form of Llama 3, whose answer is calls or text, never both."""

    def write_required(self, *, parallel: bool) -> None:
        lark = self.lark
        call = self.objects("parameters")
        more = f" ({lark.literal('; ')} {call})*" if parallel else ""
        lark.rule("start", f"{GAP} {lark.literal('<|python_tag|>')}? {call}{more}")

    def write_optional(self, *, parallel: bool) -> None:
        self.write_required(parallel=parallel)
        calls = self.lark.rule("calls", self.lark.rule_body("start"))
        self.lark.rule("start", rf"/[^\{{\s](.|\n)*/ | {calls}")

    def write_either(self, answer: Schema, spaces: str | None, *, parallel: bool) -> None:
        # Both begin with a brace, and only one schema tells them apart at any place; behind it no other call can come.
        del parallel
        own = {f"arguments_{index}": tool.schema for index, tool in enumerate(self.tools)}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "parameters": {"$ref": f"#/$defs/arguments_{index}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for index, tool in enumerate(self.tools)
        ]
        whole = {
            "anyOf": [*calls, {"$ref": "#/$defs/answer"}],
            "$defs": {
                name: _moved(schema, f"#/$defs/{name}") for name, schema in {**own, "answer": answer}.items()
            },
        }
        self.lark.rule("start", self.lark.json("either", whole, spaces))


class Mistral(Style):
    """The form of Mistral: a list of objects, or names with arguments."""

    marker = "[TOOL_CALLS]"

    def body(self) -> str:
        lark = self.lark
        named = [
            f"{lark.literal(tool.name)} ({lark.literal('[ARGS]')})? {self.arguments(index)}"
            for index, tool in enumerate(self.tools)
        ]
        listed = lark.rule("listed", f'{GAP} "[" {self.objects("arguments")} "]"')
        return either(*named, listed)


class Granite(Style):
    """The form of Granite 3: a list of objects."""

    marker = "<|tool_call|>"

    def write_required(self, *, parallel: bool) -> None:
        self.lark.rule("start", f"{GAP} {self.lark.literal(self.marker)} {self.listed(parallel=parallel)}")

    def write_optional(self, *, parallel: bool) -> None:
        begun = self.lark.text_up_to("begun", self.marker)
        self.lark.rule("start", f"{TEXT} | {begun} {self.listed(parallel=parallel)}")

    def listed(self, *, parallel: bool) -> str:
        """Write the list of calls."""
        call = self.objects("arguments")
        more = f' ("," {GAP} {call})*' if parallel else ""
        return f'{GAP} "[" {call}{more} "]"'


class DeepSeek(Style):
    """The form of DeepSeek, in which the name stands alone or behind the kind of the tool."""

    marker = deepseek.LIST_BEGIN

    def write_required(self, *, parallel: bool) -> None:
        self.lark.rule("start", f"{GAP} {self.lark.literal(self.marker)} {self.listed(parallel=parallel)}")

    def write_optional(self, *, parallel: bool) -> None:
        begun = self.lark.text_up_to("begun", self.marker)
        self.lark.rule("start", f"{TEXT} | {begun} {self.listed(parallel=parallel)}")

    def listed(self, *, parallel: bool) -> str:
        """Write the list of calls and its end."""
        lark = self.lark
        short = self.each(f"NAME{deepseek.SEPARATOR}", "")
        long = self.each(f"function{deepseek.SEPARATOR}NAME\n```json\n", "\n```")
        begin, end = lark.literal(deepseek.CALL_BEGIN), lark.literal(deepseek.CALL_END)
        call = lark.rule("call", f"{begin} {either(short, long)} {end}")
        more = f"({GAP} {call})* " if parallel else ""
        return f"{call} {more}{lark.literal(deepseek.LIST_END)}"


class Tagged(Style):
    """The base of the forms in which each argument stands between tags."""

    def members(self, index: int) -> str:
        """Write the arguments of a tool, in the order of its schema."""
        tool = self.tools[index]
        properties = tool.parameters.get("properties") if tool.is_strict else None
        if not isinstance(properties, dict):
            return f"({self.member(self.any_key(), self.text_value())})*"
        required = tool.parameters.get("required") or ()
        parts = []
        for number, (key, schema) in enumerate(properties.items()):
            if types_of(schema, tool.parameters) == STRING and not _choices(schema):
                value = self.text_value()
            else:
                definitions = {
                    key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
                }
                own = schema if isinstance(schema, dict) else {}
                value = self.other_value(f"value_{index}_{number}", own, definitions)
            part = self.member(self.lark.literal(key), value)
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts)

    def member(self, key: str, value: str) -> str:
        """Write one argument."""
        raise NotImplementedError

    def any_key(self) -> str:
        """Return the rule of a key that no schema names."""
        return self.lark.rule("key", r"/[\w.-]+/")

    def text_value(self) -> str:
        """Return the rule of a string with the tag behind it."""
        return self.lark.text_up_to("text_value", self.value_end)

    def other_value(self, name: str, schema: dict[str, object], definitions: dict[str, object]) -> str:
        """Return a value that is no plain string, with the tag behind it."""
        choices = _choices(schema)
        if choices:
            value = either(*(self.lark.literal(choice) for choice in choices))
        else:
            value = self.lark.json(name, {**schema, **definitions})
        return f"{value} {self.lark.literal(self.value_end)}"

    value_end = ""


class Qwen3Coder(Tagged):
    """The form of Qwen3-Coder."""

    marker = qwen3_coder.CALL
    value_end = f"\n{qwen3_coder.PARAMETER_END}\n"

    def body(self) -> str:
        behind = self.lark.literal(f"{qwen3_coder.FUNCTION_END}\n{qwen3_coder.CALL_END}")
        calls = [
            f"{self.lark.literal(f'{chr(10)}<function={tool.name}>{chr(10)}')} {self.members(index)} {behind}"
            for index, tool in enumerate(self.tools)
        ]
        return either(*calls)

    def member(self, key: str, value: str) -> str:
        before, behind = self.lark.literal(qwen3_coder.PARAMETER), self.lark.literal(">\n")
        return f"{before} {key} {behind} {value}"


class Glm(Tagged):
    """The form of GLM-4.5."""

    marker = glm.CALL
    value_end = glm.VALUE_END

    def body(self) -> str:
        lark = self.lark
        calls = [
            f"{lark.literal(tool.name)} {GAP} {self.members(index)} {lark.literal(glm.CALL_END)}"
            for index, tool in enumerate(self.tools)
        ]
        return either(*calls)

    def member(self, key: str, value: str) -> str:
        lark = self.lark
        return f"{lark.literal(glm.KEY)} {key} {lark.literal(glm.KEY_END)} {GAP} {lark.literal(glm.VALUE)} {value} {GAP}"


class Harmony(Style):
    """The form of gpt-oss, with the messages in front of a call."""

    def message(self, header: str) -> str:
        """Write a message that another one follows."""
        return (
            f"{self.lark.literal(header)} {self.lark.text_up_to('message_text', harmony.END)} {self.next()}"
        )

    def next(self) -> str:
        """Write the beginning of another message."""
        return self.lark.literal(f"{harmony.START}assistant")

    def calls(self) -> str:
        """Write a call."""
        header = f"{harmony.CHANNEL}commentary to=functions.NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}"
        return self.lark.rule("call", self.each(header, ""))

    def before(self) -> str:
        """Write the messages that may stand in front of the last one."""
        analysis = self.message(harmony.ANALYSIS)
        preamble = self.message(f"{harmony.CHANNEL}commentary{harmony.MESSAGE}")
        return self.lark.rule("before", either(analysis, preamble))

    def write_required(self, *, parallel: bool) -> None:
        # The marker behind a call ends the answer, so that there is never more than one call.
        del parallel
        self.lark.rule("start", f"{self.before()}* {self.calls()}")

    def write_optional(self, *, parallel: bool) -> None:
        del parallel
        self.write_final(TEXT)

    def write_either(self, answer: Schema, spaces: str | None, *, parallel: bool) -> None:
        del parallel
        self.write_final(self.lark.json("answer", answer, spaces))

    def write_final(self, answer: str) -> None:
        """Write the grammar of an answer that ends with a call or with a message of the rule `answer`."""
        final = self.lark.rule("final", f"{self.lark.literal(harmony.FINAL)} {answer}")
        self.lark.rule("start", f"{self.before()}* {either(self.calls(), final)}")


class Gemma(Style):
    """The form of Gemma 4."""

    marker = "<|tool_call>"

    def body(self) -> str:
        written = Written(self.lark, GEMMA)
        behind = self.lark.literal("<tool_call|>")
        calls = [
            f"{self.lark.literal(f'call:{tool.name}')} {written.object_of(f'arguments_{index}', tool)} {behind}"
            for index, tool in enumerate(self.tools)
        ]
        return either(*calls)


class Pythonic(Style):
    """The form of Python, whose answer is a list of calls or text, never both."""

    def write_required(self, *, parallel: bool) -> None:
        written = Written(self.lark, PYTHON)
        calls = [
            f"{self.lark.literal(tool.name)} {written.object_of(f'arguments_{index}', tool)}"
            for index, tool in enumerate(self.tools)
        ]
        call = self.lark.rule("call", either(*calls))
        more = f' ("," {GAP} {call})*' if parallel else ""
        self.lark.rule("start", f'{GAP} "[" {call}{more} "]"')

    def write_optional(self, *, parallel: bool) -> None:
        self.write_required(parallel=parallel)
        calls = self.lark.rule("calls", self.lark.rule_body("start"))
        self.lark.rule("start", rf"/[^\[\s](.|\n)*/ | {calls}")


STYLES: dict[str, type[Style]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "deepseek": DeepSeek,
    "glm": Glm,
    "gpt_oss": Harmony,
    "gemma": Gemma,
    "granite": Granite,
}
"""The forms by the name of the parser that reads them."""


def _moved(schema: Any, place: str) -> Any:
    """Return a schema with references that lead to its own parts where it stands at `place` of another one."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema


def _choices(schema: object) -> list[str]:
    """Return the values of an enumeration of strings, none if it is something else."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return values
    return []
