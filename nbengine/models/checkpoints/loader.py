"""This module loads a resolved model: it compares the files with the configuration first, then allocates and
fills."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import Format
from nbengine.models.causal_model import CausalModel
from nbengine.models.checkpoints.gguf_loader import GGUFWeights
from nbengine.models.checkpoints.kept_weights import KeptWeights, Origin
from nbengine.models.checkpoints.packed_store import PackedStore
from nbengine.models.checkpoints.safetensors_loader import SafetensorsWeights
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.encoder_config import AnyEncoderConfig
from nbengine.models.configs.quantization_config import Fp8Blocks
from nbengine.models.configs.transformers_encoder_config import TransformersEncoderConfig
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.families.bert import BertModel
from nbengine.models.layers.memory import Build, WeightMemory, allocate, allocate_regions
from nbengine.models.layers.regions import has_regions, is_region
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats, WeightSlot
from nbengine.models.registry import load_family
from nbengine.runtime.progress import Reporter
from nbengine.units import size

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_SECONDS = 0.1
_SHOWN = 3
_NOWHERE = torch.device("meta")


class Weights(Protocol):
    """The tensors of a checkpoint under Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""

    @property
    def formats(self) -> Mapping[str, Format]:
        """Return the formats in which matrices may stay quantised."""

    def num_bytes(self, slots: Mapping[str, WeightSlot]) -> int:
        """Count the bytes of the files that `load` reads for these slots."""

    def load(self, slots: Mapping[str, WeightSlot], on_bytes: Callable[[int], None]) -> None:
        """Fill the slots, reading what they hold and no more; `on_bytes` is told how much has been read."""


class LoadableModel(Protocol):
    """A model whose weights can be filled in."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the places of the weights, under the names of Hugging Face checkpoints."""

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Return the tensors that a checkpoint may have and that the model does not use."""

    @property
    def weights_bytes(self) -> int:
        """Return the memory of the weights in bytes."""


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
    packed: PackedFormats = ALL_DENSE,
    store: PackedStore | None = None,
) -> CausalModel:
    """Load a rank's part of a decoder with its weights from safetensors files or from one GGUF file.

    Every rank compares the headers with the whole decoder, and reads its own weights only. Those of a CPU that
    stay quantised, and all others of their model, come from `store` if they are there, and go there otherwise.

    Raises:
        ModelLoadError: files and configuration do not fit together, a file is corrupt, or memory is short.
    """
    report("reading the weights' headers", 0.0)
    weights = _checked(config, paths, dtype)
    family = load_family(config.family)

    def build(where: torch.device, memory: WeightMemory | None) -> CausalModel:
        return family.build(
            config,
            dtype=dtype,
            device=where,
            max_positions=1 if where.type == "meta" else max_positions,
            parallel=parallel,
            packed=packed,
            memory=memory,
        )

    if packed.formats and store is not None and device.type == "cpu" and has_regions():
        model = _load_kept(build, weights, Origin(paths, repr(config)), store, report)
    else:
        model = _load(build, weights, device, report)
    if packed.formats or is_gguf(paths[0]):
        _log_formats(model)
    if isinstance(config.quantization, Fp8Blocks):
        held = str(dtype).removeprefix("torch.")
        logger.info("matrices of 8-bit floating point (FP8) are held in %s, twice as large or more", held)
    return model


def _log_formats(model: CausalModel) -> None:
    """Say how many of a checkpoint's matrices are held in which format, and which are not quantised."""
    matrices = {name: slot for name, slot in model.weight_slots().items() if len(slot.full_shape) == 2}
    dense, dtype = [], str(model.dtype).removeprefix("torch.")
    for name, slot in matrices.items():
        if slot.form is None:
            dense.append(name)
    held = Counter(dtype if slot.form is None else slot.form.name for slot in matrices.values())
    counts = ", ".join(f"{name} {count}" for name, count in held.most_common())
    logger.info("matrices by type: %s%s", counts, f"; in {dtype}: {_listed(dense)}" if dense else "")


def check_checkpoint(config: DecoderConfig, paths: tuple[Path, ...], dtype: torch.dtype) -> None:
    """Compare a decoder's weight files with its configuration by their headers, and some rows of two matrices that
    are one for it; nothing is loaded.

    Raises:
        ModelLoadError: files and configuration do not fit together, or a file is corrupt.
    """
    _checked(config, paths, dtype)


def _checked(config: DecoderConfig, paths: tuple[Path, ...], dtype: torch.dtype) -> Weights:
    """Open a decoder's weight files, which fit its configuration."""
    weights = open_weights(paths, config)
    sketch = _sketch(lambda: _whole_decoder(config, dtype))
    _compare(sketch, weights, paths[0])
    _check_tied(sketch, weights, paths[0])
    return weights


