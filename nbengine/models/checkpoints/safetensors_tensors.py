"""The tensors of safetensors files as weights of a model: as they are, or rounded while they are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nbengine.kernels.quantized import SPAN, Format, pack, values
from nbengine.models.checkpoints.filling import check_scales, chunks_of, ranges_of, whole_spans
from nbengine.models.checkpoints.rounding import rounded, rounded_format
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.layers.weights import WeightSlot

Read = Callable[[str, tuple[int | slice, ...]], Tensor]
"""Reads a part of a tensor, by the tensor's name in its file."""
_NEVER_ROUNDED = (".mlp.gate.weight", ".shared_expert_gate.weight", ".self_attn.kv_b_proj.weight")
"""The matrices that choose experts: small ones, whose errors would send tokens to other experts; and those from latents
to keys and values, which are held dense."""


class StoredTensor(Protocol):
    """A weight of the model as files have it."""

    @property
    def name(self) -> str:
        """Return the name of the tensor, or of the first of several, in its file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the weight."""

    @property
    def form(self) -> Format | None:
        """Return the format in which the weight may stay quantised; None: it has to be dense."""

    def num_bytes(self, slot: WeightSlot) -> int:
        """Count the bytes of the values that a slot takes."""

    def fill(self, slot: WeightSlot, read: Read) -> None:
        """Fill a slot, which is dense or has the format `form`.

        Raises:
            ModelLoadError: the weight is corrupt; the message names it.
        """


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor of floating-point numbers."""

    part: TensorPart
    element_bytes: int

    form = None

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
        return math.prod(slot.tensor.shape) * self.element_bytes

    def fill(self, slot: WeightSlot, read: Read) -> None:
        """See `StoredTensor.fill`."""
        slot.tensor.copy_(self.part.taken(read(self.part.name, self.part.index(slot.index))))
        if slot.added:
            slot.tensor.add_(slot.added)


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix of floating-point numbers that is rounded to `bits` a number while it is loaded."""

    plain: PlainTensor
    bits: int

    @property
    def name(self) -> str:
        """See `StoredTensor.name`."""
        return self.plain.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredTensor.shape`."""
        return self.plain.shape

    @property
    def form(self) -> Format:
        """See `StoredTensor.form`."""
        return rounded_format(self.bits)

    def num_bytes(self, slot: WeightSlot) -> int:
        """See `StoredTensor.num_bytes`."""
        return math.prod(map(len, self._ranges(slot))) * self.plain.element_bytes

    def fill(self, slot: WeightSlot, read: Read) -> None:
        """See `StoredTensor.fill`; a dense slot gets the rounded values, too."""
        _, columns = self._ranges(slot)
        skip = ranges_of(slot)[1].start - columns.start
        part = self.plain.part
        for rows, target in chunks_of(slot):
            index = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
            parts = rounded(self.bits, part.taken(read(part.name, part.index(index))))
            check_scales(
                parts, f"tensor {part.name} has values that are not finite, or too large to be rounded"
            )
            if slot.form is not None:
                target.copy_(pack(self.form, parts))
            else:
                target.copy_(values(self.form, parts)[:, skip : skip + target.shape[1]])

    def _ranges(self, slot: WeightSlot) -> tuple[range, range]:
        rows, columns = ranges_of(slot)
        return rows, whole_spans(columns, self.shape[1])


def may_be_rounded(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a weight, by our name, is a matrix that can be rounded."""
    return len(shape) == 2 and shape[1] % SPAN == 0 and not name.endswith(_NEVER_ROUNDED)
