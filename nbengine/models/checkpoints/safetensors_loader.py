"""This module loads weights from safetensors files, single or sharded, into a model's weight slots."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import Format
from nbengine.models.checkpoints import fp8, mxfp4
from nbengine.models.checkpoints.filling import fill_slots
from nbengine.models.checkpoints.regular_files import check_regular
from nbengine.models.checkpoints.safetensors_tensors import (
    PlainTensor,
    Read,
    RoundedMatrix,
    StoredTensor,
    may_be_rounded,
)
from nbengine.models.checkpoints.tensor_names import TensorPart, encoder_parts
from nbengine.models.checkpoints.zero_points import PARTS, ZeroPointMatrix
from nbengine.models.configs.quantization_config import Fp8Blocks, Mxfp4, Quantization, Rounding, ZeroPoints
from nbengine.models.layers.weights import WeightSlot

_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_COMPARED = 64
"""The rows that tell whether two matrices are the same."""
Parts = Callable[[str, tuple[int, ...]], Iterator[tuple[str, TensorPart]]]
"""Tells what a tensor of a file holds; see `nbengine.models.family.Family.tensor_parts`."""


class SafetensorsWeights:
    """The tensors of a set of safetensors files, one an expert however the files have them.

    Files are mapped; pages are read when a tensor is copied.

    Raises:
        ModelLoadError: a file is corrupt or truncated, or two files hold the same tensor.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        quantization: Quantization | None = None,
        parts: Parts = encoder_parts,
    ) -> None:
        self._parts = parts
        self._files: dict[str, Path] = {}
        self._stored: dict[str, StoredTensor] = {}
        packed: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
        short: dict[str, tuple[int, ...]] = {}
        scales: dict[str, tuple[tuple[int, ...], str]] = {}
        for path in paths:
            for name, shape, kind in _headers(path):
                if name in self._files:
                    raise ModelLoadError(f"tensor {name!r} is in both {self._files[name]} and {path}")
                self._files[name] = path
                module, _, part = name.rpartition(".")
                ending = name[-len("_blocks") :]
                if isinstance(quantization, ZeroPoints) and part in PARTS:
                    packed.setdefault(module, {})[part] = shape, kind
                elif isinstance(quantization, Mxfp4) and ending in mxfp4.PARTS:
                    packed.setdefault(name.removesuffix(ending), {})[ending] = shape, kind
                elif isinstance(quantization, Fp8Blocks) and name.endswith(fp8.SCALES):
                    scales[name.removesuffix(fp8.SCALES)] = shape, kind
                elif isinstance(quantization, Fp8Blocks) and kind == fp8.KIND:
                    short[name] = shape
                else:
                    self._add_plain(name, shape, kind, quantization)
        if isinstance(quantization, ZeroPoints) and packed:
            self._add_packed(packed, quantization)
        elif isinstance(quantization, Fp8Blocks):
            for name, shape in short.items():
                with _naming(self._files[name]):
                    for our_name, place in self._parts(name, shape):
                        matrix = fp8.Fp8Matrix.of(place, shape, scales.get(name), quantization)
                        self._add(our_name, matrix)
        elif isinstance(quantization, Mxfp4):
            for base, headers in packed.items():
                with _naming(next(self._files[f"{base}{ending}"] for ending in headers)):
                    shape = mxfp4.shape_of(base, headers)
                    for our_name, place in self._parts(f"{base}{mxfp4.PARTS[0]}", shape):
                        self._add(our_name, mxfp4.Mxfp4Matrix(base, place))
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: stored.shape for name, stored in self._stored.items()
        }
        self.formats: Mapping[str, Format] = {
            name: stored.form for name, stored in self._stored.items() if stored.form is not None
        }
        """The formats in which matrices may stay quantised."""

    def num_bytes(self, slots: Mapping[str, WeightSlot]) -> int:
        """Count the bytes that `load` reads for these slots."""
        return sum(self._stored[name].num_bytes(slot) for name, slot in slots.items())

    def load(self, slots: Mapping[str, WeightSlot], on_bytes: Callable[[int], None]) -> None:
        """Fill each slot with the part of the named tensor that it holds, converting the type; shapes have
        been compared already.

        Raises:
            ModelLoadError: a file cannot be read any more, or a quantised tensor is corrupt.
        """
        paths = {name: self._files[self._stored[name].name] for name in slots}
        with self._open() as read:

            def fill(name: str) -> int:
                slot, stored = slots[name], self._stored[name]
                if slot.form is not None and slot.form is not stored.form:
                    raise ModelLoadError(f"{paths[name]}: tensor {stored.name} is no longer {slot.form.name}")
                with _naming(paths[name]):
                    stored.fill(slot, read)
                return stored.num_bytes(slot)

            fill_slots(sorted(slots, key=lambda name: paths[name]), fill, on_bytes)

    def differ(self, first: str, second: str) -> bool:
        """Return whether files have two weights, dense ones, that are not the same: some of their rows tell."""
        found = []
        for stored in map(self._stored.get, (first, second)):
            plain = stored.plain if isinstance(stored, RoundedMatrix) else stored
            if not isinstance(plain, PlainTensor):
                return False
            found.append(plain.part)
        if found[0].shape != found[1].shape:
            return True
        with self._open() as read:
            for row in range(0, found[0].shape[0], max(1, found[0].shape[0] // _COMPARED)):
                one, other = (read(part.name, part.index((slice(row, row + 1),))) for part in found)
                if not one.equal(other):
                    return True
        return False

    def _add_plain(
        self, name: str, shape: tuple[int, ...], kind: str, quantization: Quantization | None
    ) -> None:
        with _naming(self._files[name]):
            parts = list(self._parts(name, shape))
        if parts and kind not in _FLOAT_BYTES:
            raise ModelLoadError(
                f"{self._files[name]}: tensor {name!r} has the type {kind}; quantised weights are read where "
                "config.json has a quantization_config of AWQ, GPTQ or FP8 in blocks, and from GGUF files"
            )
        for our_name, part in parts:
            stored: StoredTensor = PlainTensor(part, _FLOAT_BYTES[kind])
            if isinstance(quantization, Rounding) and may_be_rounded(our_name, part.shape):
                stored = RoundedMatrix(PlainTensor(part, _FLOAT_BYTES[kind]), quantization.bits)
            self._add(our_name, stored)

    def _add_packed(
        self, packed: Mapping[str, Mapping[str, tuple[tuple[int, ...], str]]], quantization: ZeroPoints
    ) -> None:
        with self._open() as read:
            for module, headers in packed.items():
                path = next(self._files[f"{module}.{part}"] for part in headers)
                with _naming(path):
                    matrix = ZeroPointMatrix.of(module, quantization, headers, read)
                    parts = list(self._parts(f"{module}.weight", matrix.shape))
                for our_name, part in parts:
                    if part.expert is not None or part.is_transposed:
                        raise ModelLoadError(
                            f"{path}: {module} holds all experts of a layer, which are not taken apart where they are "
                            f"quantised by {quantization.method.upper()}"
                        )
                    self._add(our_name, matrix.part(part.first_row, part.shape[0]))

    def _add(self, our_name: str, stored: StoredTensor) -> None:
        if our_name in self._stored:
            before, path = self._stored[our_name].name, self._files[stored.name]
            raise ModelLoadError(
                f"tensors {before!r} in {self._files[before]} and {stored.name!r} in {path} are the same weight"
            )
        self._stored[our_name] = stored

    @contextlib.contextmanager
    def _open(self) -> Iterator[Read]:
        """Open the files; give the function that reads them, which several threads may call."""
        with contextlib.ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read(name: str, index: tuple[int | slice, ...]) -> Tensor:
                path = self._files[name]
                try:
                    found: Tensor = files[path].get_slice(name)[index]
                except (SafetensorError, OSError) as error:
                    raise ModelLoadError(f"cannot read {path}: {error}") from error
                return found

            for path in dict.fromkeys(self._files.values()):
                try:
                    files[path] = stack.enter_context(safe_open(str(path), framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ModelLoadError(f"cannot read {path}: {error}") from error
            yield read


def usual_dtype(paths: Sequence[Path]) -> str:
    """Return the name of the floating-point type that most numbers of some safetensors files have; float32 where none has
    one of those that are computed with.

    Raises:
        ModelLoadError: a file is corrupt or truncated.
    """
    counts = Counter({"float32": 0})
    for path in paths:
        for _, shape, kind in _headers(path):
            if kind in _DTYPES:
                counts[_DTYPES[kind]] += math.prod(shape)
    return counts.most_common(1)[0][0]


def _headers(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and type of each tensor of a file."""
    check_regular(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                yield name, tuple(part.get_shape()), str(part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is truncated, corrupt or no safetensors file: {error}") from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the path before the message of a `ModelLoadError` that lacks it."""
    try:
        yield
    except ModelLoadError as error:
        if str(path) in str(error):
            raise
        raise ModelLoadError(f"{path}: {error}") from error
