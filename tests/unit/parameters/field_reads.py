"""This module finds the fields of parameter classes that the source reads, by its syntax tree and
annotations.

A field that is only checked by its own class, or copied into the same or another parameter class, is not
read: of a copy, the field that it is copied to must be.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Field = tuple[str, str]
"""Class and name."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COPIES = ("replace", "clone", "copy", "deepcopy")


@dataclass
class Reads:
    """The findings; `places` has "file:line" for each field that is read."""

    places: defaultdict[Field, list[str]] = field(default_factory=lambda: defaultdict(list))
    copied_to: defaultdict[Field, set[Field]] = field(default_factory=lambda: defaultdict(set))
    derived: defaultdict[Field, set[Field]] = field(default_factory=lambda: defaultdict(set))
    """By field, the properties and methods of parameter classes that read it."""

    def used(self, cls: str, name: str, seen: frozenset[Field] = frozenset()) -> bool:
        """Return whether anything outside of the parameter classes depends on a field."""
        key = cls, name
        if key in seen:
            return False
        seen |= {key}
        others = (*self.copied_to.get(key, ()), *self.derived.get(key, ()))
        return bool(self.places.get(key)) or any(self.used(*other, seen) for other in others)


@functools.cache
def nodes_of(function: ast.AST) -> list[ast.AST]:
    """All that is within a function; it is looked through several times."""
    return list(ast.walk(function))


def _keeps(function: Function) -> bool:
    """Return whether a function sets attributes."""
    return any(isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) for n in nodes_of(function))


class Types:
    """The classes of the source, and what their members are."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.bases: dict[str, list[str]] = {}
        self.members: dict[Field, str] = {}
        self.returns: dict[str, str] = {}
        classes = [n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)]
        for node in classes:
            self.bases.setdefault(node.name, []).extend(b.id for b in node.bases if isinstance(b, ast.Name))
        for node in classes:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    self._add(node.name, item.target.id, self.named(item.annotation))
                elif isinstance(item, FUNCTIONS) and item.returns is not None:
                    self._add(node.name, item.name, self.named(item.returns))
        for tree in trees:
            for item in tree.body:
                if isinstance(item, FUNCTIONS) and item.returns and (found := self.named(item.returns)):
                    self.returns[item.name] = found
        methods = [
            (node.name, n) for node in classes for n in node.body if isinstance(n, FUNCTIONS) and _keeps(n)
        ]
        # What a constructor keeps is known once the types of its arguments are; what those keep, a round later.
        for _ in range(2):
            for name, function in methods:
                Scope(self, name, function).learn()

    def _add(self, cls: str, name: str, kind: str | None) -> None:
        if kind is not None:
            self.members.setdefault((cls, name), kind)

    def named(self, annotation: ast.expr | None) -> str | None:
        """The only class of the source that an annotation names, also within a container or a union."""
        if annotation is None:
            return None
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        found = {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name) and n.id in self.bases}
        return found.pop() if len(found) == 1 else None

    def member(self, cls: str | None, name: str) -> str | None:
        """Return the type that an attribute or a method of a class gives, its bases included."""
        if cls is None:
            return None
        found = self.members.get((cls, name))
        return found or next(
            (kind for base in self.bases.get(cls, ()) if base != cls and (kind := self.member(base, name))),
            None,
        )


class Scope:
    """A function: the types of its variables, and the fields that it reads."""

    def __init__(self, types: Types, cls: str | None, function: Function) -> None:
        self.types = types
        self.cls = cls
        self.function = function
        self.nodes = nodes_of(function)
        self.variables: dict[str, str] = {}
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            kind = types.named(argument.annotation)
            if kind is not None:
                self.variables[argument.arg] = kind
        if cls is not None and arguments.args:
            self.variables.setdefault(arguments.args[0].arg, cls)

    def learn(self) -> None:
        """Follow assignments, in their order."""
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[target], value=value):
                    self._bind(target, value)
                case ast.AnnAssign(target=target, annotation=annotation):
                    self._name(target, self.types.named(annotation))
                case ast.NamedExpr(target=target, value=value):
                    self._name(target, self.type_of(value))
                case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                    self._bind(target, value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            # for name, params in zip(names, all_params), and the like
            for one, other in zip(target.elts, value.args, strict=False):
                self._bind(one, other)
        else:
            self._name(target, self.type_of(value))

    def _name(self, target: ast.expr, kind: str | None) -> None:
        if kind is None:
            return
        if isinstance(target, ast.Name):
            self.variables.setdefault(target.id, kind)
        elif isinstance(target, ast.Attribute) and (owner := self.type_of(target.value)) is not None:
            self.types.members.setdefault((owner, target.attr), kind)

    def type_of(self, node: ast.expr) -> str | None:
        """The class of an expression's value, or of its elements."""
        match node:
            case ast.Name(id=name):
                return self.variables.get(name)
            case ast.Attribute(value=owner, attr=name):
                return self.types.member(self.type_of(owner), name)
            case ast.Call(func=ast.Name(id=name)) if name in self.types.bases:
                return name
            case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in _COPIES:
                return self.type_of(first)
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                return self.types.member(self.type_of(owner), name)
            case ast.Call(func=ast.Name(id=name)):
                return self.types.returns.get(name)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
                return next((kind for value in values if (kind := self.type_of(value))), None)
            case ast.IfExp(body=one, orelse=other):
                return self.type_of(one) or self.type_of(other)
            case ast.Await(value=value) | ast.NamedExpr(value=value) | ast.Subscript(value=value):
                return self.type_of(value)
        return None


def field_reads(trees: Mapping[str, ast.Module], types: Types, classes: Iterable[str]) -> Reads:
    """Find the reads of fields of `classes` in source files, given by their names."""
    wanted = set(classes)
    reads = Reads()
    for name, tree in trees.items():
        for cls, function in _functions(tree):
            scope = Scope(types, cls, function)
            scope.learn()
            _note(scope, name, wanted, reads)
    return reads


def _functions(tree: ast.Module) -> Iterator[tuple[str | None, Function]]:
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, item) for item in node.body if isinstance(item, FUNCTIONS))


def _note(scope: Scope, file: str, wanted: set[str], reads: Reads) -> None:
    copies: dict[int, Field] = {}
    for node in scope.nodes:
        if isinstance(node, ast.Call) and (made := _made_by(scope, node, wanted)) is not None:
            for keyword in node.keywords:
                if keyword.arg is not None:
                    copies |= {id(inner): (made, keyword.arg) for inner in ast.walk(keyword.value)}
    for node in scope.nodes:
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
            continue
        owner = scope.type_of(node.value)
        if owner not in wanted:
            continue
        key = owner, node.attr
        if id(node) in copies:
            reads.copied_to[key].add(copies[id(node)])
        elif scope.cls in wanted:
            reads.derived[key].add((scope.cls, scope.function.name))
        else:
            reads.places[key].append(f"{file}:{node.lineno}")


def _made_by(scope: Scope, call: ast.Call, wanted: set[str]) -> str | None:
    """The parameter class of which a call makes an object: by its name, or as a changed copy."""
    kind = scope.type_of(call)
    is_maker = isinstance(call.func, ast.Name) or (
        isinstance(call.func, ast.Attribute) and call.func.attr in _COPIES
    )
    return kind if is_maker and kind in wanted else None
