"""Weights out of safetensors files, single or sharded, into a model's weight slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nbengine.errors import ModelLoadError
from nbengine.models.expert_names import TensorPart, tensor_parts
from nbengine.models.layers import WeightSlot

_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_COMPUTED = (".rotary_emb.inv_freq", "embeddings.position_ids")
"""Endings of tensors that old checkpoints carry although they follow from the configuration."""


class SafetensorsWeights:
    """The tensors of a set of safetensors files, one an expert however the files have them.

    Files are mapped; pages are read when a tensor is copied.

    Raises:
        ModelLoadError: a file is corrupt or truncated, or two files hold the same tensor.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._parts: dict[str, TensorPart] = {}
        self._element_bytes: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            self._index(path)

    def num_bytes(self, slots: Mapping[str, WeightSlot]) -> int:
        """What `load` reads."""
        return sum(math.prod(slot.tensor.shape) * self._element_bytes[name] for name, slot in slots.items())

    def load(self, slots: Mapping[str, WeightSlot], on_bytes: Callable[[int], None]) -> None:
        """Copy what the slots hold of the named tensors, converting the type; shapes have been compared already.

        Raises:
            ModelLoadError: a file cannot be read any more.
        """
        by_file: dict[Path, list[str]] = {}
        for name in slots:
            by_file.setdefault(self._files[name], []).append(name)
        for path, names in by_file.items():
            try:
                with safe_open(str(path), framework="pt") as file:
                    for name in names:
                        slot = slots[name]
                        part = self._parts[name]
                        values = file.get_slice(part.name)[part.index(slot.index)]
                        slot.tensor.copy_(values)
                        on_bytes(values.nbytes)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"cannot read {path}: {error}") from error

    def _index(self, path: Path) -> None:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    part = file.get_slice(name)
                    self._add(path, name, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is truncated, corrupt or no safetensors file: {error}") from error

    def _add(self, path: Path, name: str, shape: tuple[int, ...], kind: str) -> None:
        if name.endswith(_COMPUTED):
            return
        if kind not in _FLOAT_BYTES:
            raise ModelLoadError(
                f"{path}: tensor {name!r} has the type {kind}; quantised weights are not supported"
            )
        for our_name, part in tensor_parts(name, shape):
            if our_name in self._files:
                raise ModelLoadError(f"tensor {name!r} is in both {self._files[our_name]} and {path}")
            self._files[our_name] = path
            self._parts[our_name] = part
            self._element_bytes[our_name] = _FLOAT_BYTES[kind]
            self.shapes[our_name] = part.shape
