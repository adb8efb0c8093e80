"""A strict reader of GGUF headers (versions 2 and 3, little-endian), free of torch.

Format: the GGUF specification in ggml's repository (docs/gguf.md). Nothing is mapped into memory and every
count, length and offset is checked against the file's size before it is used, so a truncated or corrupt
file gives a `ModelLoadError`, never an out-of-bounds access or an unbounded loop.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.regular_files import check_regular

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_READ_AHEAD = 4 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_SMALLEST_ENTRY = 8 + 4 + 1
"""The bytes of a metadata entry with an empty key and a one-byte value."""
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
"""The bytes of a tensor's description with an empty name and one dimension."""


@dataclass(frozen=True)
class StringArray:
    """A metadata array of strings (a vocabulary, the merges): only its length is kept, its content is
    skipped."""

    length: int


Value = int | float | bool | str | StringArray | tuple[int | float | bool, ...]


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file: `shape` is in torch's order (rows first), `offset` counts from the file's
    start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Return the number of its values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata and the tensor table of a GGUF file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the model family, which is also the prefix of its metadata keys."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """Return the string at `key`; a missing or different value raises `ModelLoadError`."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise ModelLoadError(f"{self.path}: metadata key {key} is {_kind(value)}, not a string")
        return value

    def integer(self, key: str) -> int:
        """Return the integer at `key`; a missing or different value raises `ModelLoadError`."""
        value = self.metadata.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelLoadError(f"{self.path}: metadata key {key} is {_kind(value)}, not an integer")
        return value

    def integer_or(self, key: str, default: int) -> int:
        """Return the integer at `key`, `default` where there is none; a different value raises `ModelLoadError`."""
        return self.integer(key) if key in self.metadata else default

    @property
    def num_layers(self) -> int:
        """Return the number of layers without those behind them that predict further tokens (MTP)."""
        arch = self.architecture
        count = self.integer(f"{arch}.block_count")
        further = self.integer_or(f"{arch}.nextn_predict_layers", 0)
        if not 0 <= further < count:
            raise ModelLoadError(f"{self.path}: {further} of {count} layers predict further tokens")
        return count - further

    def per_layer(self, key: str) -> tuple[int | float | bool, ...] | None:
        """Return the number that each layer has at `key`, where one may stand for all; None: there is none.

        A different value, or too few of them, raises `ModelLoadError`.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, int | float):
            return (value,) * self.num_layers
        if not isinstance(value, tuple) or len(value) < self.num_layers:
            length = f" of {len(value)}" if isinstance(value, tuple) else ""
            raise ModelLoadError(
                f"{self.path}: metadata key {key} is {_kind(value)}{length}, not a number for each of "
                f"{self.num_layers} layers"
            )
        return value[: self.num_layers]

    def largest(self, key: str) -> int:
        """Return the integer at `key`, of which some layers may have 0 instead; else it raises `ModelLoadError`."""
        stated = self.per_layer(key)
        if stated is None or isinstance(self.metadata[key], int | float):
            return self.integer(key)
        found = {each for each in stated if each}
        if len(found) > 1 or not all(isinstance(each, int) for each in found):
            raise ModelLoadError(
                f"{self.path}: layers of different {key} are not supported, as in {list(stated)}"
            )
        return int(max(found, default=0))

    def has_tensor(self, ending: str) -> bool:
        """Return whether a layer has a tensor of this name."""
        return any(name.endswith(f".{ending}") for name in self.tensors)

    def number(self, key: str) -> float:
        """Return the number at `key`; a missing or different value raises `ModelLoadError`."""
        value = self.metadata.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelLoadError(f"{self.path}: metadata key {key} is {_kind(value)}, not a number")
        return value


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of the GGUF file at `path`.

    Raises:
        ModelLoadError: the file is no GGUF file, or truncated or corrupt; the message names the file and the
            fault.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            return _parse(path, _Cursor(path, file))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


class _Cursor:
    """A reader that goes through the header front to back; every read is checked against the file's size."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.pos = 0
        self._file = file
        self._data = b""

    def need(self, count: int, what: str) -> None:
        """Make the next `count` bytes available."""
        end = self.pos + count
        if end > self.size:
            raise self.error(
                f"truncated or corrupt: {what} ends at byte {end}, but the file has {self.size} bytes"
            )
        while len(self._data) < end:
            more = self._file.read(max(_READ_AHEAD, end - len(self._data)))
            if not more:
                raise self.error(f"truncated while it was read, in {what}")
            self._data += more

    def scalar(self, layout: str, what: str) -> int | float:
        count = struct.calcsize(layout)
        self.need(count, what)
        value: int | float = struct.unpack_from(layout, self._data, self.pos)[0]
        self.pos += count
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar("<I", what))

    def u64(self, what: str) -> int:
        return int(self.scalar("<Q", what))

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.need(length, what)
        raw = self._data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def skip_strings(self, count: int, what: str) -> None:
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self.pos + 8 > len(self._data):
                self.need(8, what)
            self.pos += 8 + unpack(self._data, self.pos)[0]
        self.need(0, what)

    def numbers(self, layout: str, count: int, what: str) -> tuple[int | float, ...]:
        self.need(count * struct.calcsize(layout), what)
        values = np.frombuffer(self._data, dtype=np.dtype(layout), count=count, offset=self.pos)
        self.pos += values.nbytes
        return tuple(values.tolist())

    def bounded_count(self, count: int, smallest: int, what: str) -> int:
        """Check that `count` items of at least `smallest` bytes each fit into the rest of the file, and
        return `count`."""
        if count * smallest > self.size - self.pos:
            raise self.error(f"corrupt: {count} {what} cannot fit into its {self.size} bytes")
        return count

    def error(self, fault: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {fault}")


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    cursor.need(4, "the magic number")
    if cursor.u32("the magic number") != int.from_bytes(MAGIC, "little"):
        raise cursor.error("not a GGUF file (it does not start with the bytes GGUF)")
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian GGUF" if swapped in _VERSIONS else f"GGUF version {version}"
        raise cursor.error(f"{kind} is not supported; versions 2 and 3, little-endian, are")
    num_tensors = cursor.bounded_count(cursor.u64("the tensor count"), _SMALLEST_TENSOR, "tensors")
    num_entries = cursor.bounded_count(cursor.u64("the metadata count"), _SMALLEST_ENTRY, "metadata entries")
    metadata = _parse_metadata(cursor, num_entries)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"corrupt: general.alignment is {alignment!r}, not a power of two")
    tensors = _parse_tensors(cursor, num_tensors, alignment)
    return GGUFHeader(path, metadata, tensors)


