"""Matrices of 8-bit floating-point numbers, whose blocks have a scale each (DeepSeek-V3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.filling import chunks_of, ranges_of
from nbengine.models.checkpoints.safetensors_tensors import Read
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.quantization_config import Fp8Blocks
from nbengine.models.layers.weights import WeightSlot

SCALES = "_scale_inv"
"""The ending that the name of a matrix has for its scales."""
KIND, SCALE_KINDS = "F8_E4M3", ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix whose numbers are multiplied by the scale of their block while it is loaded; a slot gets the products."""

    part: TensorPart
    blocks: Fp8Blocks

    form = None

    @classmethod
    def of(
        cls,
        part: TensorPart,
        shape: tuple[int, ...],
        scales: tuple[tuple[int, ...], str] | None,
        blocks: Fp8Blocks,
    ) -> Fp8Matrix:
        """Make the matrix that is a part of a file's tensor of this shape, with the shape and type of its scales.

        Raises:
            ModelLoadError: there are no scales, or they do not fit.
        """
        if len(shape) != 2 or part.expert is not None or part.is_transposed:
            raise ModelLoadError(f"tensor {part.name} is {KIND} and no plain matrix, which is not supported")
        wanted = (-(-shape[0] // blocks.rows), -(-shape[1] // blocks.columns))
        if scales is None or scales[0] != wanted or scales[1] not in SCALE_KINDS:
            found = (
                "is missing"
                if scales is None
                else f"has the type {scales[1]} and the shape {list(scales[0])}"
            )
            raise ModelLoadError(
                f"tensor {part.name}{SCALES} {found}; it has a floating-point number for each block of {blocks.rows} x "
                f"{blocks.columns}, {list(wanted)}"
            )
        return cls(part, blocks)

    @property
    def name(self) -> str:
        """See `StoredTensor.name`."""
        return self.part.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredTensor.shape`."""
        return self.part.shape

    def num_bytes(self, slot: WeightSlot) -> int:
        """See `StoredTensor.num_bytes`."""
        return math.prod(slot.tensor.shape)

    def fill(self, slot: WeightSlot, read: Read) -> None:
        """See `StoredTensor.fill`; some rows at a time, so that little memory is taken."""
        _, columns = ranges_of(slot)
        for rows, target in chunks_of(slot):
            first = self.part.first_row + rows.start
            found = read(self.name, (slice(first, first + len(rows)), _slice(columns))).float()
            places = range(first, first + len(rows))
            scales = read(
                f"{self.name}{SCALES}",
                (_blocks(places, self.blocks.rows), _blocks(columns, self.blocks.columns)),
            ).float()
            scales = _spread(_spread(scales, 0, places, self.blocks.rows), 1, columns, self.blocks.columns)
            if not found.mul_(scales).isfinite().all():
                raise ModelLoadError(f"corrupt: {self.name} or its scales have a number that is not finite")
            target.copy_(found)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _blocks(numbers: range, each: int) -> slice:
    return slice(numbers.start // each, -(-numbers.stop // each))


def _spread(scales: Tensor, dim: int, numbers: range, each: int) -> Tensor:
    """Return the scale of each of the numbers along a dimension, for the scales of the blocks that have them."""
    return scales.repeat_interleave(each, dim).narrow(dim, numbers.start % each, len(numbers))
