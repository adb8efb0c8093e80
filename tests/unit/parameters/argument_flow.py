"""This module follows arguments: one that is handed on counts as used if the function that gets it uses
it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.unit.parameters.field_reads import FUNCTIONS, Function, Scope, Types, nodes_of

Callable = tuple[str | None, str]
"""Class and name; a function of a module has no class."""


class ArgumentFlow:
    """The functions and methods of source files."""

    def __init__(self, trees: Iterable[ast.Module], types: Types) -> None:
        self._types = types
        self._functions: dict[Callable, Function] = {}
        for tree in trees:
            for node in tree.body:
                if isinstance(node, FUNCTIONS):
                    self._functions[None, node.name] = node
                elif isinstance(node, ast.ClassDef):
                    methods = (item for item in node.body if isinstance(item, FUNCTIONS))
                    self._functions |= {(node.name, item.name): item for item in methods}

    def parameters(self, key: Callable) -> list[str]:
        """The names of the arguments of a function, but the object of a method, who makes a call, and `**kwargs`."""
        arguments = self._functions[key].args
        named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return [name for name in named if name not in ("self", "cls", "caller")]

    def uses(self, key: Callable, argument: str, seen: frozenset[tuple[Callable, str]] = frozenset()) -> bool:
        """Return whether anything depends on an argument of a function."""
        if (key, argument) in seen:
            return False
        seen |= {(key, argument)}
        if any(self.uses(override, argument, seen) for override in self._overrides(key)):
            return True
        function = self._functions[key]
        scope = Scope(self._types, key[0], function)
        scope.learn()
        handed_on = {}
        for call in (node for node in nodes_of(function) if isinstance(node, ast.Call)):
            handed_on |= {id(value): (call, where) for where, value in _arguments(call)}
        for node in nodes_of(function):
            if isinstance(node, ast.Name) and node.id == argument and isinstance(node.ctx, ast.Load):
                call, where = handed_on.get(id(node), (None, 0))
                callee = None if call is None else self._callee(scope, call)
                if callee is None:
                    return True
                name = self._parameter(callee, where)
                if name is None or self.uses(callee, name, seen):
                    return True
        return False

    def _overrides(self, key: Callable) -> Iterator[Callable]:
        cls, name = key
        for other, bases in self._types.bases.items():
            if (other, name) in self._functions and (cls in bases or self._implements(other, cls)):
                yield other, name

    def _implements(self, cls: str, protocol: str | None) -> bool:
        """Return whether a class has all methods with arguments of a protocol."""
        if protocol is None or cls == protocol or "Protocol" not in self._types.bases.get(protocol, ()):
            return False
        wanted = [key for key in self._functions if key[0] == protocol and self.parameters(key)]
        return all(self._method(cls, name) is not None for _, name in wanted)

    def _callee(self, scope: Scope, call: ast.Call) -> Callable | None:
        """The function of the source that a call reaches, as far as that can be told."""
        target = call.func
        if isinstance(target, ast.Name) and target.id == "partial":
            target = call.args[0]
        match target:
            case ast.Name(id=name):
                found: Callable = (name, "__init__") if name in self._types.bases else (None, name)
                return found if found in self._functions else None
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                return self._method(scope.cls, name, above=True)
            case ast.Attribute(value=owner, attr=name):
                named = owner.id if isinstance(owner, ast.Name) and owner.id in self._types.bases else None
                return self._method(named or scope.type_of(owner), name)
        return None

    def _method(self, cls: str | None, name: str, *, above: bool = False) -> Callable | None:
        if cls is None:
            return None
        if not above and (cls, name) in self._functions:
            return cls, name
        bases = (base for base in self._types.bases.get(cls, ()) if base != cls)
        return next((found for base in bases if (found := self._method(base, name))), None)

    def _parameter(self, callee: Callable, where: int | str) -> str | None:
        """The name under which a callee has an argument; None where it is one of `*args` or `**kwargs`."""
        function = self._functions[callee]
        arguments = function.args
        named = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if isinstance(where, str):
            return where if where in {*named, *(a.arg for a in arguments.kwonlyargs)} else None
        is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
        position = where + (callee[0] is not None and not is_static)
        return named[position] if position < len(named) else None


def _arguments(call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
    """The arguments of a call that are names, by position or keyword; those of `partial` as those of what it calls."""
    is_partial = isinstance(call.func, ast.Name) and call.func.id == "partial"
    yield from enumerate(call.args[is_partial:])
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
