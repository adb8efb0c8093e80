"""The matrices of AWQ and GPTQ checkpoints: levels of 4 or 8 bits, with a scale and a zero point a group.

A weight is scale * (level - zero point). The files have it transposed, `in_features` first. AWQ (version
"gemm") packs 8 neighbouring outputs into a 32-bit word, even ones in its lower half; GPTQ packs neighbouring
inputs, the first one lowest. Zero points are packed along the outputs by both, in the same orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import SPAN, ZERO_POINTS, Format, Levels, pack
from nbengine.models.checkpoints.filling import check_scales, chunks_of, ranges_of
from nbengine.models.checkpoints.safetensors_tensors import Read
from nbengine.models.configs.quantization_config import WORD_BITS, ZeroPoints
from nbengine.models.layers.weights import WeightSlot

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""The endings of the names of a matrix's tensors; the last one is there with GPTQ alone."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places in a word of eight neighbouring outputs."""
_FLOATS = ("F16", "BF16", "F32")

Headers = Mapping[str, tuple[tuple[int, ...], str]]
"""The shape and the type of each of a matrix's tensors, by the endings of their names."""


@dataclass(frozen=True, slots=True, eq=False)
class ZeroPointMatrix:
    """A matrix of an AWQ or GPTQ checkpoint, or the rows of it from `first_row` on; `module` has it in its files.
    `groups` has the number of each column's group, where they are not runs of columns."""

    module: str
    kind: ZeroPoints
    shape: tuple[int, int]
    form: Format | None
    groups: Tensor | None = None
    first_row: int = 0

    @classmethod
    def of(cls, module: str, kind: ZeroPoints, headers: Headers, read: Read) -> ZeroPointMatrix:
        """Make the matrix of a module; its tensors' sizes are checked, and `g_idx` is read.

        Raises:
            ModelLoadError: a tensor is missing, or has the wrong type, shape or content; the message names it.
        """
        shape, num_groups = _checked_shape(module, kind, headers)
        groups = _column_groups(module, kind, headers, read, shape[1], num_groups)
        can_stay = groups is None and shape[1] % SPAN == 0 and (kind.group_size or SPAN) % SPAN == 0
        _, scale_type = headers["scales"]
        form = ZERO_POINTS[kind.bits] if can_stay and scale_type == "F16" else None
        return cls(module, kind, shape, form, groups)

    def part(self, first_row: int, num_rows: int) -> ZeroPointMatrix:
        """Return `num_rows` rows of the matrix, from `first_row` on, which is one of several projections in it."""
        return replace(self, shape=(num_rows, self.shape[1]), first_row=first_row)

    @property
    def name(self) -> str:
        """See `StoredTensor.name`."""
        return f"{self.module}.qweight"

    def num_bytes(self, slot: WeightSlot) -> int:
        """See `StoredTensor.num_bytes`."""
        rows, columns = ranges_of(slot)
        return len(rows) * len(columns) * self.kind.bits // 8

    def fill(self, slot: WeightSlot, read: Read) -> None:
        """See `StoredTensor.fill`."""
        _, columns = ranges_of(slot)
        for rows, target in chunks_of(slot):
            parts = self._parts(rows, columns, read)
            check_scales(parts, f"corrupt: tensor {self.module}.scales has a scale that is not finite")
            groups = self._groups_of(columns)
            assert parts.minima is not None
            if slot.form is not None:
                of_spans = groups[::SPAN]
                by_span = (parts.scales[:, of_spans], parts.minima[:, of_spans])
                target.copy_(pack(slot.form, Levels(parts.levels, *by_span)))
            else:
                levels = parts.levels.float() - parts.minima.float()[:, groups]
                target.copy_(levels.mul_(parts.scales.float()[:, groups]))

    def _parts(self, rows: range, columns: range, read: Read) -> Levels:
        """Read levels [rows, columns], and of all groups, [rows, groups], scales and zero points."""
        rows = range(rows.start + self.first_row, rows.stop + self.first_row)
        every, wanted = slice(None), slice(rows.start, rows.stop)
        scales = read(f"{self.module}.scales", (every, wanted)).t().contiguous()
        words = read(f"{self.module}.qzeros", (every, self._words(rows)))
        if self.kind.zero_offset:
            # The words are added to, as the writers subtract from them: a carry goes into the next field.
            ones = sum(1 << place for place in range(0, WORD_BITS, self.kind.bits))
            words = words + ones * self.kind.zero_offset
        zeros = self._fields(words, rows)
        if self.kind.method == "awq":
            index = (slice(columns.start, columns.stop), self._words(rows))
            levels = self._fields(read(self.name, index), rows).t()
        else:
            words = read(self.name, (self._words(columns), wanted))
            levels = self._fields(words.t(), columns)
        return Levels(levels.contiguous(), scales, zeros.t().contiguous())

    def _fields(self, words: Tensor, wanted: range) -> Tensor:
        """Return the fields with the numbers `wanted`, [m, wanted], of words [m, n], the first of which has
        the first of the fields."""
        per_word, bits = self.kind.per_word, self.kind.bits
        places = _AWQ_PLACES if self.kind.method == "awq" else range(per_word)
        shifts = torch.tensor([place * bits for place in places], dtype=torch.int32)
        fields: Tensor = ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)
        first = wanted.start % per_word
        return fields[:, first : first + len(wanted)]

    def _words(self, wanted: range) -> slice:
        per_word = self.kind.per_word
        return slice(wanted.start // per_word, -(-wanted.stop // per_word))

    def _groups_of(self, columns: range) -> Tensor:
        """Return the number of each column's group, [columns] int64."""
        if self.groups is not None:
            return self.groups[columns.start : columns.stop]
        return torch.arange(columns.start, columns.stop) // (self.kind.group_size or self.shape[1])


def _checked_shape(module: str, kind: ZeroPoints, headers: Headers) -> tuple[tuple[int, int], int]:
    """Return the rows and columns of a matrix, and the number of its groups."""
    for part in PARTS[:3]:
        if part not in headers:
            raise ModelLoadError(f"tensor {module}.{part} is missing")
        (shape, found), types = headers[part], _FLOATS if part == "scales" else ("I32",)
        if found not in types or len(shape) != 2 or 0 in shape:
            raise ModelLoadError(
                f"tensor {module}.{part} has the type {found} and the shape {list(shape)}, "
                f"not two dimensions of {' or '.join(types)}"
            )
    per_word = kind.per_word
    packed_rows, packed_columns = headers["qweight"][0]
    rows, columns = packed_columns * per_word, packed_rows
    if kind.method == "gptq":
        rows, columns = packed_columns, packed_rows * per_word
    num_groups = -(-columns // (kind.group_size or columns))
    expected = {"scales": (num_groups, rows), "qzeros": (num_groups, -(-rows // per_word))}
    for part, shape in expected.items():
        if headers[part][0] != shape:
            raise ModelLoadError(
                f"tensor {module}.{part} has the shape {list(headers[part][0])}, but with {kind.bits} bits and "
                f"groups of {kind.group_size or columns} {module}.qweight asks for {list(shape)}"
            )
    return (rows, columns), num_groups


def _column_groups(
    module: str, kind: ZeroPoints, headers: Headers, read: Read, num_columns: int, num_groups: int
) -> Tensor | None:
    """Return the group of each column, [columns] int64; None: groups are runs of columns."""
    name = f"{module}.g_idx"
    if kind.method == "awq" or num_groups == 1:
        return None
    if "g_idx" not in headers:
        if kind.act_order:
            raise ModelLoadError(f"tensor {name} is missing, which desc_act (act-order) asks for")
        return None
    shape, found = headers["g_idx"]
    if shape != (num_columns,) or found not in ("I32", "I64"):
        raise ModelLoadError(
            f"tensor {name} has the type {found} and the shape {list(shape)}, not {[num_columns]} of I32"
        )
    groups = read(name, (slice(None),)).long()
    if torch.equal(groups, torch.arange(num_columns) // (kind.group_size or num_columns)):
        return None
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ModelLoadError(f"corrupt: tensor {name} names groups that are not from 0 to {num_groups - 1}")
    return groups
