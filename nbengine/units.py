"""Quantities in words."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Write a number of bytes in words, with three digits: `512 B`, `98.4 MiB`, `1.25 GiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 100 else f"{num_bytes:.0f} {unit}"
    return f"{num_bytes / 1024:.4g} TiB"
