"""The surroundings of a line: the variables that it can name, and the cell that it stands in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import did_you_mean


def prompt_namespace(shell: InteractiveShell) -> dict[str, object]:
    """Return the variables that a prompt can name: the notebook's, with `In` as it was typed."""
    namespace = dict(shell.user_ns)
    for name in ("exit", "quit"):
        if namespace.get(name) is shell.user_ns_hidden.get(name):
            namespace.pop(name, None)
    history = shell.history_manager
    if history is not None and namespace.get("In") is history.input_hist_parsed:
        namespace["In"] = history.input_hist_raw
    return namespace


def notebook_name(shell: InteractiveShell) -> str:
    """Return the path of the notebook, as Jupyter's server or VS Code tells it; empty where nobody does."""
    return str(shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") or "")


def named_value(name: str, namespace: Mapping[str, object], flag: str) -> object:
    """Return the value of a variable or of its attributes (`shop.price`), functions included.

    Raises:
        UsageError: there is none; the message begins with `flag`, behind which the name stands.
    """
    first, *attributes = name.split(".")
    if first not in namespace:
        hint = did_you_mean(first, [key for key, value in namespace.items() if callable(value)])
        raise UsageError(f"{flag} {name}: there is no variable {first!r}{hint}")
    value = namespace[first]
    for attribute in attributes:
        try:
            value = getattr(value, attribute)
        except AttributeError as error:
            raise UsageError(f"{flag} {name}: {error}") from None
    return value


def running_cell(shell: InteractiveShell) -> tuple[str, str]:
    """Return the ids of the cell that runs and of its run; each is empty where the frontend gives none."""
    parent: Any = getattr(shell, "get_parent", dict)() or {}
    return (parent.get("metadata") or {}).get("cellId") or "", (parent.get("header") or {}).get(
        "msg_id"
    ) or ""
