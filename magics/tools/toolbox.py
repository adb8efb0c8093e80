"""The tools that a conversation may use: functions of the notebook, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import InvalidArgumentError, InvalidTypeError, NBEngineError
from nbengine.frontend.text.tool_arguments import call_arguments
from nbengine.frontend.text.tools import tool_schemas
from nbengine.magics.namespace import named_value


@dataclass(frozen=True)
class NotebookTool:
    """A tool that the model may call; `schema` is what the chat template tells of it."""

    schema: Mapping[str, Any]
    act: Callable[[Mapping[str, Any]], Any]
    """Takes the arguments and returns the result, or an awaitable of it."""

    @property
    def name(self) -> str:
        """Return the name that stands in a call."""
        name: str = self.schema["function"]["name"]
        return name

    def call(self, arguments: str) -> Any:
        """Do what the tool does; `arguments` is the JSON text of an object.

        Returns the result, or an awaitable of it.

        Raises:
            InvalidArgumentError: the arguments are not those of the tool.
            Exception: whatever the tool raises.
        """
        return self.act(json.loads(arguments or "{}"))


class Toolbox:
    """The tools of a line by name, in the order in which it names them."""

    def __init__(self, tools: Sequence[NotebookTool]) -> None:
        self._tools: dict[str, NotebookTool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise UsageError(f"%chat: two tools have the name {tool.name!r}")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Return the schemas of all tools, as chat templates take them."""
        return [tool.schema for tool in self._tools.values()]

    def find(self, name: str) -> NotebookTool:
        """Return the tool of that name.

        Raises:
            NBEngineError: there is none; the message, which the model reads, lists those that there are.
        """
        if name not in self._tools:
            raise NBEngineError(f"there is no tool {name!r}; the tools are {', '.join(self._tools)}")
        return self._tools[name]


def tools_of(names: Sequence[str], namespace: Mapping[str, object]) -> list[NotebookTool]:
    """Make the tools that a line names: functions of the notebook, lists of them, and methods (`shop.price`).

    Raises:
        UsageError: there is no such variable, or what it holds cannot be described to a model.
    """
    tools: list[NotebookTool] = []
    for name in names:
        value = named_value(name, namespace, "%chat: --tools")
        functions: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        for function in functions:
            if not callable(function):
                raise UsageError(
                    f"%chat: --tools {name}: {function!r} is not a function, nor a list of functions"
                )
        try:
            schemas = tool_schemas(functions)
        except (InvalidArgumentError, InvalidTypeError) as error:
            raise UsageError(f"%chat: --tools {name}: {error}") from None
        tools += map(NotebookTool, schemas, map(_caller, functions))
    return tools


def _caller(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    def call(arguments: Mapping[str, Any]) -> Any:
        return function(**call_arguments(function, arguments))

    return call
