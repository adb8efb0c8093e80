"""Loading a resolved model: compare the files with the configuration first, then allocate and fill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import ModelLoadError
from nbengine.models.bert import BertModel
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.decoder_classifier import make_decoder
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.encoder_config import EncoderConfig
from nbengine.models.gguf_loader import GGUFWeights
from nbengine.models.layers import WeightSlot
from nbengine.models.progress import Reporter
from nbengine.models.safetensors_loader import SafetensorsWeights
from nbengine.units import size

_REPORT_INTERVAL_SECONDS = 0.1
_SHOWN = 3
_NOWHERE = torch.device("meta")


class Weights(Protocol):
    """Tensors of a checkpoint under Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def num_bytes(self, slots: Mapping[str, WeightSlot]) -> int:
        """How much of the files `load` reads for these slots."""

    def load(self, slots: Mapping[str, WeightSlot], on_bytes: Callable[[int], None]) -> None:
        """Fill the slots, reading what they hold and no more; `on_bytes` is told how much has been read."""


class LoadableModel(Protocol):
    """A model whose weights can be filled in."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """What to load, under the names of Hugging Face checkpoints."""

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Tensors that a checkpoint may have and that the model does not use."""

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights in bytes."""


Model = TypeVar("Model", bound=LoadableModel)


def load_decoder(
    config: DecoderConfig,
    paths: tuple[Path, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None,
    report: Reporter,
    parallel: ParallelState = SINGLE,
) -> DecoderForCausalLM:
    """A rank's part of a decoder with its weights from safetensors files or from one GGUF file.

    Every rank compares the headers with the whole decoder, and reads its own weights only.

    Raises:
        ModelLoadError: files and configuration do not fit together, a file is corrupt, or memory is short.
    """
    report("reading the weights' headers", 0.0)
    weights = open_weights(paths, config)
    _compare(_sketch(lambda: _whole_decoder(config, dtype)), weights, paths[0])

    def build(where: torch.device) -> DecoderForCausalLM:
        positions = 1 if where.type == "meta" else max_positions
        return make_decoder(config, dtype=dtype, device=where, max_positions=positions, parallel=parallel)

    return _load(build, weights, device, report)


def check_checkpoint(config: DecoderConfig, paths: tuple[Path, ...], dtype: torch.dtype) -> None:
    """Compare a decoder's weight files with its configuration by their headers; nothing is loaded.

    Raises:
        ModelLoadError: they do not fit together, or a file is corrupt.
    """
    _compare(_sketch(lambda: _whole_decoder(config, dtype)), open_weights(paths, config), paths[0])


def load_encoder(
    config: EncoderConfig,
    paths: tuple[Path, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    report: Reporter,
) -> BertModel:
    """An encoder with its weights from safetensors files; raises as `load_decoder` does."""
    report("reading the weights' headers", 0.0)
    _require_files(paths)
    weights = SafetensorsWeights(paths)

    def build(where: torch.device) -> BertModel:
        return BertModel(config, dtype=dtype, device=where)

    _compare(_sketch(lambda: build(_NOWHERE)), weights, paths[0])
    return _load(build, weights, device, report)


def reload_weights(model: DecoderForCausalLM | BertModel, paths: tuple[Path, ...], report: Reporter) -> None:
    """Fill the weights of a loaded model from its files again.

    Raises:
        ModelLoadError: the files are not those that it was loaded from any more.
    """
    _require_files(paths)
    weights: Weights
    if isinstance(model, BertModel):
        weights = SafetensorsWeights(paths)
        _compare(model, weights, paths[0])
    else:
        weights = open_weights(paths, model.config)
        _compare(_whole_decoder(model.config, model.dtype), weights, paths[0])
    with torch.inference_mode():
        _fill(model.weight_slots(), weights, report)


def _whole_decoder(config: DecoderConfig, dtype: torch.dtype) -> DecoderForCausalLM:
    """All ranks' parts as one, without memory."""
    return make_decoder(config, dtype=dtype, device=_NOWHERE, max_positions=1)


def _sketch(build: Callable[[], Model]) -> Model:
    try:
        return build()
    except RuntimeError as error:
        raise ModelLoadError(f"the configuration's sizes are impossible: {error}") from error


def _load(
    build: Callable[[torch.device], Model], weights: Weights, device: torch.device, report: Reporter
) -> Model:
    with torch.inference_mode():
        try:
            model = build(device)
        except (MemoryError, RuntimeError) as error:
            raise ModelLoadError(
                f"cannot allocate {size(build(_NOWHERE).weights_bytes)} of weights on {device}: {error}"
            ) from error
        _fill(model.weight_slots(), weights, report)
    report("loaded the weights", 1.0)
    return model


def _fill(slots: Mapping[str, WeightSlot], weights: Weights, report: Reporter) -> None:
    weights.load(slots, _byte_counter(weights.num_bytes(slots), report))


def open_weights(paths: tuple[Path, ...], config: DecoderConfig) -> Weights:
    """The checkpoint in `paths`, its headers read and checked.

    Raises:
        ModelLoadError: there is no file, or a file is corrupt or of an unsupported kind.
    """
    _require_files(paths)
    if paths[0].suffix.lower() == ".gguf":
        return GGUFWeights(paths[0], config)
    return SafetensorsWeights(paths)


def _require_files(paths: tuple[Path, ...]) -> None:
    if not paths:
        raise ModelLoadError("the model has no weight files")


def _compare(expected: LoadableModel, weights: Weights, path: Path) -> None:
    slots = expected.weight_slots()
    _compare_slots(slots, weights, path)
    unexpected = weights.shapes.keys() - slots.keys() - expected.ignored_weights
    if unexpected:
        raise ModelLoadError(
            f"{path} has tensors that its architecture does not use: {_listed(sorted(unexpected))}"
        )


def _compare_slots(slots: Mapping[str, WeightSlot], weights: Weights, path: Path) -> None:
    missing = [name for name in slots if name not in weights.shapes]
    if missing:
        raise ModelLoadError(f"{path} lacks {_listed(missing)}")
    for name, slot in slots.items():
        if weights.shapes[name] != slot.full_shape:
            raise ModelLoadError(
                f"{path}: tensor {name} has the shape {list(weights.shapes[name])}, "
                f"the configuration asks for {list(slot.full_shape)}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _byte_counter(total: int, report: Reporter) -> Callable[[int], None]:
    done = 0
    reported = time.monotonic()

    def count(num_bytes: int) -> None:
        nonlocal done, reported
        done += num_bytes
        now = time.monotonic()
        if now - reported >= _REPORT_INTERVAL_SECONDS:
            reported = now
            report("loading the weights", min(1.0, done / max(1, total)))

    return count
