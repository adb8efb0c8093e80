"""What Ray says, in a line; and why it has no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = ("node:", "object_store_memory", "memory")


def describe_ray_error(error: BaseException) -> str:
    """What an exception of Ray's means to who runs an engine."""
    text = str(error)
    if "No module named 'nbengine" in text:
        return "nbengine is not installed there: install it on all nodes, for the Python that Ray runs with"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def no_room(
    bundles: Sequence[Mapping[str, float]],
    patience: float,
    nodes: Sequence[Mapping[str, Any]],
    available: Mapping[str, Mapping[str, float]],
) -> str:
    """Why a placement group could not be had: what was asked for, and what each node has."""
    asked = f"{len(bundles)} x {_resources(bundles[0])}"
    lines = [
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has "
        f"{_resources(available.get(node['NodeID'], {}))} free of {_resources(node['Resources'])}"
        for node in nodes
        if node["Alive"]
    ]
    return f"the Ray cluster had no room for {asked} within {patience:g} s: " + "; ".join(lines)


def _resources(amounts: Mapping[str, float]) -> str:
    shown = [
        f"{amount:g} {name}"
        for name, amount in sorted(amounts.items())
        if not name.startswith(_HIDDEN) and "_group_" not in name
    ]
    return ", ".join(shown) or "nothing"
