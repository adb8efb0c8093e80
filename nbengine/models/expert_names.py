"""The names under which checkpoints have the experts, and where one file tensor holds several of ours.

Ours are those of Qwen's files on the hub: `mlp.gate.weight` is the router, `mlp.experts.3.gate_proj.weight` the gate of
expert 3. Mixtral's files have other names for the same tensors; transformers 5, asked not to restore the original
format, saves all experts of a layer as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MIXTRAL = re.compile(r"(?P<layer>.*)\.block_sparse_moe\.(?P<rest>gate|experts\.\d+\.w[123])\.weight")
_MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)")
_NUM_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where a file has a tensor of ours: all of the tensor `name`, or `shape[0]` rows of an expert's matrix in it."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0

    def index(self, index: tuple[slice, ...]) -> tuple[int | slice, ...]:
        """The file's index of what has this index in our tensor."""
        if self.expert is None:
            return index
        rows, *columns = index
        start, stop, _ = rows.indices(self.shape[0])
        return (self.expert, slice(self.first_row + start, self.first_row + stop), *columns)


def tensor_parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, TensorPart]]:
    """Our names of what a file's tensor holds, each with its place in it."""
    fused = _FUSED.fullmatch(name)
    if fused is None or len(shape) != _NUM_DIMENSIONS:
        yield _our_name(name), TensorPart(name, shape)
        return
    num_experts, num_rows, num_columns = shape
    projections = ["down_proj"] if fused["projection"] == "down_proj" else ["gate_proj", "up_proj"]
    rows = num_rows // len(projections)
    for expert in range(num_experts):
        for place, projection in enumerate(projections):
            part = TensorPart(name, (rows, num_columns), expert, place * rows)
            yield f"{fused['experts']}.{expert}.{projection}.weight", part


def _our_name(name: str) -> str:
    found = _MIXTRAL.fullmatch(name)
    if found is None:
        return name
    *expert, last = found["rest"].split(".")
    return ".".join((found["layer"], "mlp", *expert, _MIXTRAL_PROJECTIONS.get(last, last), "weight"))