def load_encoder(
    config: AnyEncoderConfig,
    paths: tuple[Path, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    report: Reporter,
) -> EncoderModel:
    """Load an encoder with its weights from safetensors files; raises as `load_decoder` does."""
    report("reading the weights' headers", 0.0)
    _require_files(paths)
    weights = _encoder_weights(config, paths)

    def build(where: torch.device, memory: WeightMemory | None = None) -> EncoderModel:
        return make_encoder(config, dtype=dtype, device=where, memory=memory)

    _compare(_sketch(lambda: build(_NOWHERE)), weights, paths[0])
    return _load(build, weights, device, report)


def make_encoder(
    config: AnyEncoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    memory: WeightMemory | None = None,
) -> EncoderModel:
    """Make an encoder, its weights not loaded yet; on the device "meta" it takes no memory."""
    if isinstance(config, TransformersEncoderConfig):
        from nbengine.models.families.transformers_encoder import TransformersEncoder

        return TransformersEncoder(config, dtype=dtype, device=device, memory=memory)
    return BertModel(config, dtype=dtype, device=device, memory=memory)


def _encoder_weights(config: AnyEncoderConfig, paths: tuple[Path, ...]) -> SafetensorsWeights:
    if isinstance(config, TransformersEncoderConfig):
        from nbengine.models.families.transformers_encoder import encoder_names

        names = encoder_names(config.architecture, config.stated, config.hf_json)
        return SafetensorsWeights(paths, parts=names.parts)
    return SafetensorsWeights(paths)


def reload_weights(model: CausalModel | EncoderModel, paths: tuple[Path, ...], report: Reporter) -> None:
    """Fill the weights of a loaded model from its files again, but for those that are still mapped.

    Raises:
        ModelLoadError: the files are no longer those from which the model was loaded.
    """
    _require_files(paths)
    weights: Weights
    if isinstance(model, EncoderModel):
        weights = _encoder_weights(model.config, paths)
        _compare(model, weights, paths[0])
    else:
        weights = open_weights(paths, model.config)
        _compare(_whole_decoder(model.config, model.dtype), weights, paths[0])
    slots = model.weight_slots()
    if not isinstance(model, EncoderModel) and model.kept is not None and model.kept.is_current(paths):
        slots = {name: slot for name, slot in slots.items() if not is_region(slot.tensor.untyped_storage())}
    with torch.inference_mode():
        _fill(slots, weights, report)


def read_weights(model: CausalModel, slots: Mapping[str, WeightSlot], paths: tuple[Path, ...]) -> None:
    """Fill some slots of a loaded decoder from its files.

    Raises:
        ModelLoadError: the files are no longer those from which the model was loaded.
    """
    weights = open_weights(paths, model.config)
    _compare_slots(slots, weights, paths[0])
    with torch.inference_mode():
        weights.load(slots, lambda _: None)


def _whole_decoder(config: DecoderConfig, dtype: torch.dtype) -> CausalModel:
    """Make all ranks' parts as one decoder, without memory."""
    return load_family(config.family).build(config, dtype=dtype, device=_NOWHERE, max_positions=1)


def _sketch(build: Callable[[], Model]) -> Model:
    try:
        return build()
    except RuntimeError as error:
        raise ModelLoadError(f"the configuration's sizes are impossible: {error}") from error


def _load(build: Build[Model], weights: Weights, device: torch.device, report: Reporter) -> Model:
    with torch.inference_mode():
        try:
            model = allocate(build, device)
        except (MemoryError, RuntimeError) as error:
            raise ModelLoadError(
                f"cannot allocate {size(build(_NOWHERE, None).weights_bytes)} of weights on {device}: {error}"
            ) from error
        _fill(model.weight_slots(), weights, report)
    report("loaded the weights", 1.0)
    return model


def _load_kept(
    build: Build[CausalModel], weights: Weights, origin: Origin, store: PackedStore, report: Reporter
) -> CausalModel:
    with torch.inference_mode():
        try:
            model, regions = allocate_regions(build)
        except (OSError, MemoryError, RuntimeError) as error:
            raise ModelLoadError(
                f"cannot allocate {size(build(_NOWHERE, None).weights_bytes)} of weights: {error}"
            ) from error
        try:
            kept = KeptWeights(store, origin, model.weight_slots(), regions)
        except OSError as error:
            raise ModelLoadError(f"cannot read {origin.paths[0]}: {error}") from error
        model.kept = kept
        taken = _byte_counter("reading the packed weights", kept.num_bytes, report)
        if not kept.take(torch.get_num_threads(), taken):
            _fill(model.weight_slots(), weights, report)
            kept.keep()
    report("loaded the weights", 1.0)
    return model


def _fill(slots: Mapping[str, WeightSlot], weights: Weights, report: Reporter) -> None:
    is_packed = any(slot.form is not None for slot in slots.values())
    doing = "packing the weights" if is_packed else "loading the weights"
    total = weights.num_bytes(slots)
    report(f"{doing}, {size(total)}", 0.0)
    weights.load(slots, _byte_counter(doing, total, report))


def open_weights(paths: tuple[Path, ...], config: DecoderConfig) -> Weights:
    """Open the checkpoint in `paths`, its headers read and checked.

    Raises:
        ModelLoadError: there is no file, or a file is corrupt or of an unsupported kind.
    """
    _require_files(paths)
    if is_gguf(paths[0]):
        return GGUFWeights(paths[0], config)
    parts = partial(load_family(config.family).tensor_parts, config)
    return SafetensorsWeights(paths, config.quantization, parts)


def is_gguf(path: Path) -> bool:
    """Return whether a weight file is a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"


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


def _check_tied(model: CausalModel, weights: Weights, path: Path) -> None:
    """Check that files do not have two matrices for what is one in the model."""
    for name, source in model.tied_weights.items():
        if isinstance(weights, SafetensorsWeights) and weights.differ(name, source):
            raise ModelLoadError(
                f"{path}: {name} is another matrix than {source}, and config.json says tie_word_embeddings, that they are "
                "one; hf_overrides={'tie_word_embeddings': False} takes both"
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


def _byte_counter(doing: str, total: int, report: Reporter) -> Callable[[int], None]:
    """Return a function that is told of bytes that are done, and reports which part of all they are."""
    detail = f"{doing}, {size(total)}"
    done = 0
    reported = time.monotonic()

    def count(num_bytes: int) -> None:
        nonlocal done, reported
        done += num_bytes
        now = time.monotonic()
        if now - reported >= _REPORT_INTERVAL_SECONDS:
            reported = now
            report(detail, min(1.0, done / max(1, total)))

    return count
