"""The distance of an engine's next-token distributions from the exact ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence over all positions."""

    mean: float
    """Mean of the Kullback-Leibler divergences D(exact || engine), in nats."""
    median: float
    largest: float
    same_top: float
    """The part of the positions at which the most likely token is the same."""
    positions: int


def divergence(exact: Logits, found: Logits) -> Divergence:
    """Compare logits [prompts, positions, vocabulary]; a constant that is added to a row changes nothing."""
    if exact.shape != found.shape:
        raise ValueError(f"logits of shape {found.shape} beside {exact.shape}")
    parts, same = [], 0
    for reference, other in zip(exact, found, strict=True):
        true, guess = _log_softmax(reference), _log_softmax(other)
        parts.append((np.exp(true) * (true - guess)).sum(-1))
        same += int((reference.argmax(-1) == other.argmax(-1)).sum())
    all_positions = np.concatenate(parts)
    return Divergence(
        float(all_positions.mean()),
        float(np.median(all_positions)),
        float(all_positions.max()),
        same / all_positions.size,
        all_positions.size,
    )


def _log_softmax(logits: Any) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    shifted: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return shifted