def _parse_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}")
        if key in metadata:
            raise cursor.error(f"corrupt: metadata key {key!r} appears twice")
        metadata[key] = _parse_value(cursor, cursor.u32(f"the type of {key!r}"), key)
    return metadata


def _parse_value(cursor: _Cursor, kind: int, key: str) -> Value:
    if kind == _STRING:
        return cursor.string(f"metadata {key!r}")
    if kind == _ARRAY:
        return _parse_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.error(f"corrupt: metadata {key!r} has the unknown type {kind}")
    value = cursor.scalar(_SCALARS[kind], f"metadata {key!r}")
    return bool(value) if kind == _BOOL else value


def _parse_array(cursor: _Cursor, key: str) -> Value:
    what = f"metadata array {key!r}"
    kind = cursor.u32(what)
    count = cursor.u64(what)
    if kind == _STRING:
        cursor.skip_strings(cursor.bounded_count(count, 8, f"strings of {key!r}"), what)
        return StringArray(count)
    if kind not in _SCALARS:
        raise cursor.error(f"corrupt: {what} has elements of the unknown type {kind}")
    values = cursor.numbers(_SCALARS[kind], count, what)
    return tuple(bool(value) for value in values) if kind == _BOOL else values


def _parse_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    described = [_parse_tensor_info(cursor, index) for index in range(count)]
    start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    expected = 0
    for name, shape, kind, offset in described:
        if name in tensors:
            raise cursor.error(f"corrupt: tensor {name!r} appears twice")
        if offset != expected:
            raise cursor.error(f"corrupt: tensor {name!r} is at offset {offset}, expected {expected}")
        num_bytes = _num_bytes(cursor, name, shape, kind)
        end = start + offset + num_bytes
        if end > cursor.size:
            raise cursor.error(
                f"truncated: tensor {name!r} ends at byte {end}, but the file has {cursor.size} bytes"
            )
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, num_bytes)
        expected = -(-(offset + num_bytes) // alignment) * alignment
    return tensors


def _parse_tensor_info(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= _MAX_DIMENSIONS:
        raise cursor.error(f"corrupt: {what} has {num_dims} dimensions")
    shape = tuple(cursor.u64(what) for _ in range(num_dims))[::-1]
    kind = cursor.u32(what)
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError as error:
        raise cursor.error(f"{what} has the unknown ggml type {kind}") from error
    return name, shape, ggml_type, cursor.u64(what)


def _num_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    elements = 1
    for size in shape:
        elements *= size
    if elements == 0 or shape[-1] % block_size:
        raise cursor.error(
            f"corrupt: tensor {name!r} of type {kind.name} has the shape {list(shape)}, "
            f"whose rows are not made of blocks of {block_size}"
        )
    return int(elements // block_size * block_bytes)


def _kind(value: Value | None) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
