"""Functions as tools: what is told of their arguments, and what they are called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.text.tool_arguments import call_arguments
from nbengine.frontend.text.tools import tool_schemas


@dataclass
class Point:
    x: float
    y: float = 0.0


@dataclass
class Route:
    start: Point
    end: Point


class Model(BaseModel):
    start: Point
    end: Point


class Struct(msgspec.Struct):
    start: Point
    end: Point


class Dictionary(TypedDict):
    start: Point
    end: Point


def schema(function: Any) -> dict[str, Any]:
    [tool] = tool_schemas([function])
    return dict(tool["function"])


def test_arguments_need_no_description() -> None:
    def length(text: str, unit: int = 1) -> int:
        """Tell the length of a text.

        Args:
            unit: what counts as one
        """
        return len(text) // unit

    properties = schema(length)["parameters"]["properties"]
    assert properties == {
        "text": {"type": "string"},
        "unit": {"type": "integer", "description": "what counts as one"},
    }


@pytest.mark.parametrize("kind", [Route, Model, Struct, Dictionary])
def test_a_class_with_fields_is_an_object_with_these_fields(kind: Any) -> None:
    def drive(way: Any, others: Any = ()) -> None:
        """Drive."""

    drive.__annotations__ = {"way": kind, "others": list[kind]}
    parameters = schema(drive)["parameters"]
    way = parameters["properties"]["way"]
    if "$ref" in way:
        way = parameters["$defs"][way["$ref"].removeprefix("#/$defs/")]
    assert way["type"] == "object"
    assert way["properties"]["start"] == {"$ref": "#/$defs/Point"}
    assert set(parameters["$defs"]["Point"]["properties"]) == {"x", "y"}
    given = {"start": {"x": 1}, "end": {"x": 2, "y": 3}}
    called = call_arguments(drive, {"way": given, "others": [given]})
    if kind is Dictionary:
        assert called == {"way": given, "others": [given]}
        return
    made = called["way"]
    assert isinstance(made, kind)
    assert (made.start, made.end) == (Point(1.0), Point(2.0, 3.0))
    assert isinstance(called["others"][0], kind)
    with pytest.raises(InvalidArgumentError, match="start"):
        call_arguments(drive, {"way": {"end": given["end"]}})


def test_two_classes_of_one_name_cannot_be_told_apart() -> None:
    @dataclass
    class Point:
        z: int

    def drive(way: Any, other: Any) -> None:
        """Drive."""

    drive.__annotations__ = {"way": Route, "other": msgspec.defstruct("Other", [("start", Point)])}
    with pytest.raises(InvalidArgumentError, match="two classes have the name Point"):
        schema(drive)
