"""This module loads weights from a GGUF file into a decoder's weight slots."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.kernels.dispatch import select_block_packer
from nbengine.kernels.quantized import LANES, Format, pack
from nbengine.models.checkpoints.filling import check_scales, fill_slots
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_architectures import ARCHITECTURES
from nbengine.models.checkpoints.gguf_dequant import dequantize
from nbengine.models.checkpoints.gguf_latent import LatentTensor
from nbengine.models.checkpoints.gguf_layouts import Run, StoredPart
from nbengine.models.checkpoints.gguf_levels import format_of, levels_of
from nbengine.models.checkpoints.gguf_names import our_parts
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.layers.weights import WeightSlot

_PIECE_BYTES = 1 << 20
"""Bytes of a file that a thread reads and packs at a time."""


def dense_types(path: Path) -> set[str]:
    """Return the names of the types of a file's matrices that do not stay quantised.

    Raises:
        ModelLoadError: the file is corrupt.
    """
    tensors = read_header(path).tensors.values()
    return {each.type.name for each in tensors if len(each.shape) > 1 and format_of(each.type) is None}


class GGUFWeights:
    """The tensors of one GGUF file under Hugging Face's names.

    Raises:
        ModelLoadError: the file is corrupt or holds a tensor that no decoder here uses.
    """

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self.path = path
        header = read_header(path)
        known = ARCHITECTURES.get(header.architecture)
        try:
            self._parts = our_parts(header, config, permuted=known is not None and known.permuted)
        except ModelLoadError as error:
            raise error if str(path) in str(error) else ModelLoadError(f"{path}: {error}") from error
        self.shapes: Mapping[str, tuple[int, ...]] = {name: part.shape for name, part in self._parts.items()}
        self.formats: Mapping[str, Format] = {
            name: form
            for name, part in self._parts.items()
            if len(part.shape) == 2 and (form := format_of(part.tensor.type)) is not None
        }
        """The formats in which matrices may stay quantised."""

    def num_bytes(self, slots: Mapping[str, WeightSlot]) -> int:
        """Count the bytes that `load` reads for these slots."""
        return sum(piece.region.num_bytes for item in slots.items() for piece in self._pieces(*item))

    def load(self, slots: Mapping[str, WeightSlot], on_bytes: Callable[[int], None]) -> None:
        """Fill each slot with the part of the named tensor that it holds, as it is or dequantised; shapes have
        been compared already.

        Raises:
            ModelLoadError: the file cannot be read, a tensor is corrupt, or a type cannot be dequantised.
        """
        pieces = [piece for name, slot in slots.items() for piece in self._pieces(name, slot)]
        # Disks are fastest from front to back.
        pieces.sort(key=lambda piece: piece.region.first_byte)
        for form, device in {(slot.form, slot.tensor.device) for slot in slots.values()}:
            packer = select_block_packer(device)
            if form is not None and packer is not None:
                packer.warm_up(form)
        memory = _Memory(max((piece.region.num_bytes for piece in pieces), default=0))
        fill_slots(pieces, lambda piece: self._load_piece(piece, memory), on_bytes)

    def _pieces(self, name: str, slot: WeightSlot) -> Iterator[_Piece]:
        """Cut what a slot takes into pieces that stay in a processor's cache from reading to packing."""
        part = self._parts[name]
        if isinstance(part.tensor, LatentTensor):
            for source, rows, is_transposed in part.tensor.parts(slot.start, slot.size):
                matrix = StoredPart(source, source.shape)
                whole = _Region.of(matrix, WeightSlot(slot.tensor, source.shape))
                yield _Piece(name, whole, slot.tensor[rows], None, matrix, None, is_transposed)
            return
        region, columns = _Region.of(part, slot), _columns_of(part, slot)
        if len(slot.full_shape) != 2:
            yield _Piece(name, region, slot.tensor, slot.form, part, columns)
            return
        step = math.lcm(1 if slot.form is None else LANES, part.head_rows or 1)
        each = max(1, _PIECE_BYTES // region.run_bytes // step) * step
        for first in range(0, region.num_rows, each):
            last = min(first + each, region.num_rows)
            place = slice(first, last) if slot.form is None else slice(first // LANES, -(-last // LANES))
            yield _Piece(name, region.part(first, last), slot.tensor[place], slot.form, part, columns)

    def _load_piece(self, piece: _Piece, memory: _Memory) -> int:
        region, target, source = piece.region, piece.target, piece.part.tensor
        raw = memory.take(region.num_bytes)
        _read(self.path, source.name, region, raw)
        if piece.form is not None:
            self._pack(piece, piece.form, raw.reshape(region.num_rows, -1))
            return region.num_bytes
        values = dequantize(torch.from_numpy(raw).to(target.device), source.type).view(region.num_rows, -1)
        if GGML_QUANT_SIZES[source.type][0] > 1:
            self._check_numbers(piece.name, values, target.dtype)
        if piece.columns is not None:
            values = values[:, torch.from_numpy(piece.columns).to(target.device)]
        values = values[:, region.skip : region.skip + region.num_columns]
        if piece.is_transposed:
            target.copy_(values.T)
            return region.num_bytes
        values = values.reshape(target.shape)
        order = piece.order(target.shape[0])
        if piece.part.is_decay:
            values = self._logarithms(source.name, values)
        target.copy_(values if order is None else values[torch.from_numpy(order).to(target.device)])
        return region.num_bytes

    def _check_numbers(self, name: str, values: Tensor, dtype: torch.dtype) -> None:
        """Refuse the values of blocks that are no numbers, or none in the type that is to hold them."""
        if not values.isfinite().all():
            raise ModelLoadError(self._not_finite(name))
        if values.abs().max() > torch.finfo(dtype).max:
            held = str(dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{self.path}: tensor {name} has numbers beyond the largest of {held}; dtype='float32' holds them"
            )

    def _not_finite(self, name: str) -> str:
        return f"{self.path}: corrupt: tensor {name} has a scale that is not finite"

    def _logarithms(self, name: str, values: Tensor) -> Tensor:
        """Return the numbers of which the file has minus the exponentials."""
        found = values.neg().log()
        if found.isnan().any():
            raise ModelLoadError(f"{self.path}: corrupt: tensor {name} has a value that is not negative")
        return found

    def _pack(self, piece: _Piece, form: Format, blocks: NDArray[np.uint8]) -> None:
        name, target, found = piece.name, piece.target, piece.part.tensor.type
        if format_of(found) is not form:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has the type {found.name}, {form.name} was loaded"
            )
        message = self._not_finite(name)
        if piece.columns is not None:
            block_size, block_bytes = GGML_QUANT_SIZES[found]
            wanted = piece.columns[::block_size] // block_size
            blocks = blocks.reshape(len(blocks), -1, block_bytes)[:, wanted].reshape(len(blocks), -1)
        order = piece.order(len(blocks))
        packer = select_block_packer(target.device)
        if packer is None:
            raw = torch.from_numpy(blocks if order is None else blocks[order]).to(target.device)
            parts = levels_of(raw.view(-1), found, len(blocks))
            check_scales(parts, message)
            target.copy_(pack(form, parts))
        elif not packer.pack(form, blocks, target, order):
            raise ModelLoadError(message)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a slot's part of a tensor: where they are in the file, and where they go.

    They belong to `part`, and go there as they are or transposed. `columns` has the numbers of those columns that the
    slot takes, where they are not neighbours.
    """

    name: str
    region: _Region
    target: Tensor
    form: Format | None
    part: StoredPart
    columns: NDArray[np.int64] | None
    is_transposed: bool = False

    def order(self, num_rows: int) -> NDArray[np.int64] | None:
        """Return for each row its place in the file; None: rows are in order. The file's rows 2 i and 2 i + 1 of a
        head are i and i + half."""
        if self.part.head_rows is None:
            return None
        places = np.arange(num_rows, dtype=np.int64).reshape(-1, self.part.head_rows // 2, 2)
        return np.ascontiguousarray(places.transpose(0, 2, 1)).reshape(-1)


class _Memory(threading.local):
    """A buffer for each thread, so that what is read is in its processor's cache."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer: NDArray[np.uint8] = np.empty(num_bytes, dtype=np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return the first bytes of it."""
        return self._buffer[:num_bytes]


@dataclass(frozen=True, slots=True)
class _Region:
    """The place of a slot's values in a file: of the rows that begin `stride` bytes apart, from `offset` on, some
    runs of neighbours, and of each row `run_bytes` bytes.

    They are whole quantisation blocks; the slot takes `num_columns` of their values, from `skip` on.
    """

    offset: int
    rows: tuple[Run, ...]
    run_bytes: int
    stride: int
    skip: int
    num_columns: int

    @classmethod
    def of(cls, part: StoredPart, slot: WeightSlot) -> _Region:
        """Find the part of a file's tensor that a slot takes; vectors count as one row."""
        tensor = part.tensor
        *leading, num_columns = tensor.shape
        rows, columns = range(math.prod(leading)), range(num_columns)
        if part.rows is not None:
            rows = range(part.shape[0])
        if slot.dim is not None:
            held = range(slot.start, slot.start + slot.size)
            rows, columns = (rows, held) if slot.dim == len(leading) else (held, columns)
        taken = len(columns)
        if part.column_runs > 1:
            columns = range(num_columns)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
        first = columns.start // block_size
        num_blocks = -(-columns.stop // block_size) - first
        return cls(
            offset=tensor.offset + first * block_bytes,
            rows=((rows.start, len(rows)),) if part.rows is None else part.rows.runs(rows),
            run_bytes=num_blocks * block_bytes,
            stride=num_columns // block_size * block_bytes,
            skip=columns.start - first * block_size,
            num_columns=taken,
        )

    def part(self, first: int, last: int) -> _Region:
        """Return the part with the rows from `first` up to `last`."""
        cut, before = [], 0
        for row, count in self.rows:
            start, stop = max(first - before, 0), min(last - before, count)
            if start < stop:
                cut.append((row + start, stop - start))
            before += count
        return replace(self, rows=tuple(cut))

    @property
    def num_rows(self) -> int:
        """Count the rows."""
        return sum(count for _, count in self.rows)

    @property
    def num_bytes(self) -> int:
        """Count the bytes that have to be read."""
        return self.num_rows * self.run_bytes

    @property
    def first_byte(self) -> int:
        """Return where the first row begins."""
        return self.offset + self.rows[0][0] * self.stride

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and length of what has to be read; rows without a gap between them are one
        run."""
        for first, count in self.rows:
            if self.run_bytes == self.stride:
                yield self.offset + first * self.stride, count * self.stride
                continue
            for row in range(first, first + count):
                yield self.offset + row * self.stride, self.run_bytes


def _columns_of(part: StoredPart, slot: WeightSlot) -> NDArray[np.int64] | None:
    """Return the numbers of the columns that a slot takes where they are not neighbours: its part of each run."""
    if part.column_runs == 1 or slot.dim != 1:
        return None
    runs = np.arange(slot.full_shape[1], dtype=np.int64).reshape(part.column_runs, -1)
    share = slice(slot.start // part.column_runs, (slot.start + slot.size) // part.column_runs)
    return np.ascontiguousarray(runs[:, share]).reshape(-1)


def _read(path: Path, name: str, region: _Region, target: NDArray[np.uint8]) -> None:
    """Read the region's bytes; they are read, not mapped, so that a file cut short meanwhile gives an error, not
    a crash."""
    left = target.data
    try:
        with path.open("rb", buffering=0) as file:
            for offset, length in region.runs():
                if not _fill(file, offset, left[:length]):
                    raise ModelLoadError(f"{path}: truncated in tensor {name!r}")
                left = left[length:]
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def _fill(file: FileIO, offset: int, target: memoryview) -> bool:
    """Read `target` full; return False at the end of the file."""
    file.seek(offset)
    while target:
        count = file.readinto(target)
        if not count:
            return False
        target = target[count:]
    return True
