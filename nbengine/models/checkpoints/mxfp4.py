"""Experts in MXFP4: numbers of four bits, 32 of which share an exponent (Open Compute Project, Microscaling Formats)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.kernels.dispatch import select_block_packer
from nbengine.kernels.quantized import FORMATS, SPAN, Levels, pack, values
from nbengine.models.checkpoints.filling import check_scales, chunks_of, ranges_of, whole_spans
from nbengine.models.checkpoints.safetensors_tensors import Read
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.layers.weights import WeightSlot

PARTS = ("_blocks", "_scales")
"""The endings of the names of a matrix's tensors: two numbers a byte, the first in the lower half, and exponents."""

_BYTES = SPAN // 2
_FORM = FORMATS["mxfp4"]


def shape_of(base: str, headers: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[int, int, int]:
    """Read the numbers of experts, rows and columns off the headers of the two tensors, shape and type by ending.

    Raises:
        ModelLoadError: one is missing, or they do not fit together.
    """
    missing = [f"{base}{part}" for part in PARTS if part not in headers]
    if missing:
        raise ModelLoadError(f"tensor {missing[0]} is missing")
    (blocks, block_kind), (scales, scale_kind) = (headers[part] for part in PARTS)
    fits = len(blocks) == 4 and blocks == (*scales, _BYTES)
    if not fits or (block_kind, scale_kind) != ("U8", "U8"):
        raise ModelLoadError(
            f"tensor {base}_blocks has the type {block_kind} and the shape {list(blocks)}, {base}_scales "
            f"{scale_kind} and {list(scales)}; they are U8, the first with {_BYTES} bytes for each of the second"
        )
    experts, rows, groups = scales
    return experts, rows, groups * SPAN


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A projection of one expert, `part` of the tensors of all experts of a layer, whose names begin with `base`."""

    base: str
    part: TensorPart

    form = _FORM

    @property
    def name(self) -> str:
        """See `StoredTensor.name`."""
        return f"{self.base}_blocks"

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredTensor.shape`."""
        return self.part.shape

    def num_bytes(self, slot: WeightSlot) -> int:
        """See `StoredTensor.num_bytes`."""
        rows, columns = ranges_of(slot)
        return len(rows) * len(whole_spans(columns, self.shape[1])) // SPAN * (_BYTES + 1)

    def fill(self, slot: WeightSlot, read: Read) -> None:
        """See `StoredTensor.fill`."""
        _, columns = ranges_of(slot)
        held = whole_spans(columns, self.shape[1])
        groups, skip = slice(held.start // SPAN, held.stop // SPAN), columns.start - held.start
        corrupt = f"corrupt: tensor {self.base}_scales has an exponent that stands for no number"
        packer = None if slot.form is None else select_block_packer(slot.tensor.device)
        for rows, target in chunks_of(slot):
            index = self.part.index((slice(rows.start, rows.stop), groups))
            blocks, scales = (self.part.taken(read(f"{self.base}{part}", index)) for part in PARTS)
            found = _block_order(blocks)
            if slot.form is not None and packer is not None:
                whole = torch.cat((scales[..., None], found), dim=-1).flatten(1)
                if not packer.pack(slot.form, whole.numpy(), target, None):
                    raise ModelLoadError(corrupt)
                continue
            levels = torch.cat((found & 15, found >> 4), dim=-1).flatten(1)
            parts = Levels(levels.to(target.device), scales.to(target.device))
            check_scales(parts, corrupt)
            if slot.form is not None:
                target.copy_(pack(slot.form, parts))
            else:
                target.copy_(values(_FORM, parts)[:, skip : skip + len(columns)])


def _block_order(blocks: Tensor) -> Tensor:
    """Turn bytes [..., 16], each of two neighbouring numbers, into those of GGUF, in whose lower halves the first 16
    numbers are."""
    first, second = blocks[..., : _BYTES // 2], blocks[..., _BYTES // 2 :]
    found = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    found[..., ::2] = (first & 15) | (second << 4)
    found[..., 1::2] = (first >> 4) | (second & 0xF0)
    return found
