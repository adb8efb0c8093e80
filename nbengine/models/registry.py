"""From a resolved `ModelConfig` to a model on a device: device, dtype and architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nbengine.config import ModelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import ALONE, RankLayout
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.models.bert import BertModel
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.decoder_classifier import make_decoder
from nbengine.models.decoder_config import decoder_config
from nbengine.models.encoder_config import encoder_config, is_encoder
from nbengine.models.hf_config import load_hf_config
from nbengine.models.loader import load_decoder, load_encoder
from nbengine.models.progress import ProgressCallback, Reporter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_INFO = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def resolve_device(config: ModelConfig) -> torch.device:
    """The device that `config.device` means here; "auto" is CUDA where there is one.

    Raises:
        InvalidArgumentError: CUDA is asked for but not available.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise InvalidArgumentError("device", config.device, "'auto' or 'cpu' (no CUDA device is available)")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def resolve_dtype(config: ModelConfig, hf_config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and KV cache.

    "auto" is the checkpoint's own type for safetensors, and for GGUF files, whose blocks have none, the
    16-bit type that the device computes fast, else float32. A type that the device has no fast products for
    gives way: bfloat16 to float16 on older GPUs, float16 to float32 (exactly) on the CPU.

    Raises:
        ModelLoadError: config.json states a type that is not a floating-point type we know.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if any(path.lower().endswith(".gguf") for path in config.weights):
        return _fast_dtype(device)
    stated = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    dtype = _DTYPES.get(str(stated).removeprefix("torch."))
    if dtype is None:
        raise ModelLoadError(f"config.json: dtype must be one of {', '.join(_DTYPES)}, got {stated!r}")
    if device.type == "cpu" and dtype is torch.float16:
        return torch.float32
    if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        return torch.float16
    return dtype


def load_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback | None = None,
    parallel: ParallelState = SINGLE,
) -> DecoderForCausalLM:
    """Load a rank's weights of a resolved decoder; `progress` gets messages of the stage "load".

    Raises:
        ModelLoadError: the architecture is not supported, or the files are corrupt or do not fit together.
    """
    return load_decoder(
        decoder_config(load_hf_config(config)),
        tuple(map(Path, config.weights)),
        dtype=dtype,
        device=device,
        max_positions=config.max_model_len,
        report=Reporter(progress, "load"),
        parallel=parallel,
    )


def make_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback | None = None,
    parallel: ParallelState = SINGLE,
) -> DecoderForCausalLM:
    """A resolved decoder like that of `load_model` whose weights are all 0 as yet.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    Reporter(progress, "load")("making room for the weights")
    hf_config = decoder_config(load_hf_config(config))
    model = make_decoder(
        hf_config, dtype=dtype, device=device, max_positions=config.max_model_len, parallel=parallel
    )
    with torch.inference_mode():
        for weight in model.parameters():
            weight.zero_()
    return model


def load_encoder_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback | None = None,
) -> BertModel:
    """Load the weights of a resolved encoder; raises as `load_model` does."""
    return load_encoder(
        encoder_config(load_hf_config(config)),
        tuple(map(Path, config.weights)),
        dtype=dtype,
        device=device,
        report=Reporter(progress, "load"),
    )


def weights_bytes_of(hf_config: Mapping[str, Any], dtype: torch.dtype, layout: RankLayout = ALONE) -> int:
    """Bytes that a rank's weights will take; nothing is loaded for it.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    nowhere = torch.device("meta")
    if is_encoder(hf_config):
        return BertModel(encoder_config(hf_config), dtype=dtype, device=nowhere).weights_bytes
    config = decoder_config(hf_config)
    parallel = ParallelState(layout)
    return make_decoder(config, dtype=dtype, device=nowhere, max_positions=1, parallel=parallel).weights_bytes


def _fast_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu_has_bf16_products() else torch.float32


def cpu_has_bf16_products() -> bool:
    """Whether the CPU is known to multiply bfloat16 in hardware (AVX-512 BF16, AMX, Arm's BF16)."""
    try:
        with _CPU_INFO.open() as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return not _BF16_FLAGS.isdisjoint(flags.split())
