"""This module goes from a resolved `ModelConfig` to a model on a device: device, dtype and architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nbengine.config import CacheConfig, ModelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import ALONE, RankLayout
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.kernels.dense_kernels import select_dense
from nbengine.kernels.dispatch import attends_in_pairs, select_products, why_not_int8
from nbengine.models.causal_model import CausalModel
from nbengine.models.checkpoints.gguf_loader import dense_types
from nbengine.models.checkpoints.loader import load_decoder, load_encoder, make_encoder, open_weights
from nbengine.models.checkpoints.packed_store import PackedStore
from nbengine.models.checkpoints.safetensors_loader import usual_dtype
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.encoder_config import any_encoder_config, is_encoder
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.quantization_config import asked_rounding
from nbengine.models.configs.transformers_config import TransformersConfig
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.layers.memory import WeightMemory, allocate
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats
from nbengine.models.registry import decoder_config, load_family
from nbengine.runtime.progress import ProgressCallback, Reporter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PLAIN_TYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of GGUF matrices without blocks, and those that hold them."""
_FEW_BITS = 8
"""The bits to which activations are rounded before products with quantised weights, where none are asked for."""
_CPU_INFO = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def resolve_device(config: ModelConfig) -> torch.device:
    """Return the device that `config.device` means here; "auto" is CUDA where there is one.

    Raises:
        InvalidArgumentError: CUDA is asked for but not available.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise InvalidArgumentError("device", config.device, "'auto' or 'cpu' (no CUDA device is available)")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def resolve_dtype(config: ModelConfig, hf_config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the dtype of dense weights.

    "auto" is the checkpoint's own type for safetensors: the one that config.json states, else that of most of its
    numbers. For GGUF files, whose blocks have none, it is the 16-bit type that the device computes fast, else one for
    the matrices that do not stay quantised, else float32. A type for which the device has no fast products gives way:
    bfloat16 to float16 on older GPUs, and on the CPU float16 to float32 (exactly), unless all products take such
    weights as they are.

    Raises:
        ModelLoadError: config.json states a type that is not a floating-point type we know, or an architecture that is
            not supported; or it states none, and a file is corrupt.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if any(path.lower().endswith(".gguf") for path in config.weights):
        fast = _fast_dtype(device)
        return fast if fast is not torch.float32 else _stored_dtype(config, hf_config, device)
    stated = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if stated is None:
        stated = usual_dtype([Path(path) for path in config.weights])
    dtype = _DTYPES.get(str(stated).removeprefix("torch."))
    if dtype is None:
        raise ModelLoadError(f"config.json: dtype must be one of {', '.join(_DTYPES)}, got {stated!r}")
    if device.type == "cpu" and dtype is torch.float16 and not _takes(dtype, hf_config, device):
        return torch.float32
    if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        return torch.float16
    return dtype


@dataclass(frozen=True)
class Precision:
    """The types in which a model computes: `dtype` is that of dense weights, `kv_dtype` that of the KV cache, and
    `packed` says which weights stay quantised."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    packed: PackedFormats = ALL_DENSE

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Return the type of hidden states."""
        return self.packed.hidden_dtype(self.dtype)


def resolve_precision(
    config: ModelConfig, cache: CacheConfig, hf_config: Mapping[str, Any], device: torch.device
) -> Precision:
    """Return the types in which a model computes on a device.

    The KV cache is of the type that `cache` asks for; an encoder has none. Where weights stay quantised, "auto" has the
    KV cache in 16 bits: float32 takes twice the memory.

    Raises:
        InvalidArgumentError: rounding is asked for where nothing computes with rounded weights, or an int8 KV cache
            where there are no kernels for it.
        ModelLoadError: config.json states a type that is not a floating-point type we know, or a file is corrupt.
    """
    dtype = resolve_dtype(config, hf_config, device)
    packed = ALL_DENSE if is_encoder(hf_config) else packed_formats(config, device)
    if config.activation_dtype != "auto" and config.weights and not packed.formats:
        why = "'auto' for a model without quantised weights, or without kernels for them"
        raise InvalidArgumentError("activation_dtype", config.activation_dtype, why)
    if is_encoder(hf_config):
        return Precision(dtype, dtype)
    if cache.kv_cache_dtype == "int8":
        why_not = why_not_int8(device, packed.hidden_dtype(dtype))
        if config.directory and decoder_config(hf_config).latent is not None:
            why_not = "the model's layers keep latents, which are not rounded"
        if why_not is not None:
            raise InvalidArgumentError("kv_cache_dtype", "int8", f"'auto' on {device.type} ({why_not})")
        return Precision(dtype, torch.int8, packed)
    if packed.formats and config.dtype == "auto":
        return Precision(dtype, _short_type(packed, cache.block_size, decoder_config(hf_config)), packed)
    return Precision(dtype, dtype, packed)


def _short_type(packed: PackedFormats, block_size: int, decoder: DecoderConfig) -> torch.dtype:
    """Return the type of the KV cache beside quantised weights: float16, as llama.cpp has it, or where the processor
    multiplies pairs of it bfloat16. The three bits that it lacks are fewer than what 8 bits of activations lose."""
    is_rounded = packed.activation_bits == _FEW_BITS and decoder.latent is None
    if is_rounded and attends_in_pairs(decoder.head_dim, block_size):
        return torch.bfloat16
    return torch.float16


def load_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback | None = None,
    parallel: ParallelState = SINGLE,
    store: PackedStore | None = None,
    packed: PackedFormats | None = None,
) -> CausalModel:
    """Load a rank's weights of a resolved decoder; `progress` gets messages of the stage "load". Packed weights
    come from `store` and go there; `packed` is what `packed_formats` says, which need not be asked twice.

    Raises:
        ModelLoadError: the architecture is not supported, or the files are corrupt or do not fit together.
    """
    return load_decoder(
        _decoder_config(config),
        tuple(map(Path, config.weights)),
        dtype=dtype,
        device=device,
        max_positions=config.max_model_len,
        report=Reporter(progress, "load"),
        parallel=parallel,
        packed=packed_formats(config, device) if packed is None else packed,
        store=store,
    )


def make_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback | None = None,
    parallel: ParallelState = SINGLE,
) -> CausalModel:
    """Make a resolved decoder like that of `load_model`, whose weights are all still 0.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    Reporter(progress, "load")("making room for the weights")
    decoder = _decoder_config(config)
    packed = packed_formats(config, device)

    def build(where: torch.device, memory: WeightMemory | None) -> CausalModel:
        return load_family(decoder.family).build(
            decoder,
            dtype=dtype,
            device=where,
            max_positions=config.max_model_len,
            parallel=parallel,
            packed=packed,
            memory=memory,
        )

    with torch.inference_mode():
        model = allocate(build, device)
        for weight in model.parameters():
            weight.zero_()
    return model


