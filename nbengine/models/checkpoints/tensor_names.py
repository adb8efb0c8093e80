"""The places where one tensor of a file holds several of ours; free of torch.

Our names of experts are those of Qwen's files on the hub: `mlp.gate.weight` is the router,
`mlp.experts.3.gate_proj.weight` the gate of expert 3. transformers 5, asked not to restore the original format, saves
all experts of a layer as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbengine.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

_FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)")
_NUM_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The place of one of our tensors in a file: the first `shape[0]` rows from `first_row` on, or of these every
    `row_step`th, of the tensor `name`, or of an expert's part of it."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0
    is_transposed: bool = False
    """True if the file's tensor has the last two dimensions the other way round."""
    row_step: int = 1

    def index(self, index: tuple[slice, ...]) -> tuple[int | slice, ...]:
        """Return the file's index of what has the index `index` in our tensor, and of the rows between; `taken` takes
        it from there."""
        if not index:
            return ()
        rows, *columns = index
        start, stop, _ = rows.indices(self.shape[0])
        first, step = self.first_row + start * self.row_step, self.row_step
        place = [slice(first, first + max(0, (stop - start - 1) * step + 1)), *columns]
        if self.is_transposed:
            place = [*place[1:], *[slice(None)] * (len(self.shape) - len(index)), place[0]]
        return tuple(place) if self.expert is None else (self.expert, *place)

    def taken(self, found: Tensor) -> Tensor:
        """Return our part of what a file has at an index of `index`."""
        ours = found.transpose(-1, -2) if self.is_transposed else found
        return ours if self.row_step == 1 else ours[:: self.row_step]


COMPUTED = (".rotary_emb.inv_freq", "embeddings.position_ids")
"""The endings of tensors that old checkpoints carry although they follow from the configuration."""


def plain_parts(our_name: str, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, TensorPart]]:
    """Yield what the tensor `name` of a file holds, which is ours of the name `our_name` or all experts of a layer;
    nothing for one that follows from the configuration."""
    if our_name.endswith(COMPUTED):
        return
    fused = _FUSED.fullmatch(our_name)
    if fused is None or len(shape) != _NUM_DIMENSIONS:
        yield our_name, TensorPart(name, shape)
        return
    num_experts, num_rows, num_columns = shape
    projections = ["down_proj"] if fused["projection"] == "down_proj" else ["gate_proj", "up_proj"]
    rows = num_rows // len(projections)
    for expert in range(num_experts):
        for place, projection in enumerate(projections):
            part = TensorPart(name, (rows, num_columns), expert, place * rows)
            yield f"{fused['experts']}.{expert}.{projection}.weight", part


def encoder_parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, TensorPart]]:
    """Yield what a tensor of an encoder's file holds."""
    return plain_parts(name, name, shape)


def stacked_parts(
    name: str, shape: tuple[int, ...], projections: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, TensorPart]]:
    """Yield the projections whose rows, as many as each says, a matrix or bias of a file has one after the other;
    they take the place of the last part but one of the name.

    Raises:
        ModelLoadError: these are not the rows that the tensor has.
    """
    if sum(rows for _, rows in projections) != shape[0]:
        wanted = " + ".join(f"{rows} of {projection}" for projection, rows in projections)
        raise ModelLoadError(f"tensor {name} has {shape[0]} rows, the configuration asks for {wanted}")
    *before, _, kind = name.split(".")
    first = 0
    for projection, rows in projections:
        part = TensorPart(name, (rows, *shape[1:]), None, first)
        yield ".".join((*before, projection, kind)), part
        first += rows
