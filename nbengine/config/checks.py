"""Validation shared by the configuration classes."""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.errors import InvalidArgumentError


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    """Raise `InvalidArgumentError` unless `ok`."""
    if not ok:
        raise InvalidArgumentError(name, value, allowed)


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise `InvalidArgumentError` unless `value` is one of `allowed`."""
    require(name, value, value in allowed, "one of " + ", ".join(map(str, allowed)))