def load_encoder_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback | None = None,
) -> EncoderModel:
    """Load the weights of a resolved encoder; raises as `load_model` does."""
    return load_encoder(
        any_encoder_config(load_hf_config(config)),
        tuple(map(Path, config.weights)),
        dtype=dtype,
        device=device,
        report=Reporter(progress, "load"),
    )


def packed_formats(config: ModelConfig, device: torch.device) -> PackedFormats:
    """Return the weights of a resolved decoder that stay quantised, or are rounded: on a CPU those that its
    files name, unless float32 is asked for, which is exact. Hidden states are float32 there.

    Raises:
        InvalidArgumentError: rounding is asked for where nothing computes with rounded weights.
        ModelLoadError: a file is corrupt.
    """
    if config.directory and isinstance(_decoder_config(config), TransformersConfig):
        if config.quantization is not None:
            why = "None for a model that runs through transformers, which computes in 16 or 32 bits"
            raise InvalidArgumentError("quantization", config.quantization, why)
        return ALL_DENSE
    products = None if config.dtype == "float32" else select_products(device)
    if products is None:
        if config.quantization is not None:
            why = "only the CPU computes with quantised weights; ask for device='cpu', or leave it out"
            if device.type == "cpu":
                why = (
                    "this machine has no products with quantised weights: llvmlite is not installed, or the "
                )
                why += "processor does not convert float16"
            raise InvalidArgumentError("quantization", config.quantization, f"None on {device.type} ({why})")
        return ALL_DENSE
    if not config.weights:
        return PackedFormats(is_wide=True)
    weights = open_weights(tuple(map(Path, config.weights)), _decoder_config(config))
    bits = 16 if config.activation_dtype == "int16" else _FEW_BITS
    return PackedFormats(weights.formats, products, is_wide=True, activation_bits=bits)


def _decoder_config(config: ModelConfig) -> DecoderConfig:
    """Return what config.json says of a decoder, and how its weights are to be rounded."""
    found = decoder_config(load_hf_config(config))
    if config.quantization is None:
        return found
    return replace(found, quantization=asked_rounding(config.quantization))


def weights_bytes_of(
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    layout: RankLayout = ALONE,
    packed: PackedFormats = ALL_DENSE,
) -> int:
    """Return the bytes that a rank's weights will take; nothing is loaded for it.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    nowhere = torch.device("meta")
    if is_encoder(hf_config):
        return make_encoder(any_encoder_config(hf_config), dtype=dtype, device=nowhere).weights_bytes
    config = decoder_config(hf_config)
    parallel = ParallelState(layout)
    return (
        load_family(config.family)
        .build(config, dtype=dtype, device=nowhere, max_positions=1, parallel=parallel, packed=packed)
        .weights_bytes
    )


def _stored_dtype(config: ModelConfig, hf_config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the 16-bit type of a GGUF file's matrices that do not stay quantised, if products take such weights as they
    are, else float32.

    It is the one that all of them have. Where blocks are among them, for which there are no products, it is float16,
    which is the nearer to them, or bfloat16 if there are others beside them that float16 may not hold.
    """
    types = set().union(*(dense_types(Path(path)) for path in config.weights))
    plain = types & _PLAIN_TYPES.keys()
    if types > plain:
        wanted = [torch.float16, torch.bfloat16] if plain <= {"F16"} else [torch.bfloat16]
    else:
        wanted = [_PLAIN_TYPES[name] for name in plain] if len(plain) == 1 else []
    return next((each for each in wanted if _takes(each, hf_config, device)), torch.float32)


def _takes(dtype: torch.dtype, hf_config: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether all products of a model are compiled ones that take weights of a 16-bit type as they are: those of
    dense experts, of encoders and of classes of transformers compute in it, slowly on a CPU, and round activations to
    it, which may be beyond the largest number of float16."""
    products = select_dense(device, dtype)
    if products is None or not products.are_compiled or is_encoder(hf_config):
        return False
    config = decoder_config(hf_config)
    return config.moe is None and not isinstance(config, TransformersConfig)


def _fast_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu_has_bf16_products() else torch.float32


def cpu_has_bf16_products() -> bool:
    """Return whether the CPU is known to multiply bfloat16 in hardware (AVX-512 BF16, AMX, Arm's BF16)."""
    try:
        with _CPU_INFO.open() as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return not _BF16_FLAGS.isdisjoint(flags.split())
