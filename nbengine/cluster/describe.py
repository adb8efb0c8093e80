"""One-line descriptions of Ray's errors, and of the reasons why a cluster has no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = ("node:", "object_store_memory", "memory")


def describe_ray_error(error: BaseException) -> str:
    """Say what an exception of Ray's means to a person who runs an engine."""
    text = str(error)
    if "No module named 'nbengine" in text:
        return "nbengine is not installed there: install it on all nodes, for the Python that Ray runs with"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def no_cluster(address: str, reason: str) -> str:
    """Say why no cluster was found at `address`, and what to do."""
    where = "on this machine" if address == "auto" else f"at {address}"
    return (
        f"no Ray cluster was found {where} ({reason}); start one with `ray start --head`, have the other machines join it "
        "with `ray start --address=HOST:PORT`, and if this machine belongs to several say which with ray_address or RAY_ADDRESS"
    )


def no_room(
    bundles: Sequence[Mapping[str, float]],
    patience: float,
    nodes: Sequence[Mapping[str, Any]],
    available: Mapping[str, Mapping[str, float]],
) -> str:
    """Say why the cluster has no room for a placement group: what was asked for, and what each node has."""
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
