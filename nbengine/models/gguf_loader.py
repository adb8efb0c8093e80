"""Weights out of a GGUF file into a decoder's weight slots."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.gguf import GGUFHeader, GGUFTensor, read_header
from nbengine.models.gguf_config import ROPE_FACTORS, hf_tensors
from nbengine.models.gguf_dequant import dequantize
from nbengine.models.layers import WeightSlot

_PERMUTED_ARCHITECTURE = "llama"
"""For this one llama.cpp's converter interleaves the rows of the q and k projections (its RoPE pairs
neighbouring dimensions); for the others it keeps Hugging Face's order."""


class GGUFWeights:
    """The tensors of one GGUF file under Hugging Face's names.

    Raises:
        ModelLoadError: the file is corrupt or holds a tensor that no decoder here uses.
    """

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self.path = path
        header = read_header(path)
        self._tensors = _by_hf_name(header)
        permuted = header.architecture == _PERMUTED_ARCHITECTURE
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if permuted else {}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in self._tensors.items()
        }

    def num_bytes(self, slots: Mapping[str, WeightSlot]) -> int:
        """What `load` reads."""
        return sum(_Region.of(self._tensors[name], slot).num_bytes for name, slot in slots.items())

    def load(self, slots: Mapping[str, WeightSlot], on_bytes: Callable[[int], None]) -> None:
        """Dequantise what the slots hold of the named tensors; shapes have been compared already.

        Each tensor is one thread's work, the largest first. Spreading every operation over all threads instead
        would make them wait for each other a few thousand times, which is slow when other processes want the
        cores too.

        Raises:
            ModelLoadError: the file cannot be read, or a type cannot be dequantised.
        """
        regions = {name: _Region.of(self._tensors[name], slot) for name, slot in slots.items()}
        names = sorted(slots, key=lambda name: regions[name].num_bytes, reverse=True)
        with _single_threaded_operations() as num_threads, ThreadPoolExecutor(num_threads) as pool:
            for num_bytes in pool.map(lambda name: self._load_one(name, regions[name], slots[name]), names):
                on_bytes(num_bytes)

    @torch.inference_mode()
    def _load_one(self, name: str, region: _Region, slot: WeightSlot) -> int:
        source, target = self._tensors[name], slot.tensor
        raw = torch.from_numpy(_read(self.path, source.name, region)).to(target.device)
        values = dequantize(raw, source.type).view(region.num_rows, -1)
        values = values[:, region.skip : region.skip + region.num_columns]
        num_heads = self._heads.get(name.split(".")[-2])
        if num_heads is None:
            target.copy_(values.view(target.shape))
        else:
            _copy_unpermuted(values, target, slot.full_shape[0] // num_heads)
        return region.num_bytes


@dataclass(frozen=True, slots=True)
class _Region:
    """Where a file has a slot's values: `num_rows` runs of `run_bytes`, `stride` bytes apart, from `offset` on.

    A run is of whole quantisation blocks; of its values those from `skip` on, `num_columns` of them, are meant.
    """

    offset: int
    num_rows: int
    run_bytes: int
    stride: int
    skip: int
    num_columns: int

    @classmethod
    def of(cls, tensor: GGUFTensor, slot: WeightSlot) -> _Region:
        """Vectors count as one row."""
        *leading, num_columns = tensor.shape
        rows, columns = range(math.prod(leading)), range(num_columns)
        if slot.dim is not None:
            held = range(slot.start, slot.start + slot.tensor.shape[slot.dim])
            rows, columns = (rows, held) if slot.dim == len(leading) else (held, columns)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
        stride = num_columns // block_size * block_bytes
        first = columns.start // block_size
        num_blocks = -(-columns.stop // block_size) - first
        return cls(
            offset=tensor.offset + rows.start * stride + first * block_bytes,
            num_rows=len(rows),
            run_bytes=num_blocks * block_bytes,
            stride=stride,
            skip=columns.start - first * block_size,
            num_columns=len(columns),
        )

    @property
    def num_bytes(self) -> int:
        """What has to be read."""
        return self.num_rows * self.run_bytes

    def runs(self) -> Iterator[tuple[int, int]]:
        """First byte and length of what has to be read; rows without a gap between them are one run."""
        if self.run_bytes == self.stride:
            yield self.offset, self.num_bytes
            return
        for row in range(self.num_rows):
            yield self.offset + row * self.stride, self.run_bytes


@contextlib.contextmanager
def _single_threaded_operations() -> Iterator[int]:
    """Threads started in the block run torch's operations alone; gives how many threads torch used before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def _by_hf_name(header: GGUFHeader) -> dict[str, GGUFTensor]:
    found = {}
    unknown = []
    for name, tensor in header.tensors.items():
        tensors = hf_tensors(tensor)
        found.update(tensors)
        if not tensors and name != ROPE_FACTORS:
            unknown.append(name)
    if unknown:
        raise ModelLoadError(
            f"{header.path} has {len(unknown)} tensors that are not supported, as {unknown[0]!r}"
        )
    return found


def _read(path: Path, name: str, region: _Region) -> NDArray[np.uint8]:
    """The region's bytes; read, not mapped, so that a file cut short meanwhile gives an error, not a crash."""
    raw = np.empty(region.num_bytes, dtype=np.uint8)
    left = raw.data
    try:
        with path.open("rb", buffering=0) as file:
            for offset, length in region.runs():
                if not _fill(file, offset, left[:length]):
                    raise ModelLoadError(f"{path}: truncated in tensor {name!r}")
                left = left[length:]
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    return raw


def _fill(file: FileIO, offset: int, target: memoryview) -> bool:
    """Read `target` full; False at the end of the file."""
    file.seek(offset)
    while target:
        count = file.readinto(target)
        if not count:
            return False
        target = target[count:]
    return True


def _copy_unpermuted(values: Tensor, target: Tensor, head_rows: int) -> None:
    """Undo the converter's permutation: of a head's rows, 2 i and 2 i + 1 become i and i + half.

    `target` [rows, ...] has whole heads of `head_rows` rows.
    """
    heads, half, rest = target.shape[0] // head_rows, head_rows // 2, target.shape[1:]
    interleaved = values.view(heads, half, 2, *rest)
    target.view(heads, 2, half, *rest).copy_(interleaved.transpose(1, 2))
