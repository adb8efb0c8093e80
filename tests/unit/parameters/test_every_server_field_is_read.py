"""Every field of a body that the server takes, and every setting of the server, is read or refused by name, or docs/server.md
says that it has no effect."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

from nbengine.server.protocol import chat, completions, messages, pooling, responses, tokens
from nbengine.server.protocol.engine_fields import EngineFields
from nbengine.server.settings import ServerSettings
from tests.unit.parameters.field_reads import FUNCTIONS, Reads, Scope, Types, field_reads

ROOT = Path(__file__).parents[3]
SERVER = ROOT / "nbengine" / "server"
BODIES: list[type[msgspec.Struct]] = [
    *(chat.ChatCompletionRequest, completions.CompletionRequest),
    *(responses.ResponsesRequest, messages.MessagesRequest),
    *(pooling.EmbeddingRequest, pooling.ScoreRequest, pooling.RerankRequest, pooling.ClassifyRequest),
    *(tokens.TokenizeRequest, tokens.DetokenizeRequest),
]
Names = set[tuple[str, str]]
"""Fields, by class and name."""


class Decoded(ast.NodeTransformer):
    """Lets the syntax tree say what a `BodyDecoder` returns: `_decoder.decode(body)` becomes `CompletionRequest(body)`."""

    def __init__(self, tree: ast.Module) -> None:
        self._types: dict[str, ast.expr] = {}
        for node in tree.body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Name(id="BodyDecoder"), args=[kind, *_]),
                ):
                    self._types[name] = kind

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="decode") if name in self._types:
                node.func = self._types[name]
        return node


def read_by_name(tree: ast.Module, types: Types) -> Names:
    """The fields that functions get by their names, out of a tuple or dict of their module, or of their own."""
    listed: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Dict):
            items = node.value.elts if isinstance(node.value, ast.Tuple) else node.value.keys
            listed |= {item.value for item in items if isinstance(item, ast.Constant)}
    found: Names = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        scope = Scope(types, None, function)
        scope.learn()
        own = {node.value for node in scope.nodes if isinstance(node, ast.Constant)}
        for node in scope.nodes:
            match node:
                case ast.Call(func=ast.Name(id="getattr"), args=[owner, *_]) if kind := scope.type_of(owner):
                    found |= {(kind, name) for name in listed | own}
    return found


def read_of_several(tree: ast.Module, classes: set[str]) -> Names:
    """The fields that functions read of an argument which may be one of several bodies."""
    found: Names = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        for argument in function.args.args:
            named = {node.id for node in ast.walk(argument) if isinstance(node, ast.Name)} & classes
            read = {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == argument.arg
            }
            found |= {(cls, name) for cls in named for name in read}
    return found


@pytest.fixture(scope="module")
def used() -> Names:
    """The fields of bodies that are read, and the settings."""
    trees = {str(path): ast.parse(path.read_text()) for path in sorted(SERVER.rglob("*.py"))}
    trees = {place: Decoded(tree).visit(tree) for place, tree in trees.items()}
    types = Types(trees.values())
    classes = [base.__name__ for cls in BODIES for base in cls.__mro__ if base in bodies_and_parts(cls)]
    reads: Reads = field_reads(trees, types, {*classes, "ServerSettings"})
    # A property of a body is read of the bodies that inherit it.
    found = {key for key in {**reads.places, **reads.copied_to} if reads.used(*key)} | {*reads.derived}
    for tree in trees.values():
        found |= read_by_name(tree, types) | read_of_several(tree, set(classes))
    # `given_fields` hands all of them on.
    return found | {("EngineFields", name) for name in EngineFields.__struct_fields__}


def bodies_and_parts(cls: type[msgspec.Struct]) -> list[type]:
    return [base for base in cls.__mro__ if issubclass(base, msgspec.Struct) and base is not msgspec.Struct]


def idle_fields(cls: type[msgspec.Struct], used: Names) -> set[str]:
    parts = [base.__name__ for base in bodies_and_parts(cls)]
    return {name for name in cls.__struct_fields__ if not any((part, name) in used for part in parts)}


def without_effect() -> set[str]:
    """The fields of which the page says that they have no effect."""
    rows = [row for row in (ROOT / "docs" / "server.md").read_text().splitlines() if row.startswith("|")]
    cells = [row.split("|")[1:3] for row in rows if row.count("|") == 3]
    return {
        name for names, said in cells if "without effect" in said for name in re.findall(r"`(\w+)`", names)
    }


@pytest.mark.parametrize("body", BODIES)
def test_a_field_of_a_body_is_read_or_said_to_have_no_effect(body: type[msgspec.Struct], used: Names) -> None:
    assert idle_fields(body, used) - without_effect() == set()


def test_what_is_said_to_have_no_effect_is_taken_and_has_none_somewhere(used: Names) -> None:
    # Others come back in a response, and mean nothing else.
    idle = set().union(*(idle_fields(body, used) for body in BODIES))
    assert without_effect() - idle <= {"max_tool_calls"}


def test_every_setting_of_the_server_is_read(used: Names) -> None:
    settings = ServerSettings.__dataclass_fields__
    assert [name for name in settings if ("ServerSettings", name) not in used] == []


def test_a_field_that_one_route_reads_is_not_read_by_another_one() -> None:
    source = (
        "class A:\n    x: int\n    y: int\n\n\nclass B:\n    x: int\n\n\ndecoder = BodyDecoder(A, '/a')\n\n\n"
        "def route(body: bytes) -> int:\n    asked = decoder.decode(body)\n    return asked.x\n"
    )
    tree = ast.parse(source)
    tree = Decoded(tree).visit(tree)
    reads = field_reads({"x": tree}, Types([tree]), ["A", "B"])
    assert [key for key in (("A", "x"), ("A", "y"), ("B", "x")) if reads.used(*key)] == [("A", "x")]
