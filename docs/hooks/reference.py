"""An extension of griffe, which reads the code for the reference without running it.

Two things it would show as they are written, and not as they are meant:

- `Control` and `AsyncControl` have lines such as `sleep = blocking(calls.sleep)`. That is an attribute without
  a docstring; when it runs it is a method, whose signature and text are taken here.
- `self.request_id = request_id` is an attribute with a value that says nothing; its type is that of the
  argument.
"""

from __future__ import annotations

import inspect
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    Expr,
    ExprCall,
    Extension,
    Function,
    Inspector,
    Parameter,
    ParameterKind,
    Parameters,
    Visitor,
    dynamic_import,
)

_MAKERS = {"blocking": set(), "awaitable": {"async"}}
"""The functions that make methods, with the labels of such a method."""


class AsMeant(Extension):
    """Puts members of a class right."""

    def on_class_members(self, *, cls: Class, agent: Visitor | Inspector, **_: Any) -> None:
        """Go through the members of a class that has just been read."""
        for name, member in list(cls.members.items()):
            if not isinstance(member, Attribute):
                continue
            made_by = str(member.value.function) if isinstance(member.value, ExprCall) else ""
            if made_by in _MAKERS:
                cls.set_member(name, _method(member, _MAKERS[made_by], agent))
            elif "instance-attribute" in member.labels and "class-attribute" not in member.labels:
                member.annotation = member.annotation or _given_type(cls, str(member.value))
                member.value = None


def _given_type(cls: Class, name: str) -> str | Expr | None:
    """Return the type of the argument of `__init__` that has this name."""
    init = cls.members.get("__init__")
    given = isinstance(init, Function) and name in init.parameters
    return init.parameters[name].annotation if given else None


def _method(attribute: Attribute, labels: set[str], agent: Visitor | Inspector) -> Function:
    made = dynamic_import(attribute.path)
    signature = inspect.signature(made)
    method = Function(
        attribute.name,
        lineno=attribute.lineno,
        endlineno=attribute.endlineno,
        parameters=Parameters(*map(_parameter, signature.parameters.values())),
        returns=_shown(signature.return_annotation),
    )
    method.docstring = Docstring(
        inspect.getdoc(made) or "",
        parent=method,
        parser=agent.docstring_parser,
        parser_options=agent.docstring_options,
    )
    method.labels |= labels
    return method


def _parameter(parameter: inspect.Parameter) -> Parameter:
    has_default = parameter.default is not parameter.empty
    return Parameter(
        parameter.name,
        annotation=_shown(parameter.annotation),
        kind=ParameterKind[parameter.kind.name.lower()],
        default=repr(parameter.default) if has_default else None,
    )


def _shown(annotation: Any) -> str | None:
    if annotation is inspect.Signature.empty:
        return None
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
