"""Weights out of a GGUF file into a decoder's weight slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.gguf import GGUFHeader, GGUFTensor, read_header
from nbengine.models.gguf_config import ROPE_FACTORS, hf_tensor_name
from nbengine.models.gguf_dequant import dequantize

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
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())

    def load(self, slots: Mapping[str, Tensor], on_bytes: Callable[[int], None]) -> None:
        """Dequantise the named tensors into their slots; shapes have been compared already.

        Each tensor is one thread's work, the largest first. Spreading every operation over all threads instead
        would make them wait for each other a few thousand times, which is slow when other processes want the
        cores too.

        Raises:
            ModelLoadError: the file cannot be read, or a type cannot be dequantised.
        """
        names = sorted(slots, key=lambda name: self._tensors[name].num_bytes, reverse=True)
        with _single_threaded_operations() as num_threads, ThreadPoolExecutor(num_threads) as pool:
            for num_bytes in pool.map(lambda name: self._load_one(name, slots[name]), names):
                on_bytes(num_bytes)

    @torch.inference_mode()
    def _load_one(self, name: str, slot: Tensor) -> int:
        tensor = self._tensors[name]
        raw = torch.from_numpy(_read(self.path, tensor)).to(slot.device)
        values = dequantize(raw, tensor.type)
        num_heads = self._heads.get(name.split(".")[-2])
        if num_heads is None:
            slot.copy_(values.view(slot.shape))
        else:
            _copy_unpermuted(values, slot, num_heads)
        return tensor.num_bytes


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
        hf_name = hf_tensor_name(name)
        if hf_name is not None:
            found[hf_name] = tensor
        elif name != ROPE_FACTORS:
            unknown.append(name)
    if unknown:
        raise ModelLoadError(
            f"{header.path} has {len(unknown)} tensors that are not supported, as {unknown[0]!r}"
        )
    return found


def _read(path: Path, tensor: GGUFTensor) -> NDArray[np.uint8]:
    """The tensor's bytes; read, not mapped, so that a file cut short meanwhile gives an error, not a crash."""
    raw = np.empty(tensor.num_bytes, dtype=np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            done = 0
            while done < tensor.num_bytes:
                count = file.readinto(raw.data[done:])
                if not count:
                    raise ModelLoadError(f"{path}: truncated in tensor {tensor.name!r}")
                done += count
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    return raw


def _copy_unpermuted(values: Tensor, slot: Tensor, num_heads: int) -> None:
    """Undo the converter's permutation: within a head, rows 2 i and 2 i + 1 become rows i and i + half."""
    half = slot.shape[0] // num_heads // 2
    rest = slot.shape[1:]
    interleaved = values.view(num_heads, half, 2, *rest)
    slot.view(num_heads, 2, half, *rest).copy_(interleaved.transpose(1, 2))
