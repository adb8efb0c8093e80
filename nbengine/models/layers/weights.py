"""The weight matrices of a model's blocks: dense, or quantised as the checkpoint has them.

A `Place` says where a block's weights lie and, by the checkpoint's names, which of them stay quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.kernels.dense_kernels import DenseProducts, select_dense
from nbengine.kernels.quantized import LANES, Format, dense
from nbengine.kernels.quantized_kernels import QuantizedProducts
from nbengine.kernels.quantized_parts import cut
from nbengine.models.layers.memory import WeightMemory


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """The place to which a tensor of the checkpoint goes: all of it, or the part that a rank holds.

    The part has, of the checkpoint's tensor of `full_shape`, the indices from `start` on along the dimension
    `dim`, and all along the others; with `dim` None it is all of it. `tensor` takes the part, dense or, with
    `form`, packed (`nbengine.kernels.quantized.pack`).
    """

    tensor: Tensor
    full_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    form: Format | None = None
    rows: int = 0
    """The rows of a packed part, whose last tile may have more."""
    added: float = 0.0
    """The number that is added to those of safetensors files; GGUF files have it in theirs."""

    @classmethod
    def whole(cls, tensor: Tensor) -> WeightSlot:
        """Make a slot for all of a checkpoint's tensor."""
        return cls(tensor, tuple(tensor.shape))

    @property
    def size(self) -> int:
        """Return the length of the part along `dim`."""
        assert self.dim is not None
        if self.form is None:
            return self.tensor.shape[self.dim]
        return self.rows if self.dim == 0 else self.tensor.shape[1] * self.form.columns

    @property
    def index(self) -> tuple[slice, ...]:
        """Return the part of the checkpoint's tensor, for indexing it."""
        if self.dim is None:
            return (slice(None),) * len(self.full_shape)
        return (*[slice(None)] * self.dim, slice(self.start, self.start + self.size))

    def copy_from(self, other: WeightSlot) -> bool:
        """Copy this part from `other`, a part of the same tensor of the checkpoint; return False unless `other`
        has all of it, and has it quantised if this part is."""
        if self.dim is None:
            return False
        offset, size = self.start - other.start, self.size
        if offset < 0 or offset + size > other.size or (self.form and self.form is not other.form):
            return False
        if other.form is None:
            self.tensor.copy_(other.tensor.narrow(self.dim, offset, size))
            return True
        # A dense part's columns may be no whole cells.
        unit = 1 if self.dim == 0 else other.form.columns
        taken = range(offset // unit * unit, -(-(offset + size) // unit) * unit)
        found = cut(other.form, other.tensor, other.rows, self.dim, taken)
        if self.form is None:
            found = dense(other.form, found, len(taken) if self.dim == 0 else other.rows)
            found = found.narrow(self.dim, offset - taken.start, size)
        self.tensor.copy_(found)
        return True


Slots = Iterator[tuple[str, WeightSlot]]


class Weight(Protocol):
    """A matrix [rows, columns], or the rows of it that a rank has."""

    @property
    def tensor(self) -> Tensor:
        """Return the memory of the matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of rows and columns."""

    @property
    def is_operand(self) -> bool:
        """Return whether the products with it are compiled functions, which a prepared step can call."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ matrix.T + bias, [T, rows], for x [T, columns]."""

    def take(self, ids: Tensor) -> Tensor:
        """Return the rows with the numbers `ids`, int64 [T], which exist, in new memory."""

    def slot(
        self, full_shape: tuple[int, ...], dim: int, start: int, rows: range | None = None
    ) -> WeightSlot:
        """Return the slot of the matrix, or of `rows` of it, as a part of a checkpoint's tensor; see
        `WeightSlot`."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DenseWeight:
    """A matrix in the model's data type. Its products may round rows of another type to it."""

    tensor: Tensor
    products: DenseProducts | None = None
    """The products with it; None: torch's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight.shape`."""
        return tuple(self.tensor.shape)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weight.linear`."""
        if self.products is not None:
            return self.products.linear(x, self.tensor, bias)
        if x.dtype is self.tensor.dtype:
            return F.linear(x, self.tensor, bias)
        out = F.linear(x.to(self.tensor.dtype), self.tensor).to(x.dtype)
        return out if bias is None else out.add_(bias)

    def take(self, ids: Tensor) -> Tensor:
        """See `Weight.take`."""
        return F.embedding(ids, self.tensor)

    def slot(
        self, full_shape: tuple[int, ...], dim: int, start: int, rows: range | None = None
    ) -> WeightSlot:
        """See `Weight.slot`."""
        part = self.tensor if rows is None else self.tensor[rows.start : rows.stop]
        return WeightSlot(part, full_shape, dim, start)

    @property
    def is_operand(self) -> bool:
        """See `Weight.is_operand`."""
        return self.products is not None and self.products.are_compiled


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedWeight:
    """A quantised matrix: `tensor` is [tiles, cells, bytes] uint8 in the format `form`. What is multiplied with it is
    rounded to `activation_bits`, 8 or 16."""

    tensor: Tensor
    form: Format
    rows: int
    products: QuantizedProducts
    activation_bits: int = 8

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight.shape`."""
        return self.rows, self.tensor.shape[1] * self.form.columns

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weight.linear`."""
        out = self.products.linear(x, self.form, self.tensor, self.rows, self.activation_bits)
        return out if bias is None else out.add_(bias)

    def take(self, ids: Tensor) -> Tensor:
        """See `Weight.take`."""
        return self.products.rows(ids, self.form, self.tensor)

    def slot(
        self, full_shape: tuple[int, ...], dim: int, start: int, rows: range | None = None
    ) -> WeightSlot:
        """See `Weight.slot`; `rows` begin with a tile."""
        rows = range(self.rows) if rows is None else rows
        tiles = self.tensor[rows.start // LANES : -(-rows.stop // LANES)]
        return WeightSlot(tiles, full_shape, dim, start, self.form, len(rows))

    @property
    def is_operand(self) -> bool:
        """See `Weight.is_operand`: all products with quantised weights are."""
        return True


@dataclass(frozen=True, slots=True)
class PackedFormats:
    """The weights of a checkpoint that stay quantised: their formats, by name, and the products with them, whose input
    is rounded to `activation_bits`. With `is_wide`, products with the others round their input by themselves, too."""

    formats: Mapping[str, Format] = field(default_factory=dict)
    products: QuantizedProducts | None = None
    is_wide: bool = False
    activation_bits: int = 8

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of what goes from layer to layer in a model of type `dtype`: float32 where products round
        their input by themselves."""
        return torch.float32 if self.formats or self.is_wide else dtype


ALL_DENSE = PackedFormats()


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a block's weights: the data type of dense matrices, their device, the memory there (None:
    each tensor has its own), and their names in the checkpoint, which begin with `name`."""

    dtype: torch.dtype
    device: torch.device
    packed: PackedFormats = ALL_DENSE
    name: str = ""
    memory: WeightMemory | None = None

    def inside(self, name: str) -> Place:
        """Return the place of a block within this one."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def apart(self) -> Place:
        """Return the place of weights that may be given up before the others of their model."""
        return replace(self, memory=None if self.memory is None else self.memory.apart())

    def of_vocabulary(self) -> Place:
        """Return this place for rows of a vocabulary: their products are the logits, in which what the rounding of
        activations to 8 bits adds would be seen most."""
        return replace(self, packed=replace(self.packed, activation_bits=16))

    def without_memory(self) -> Place:
        """Return this place for weights that get their own memory."""
        return replace(self, memory=None)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Return the type of the numbers that a block takes and gives."""
        return self.packed.hidden_dtype(self.dtype)

    @property
    def is_exact(self) -> bool:
        """Return whether a block's bits are to be those of transformers."""
        return self.dtype is torch.float32 and not self.packed.formats

    @property
    def is_wide(self) -> bool:
        """Return whether hidden states are float32, and products round them."""
        return self.hidden_dtype is torch.float32 and not self.is_exact

    def vector(self, size: int) -> Tensor:
        """Allocate a bias, or the weight of a norm."""
        return self._empty((size,), self.hidden_dtype)

    def wide_vector(self, size: int) -> Tensor:
        """Allocate the weight of a norm that is computed in float32."""
        return self._empty((size,), torch.float32)

    def empty(self, *shape: int) -> Tensor:
        """Allocate dense matrices."""
        return self._empty(shape, self.dtype)

    def format(self, columns: int, first_column: int = 0) -> Format | None:
        """Return the format of the weight with this name; None: it is dense, or these columns of it are no
        whole cells."""
        form = self.packed.formats.get(f"{self.name}.weight")
        if form is None or columns % form.columns or first_column % form.columns:
            return None
        return form

    def matrix(self, rows: int, columns: int, form: Format | None) -> Weight:
        """Allocate a matrix."""
        products = self.packed.products
        if form is None or products is None:
            dense = select_dense(self.device, self.dtype)
            if dense is not None:
                dense.warm_up(self.dtype, self.hidden_dtype)
            return DenseWeight(self.empty(rows, columns), dense)
        shape = form.data_shape(rows, columns)
        return PackedWeight(
            self._empty(shape, torch.uint8), form, rows, products, self.packed.activation_bits
        )

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.memory is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self.memory.empty(shape, dtype)
