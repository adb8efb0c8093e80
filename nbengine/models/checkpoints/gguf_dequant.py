"""This module turns GGUF blocks into float32 values, with torch operations on the device that has the bytes.

The types that files are commonly made of are taken apart into levels and scales first; the values are bit for
bit those of the reference in the `gguf` package. That reference itself, on the CPU, serves the others.
"""

from __future__ import annotations

import gguf.quants
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import values
from nbengine.models.checkpoints.gguf_levels import format_of, levels_of

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


def dequantize(raw: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Return the values, flat, of the blocks in raw [num_bytes] uint8: float32, or the type of an unquantised
    tensor.

    Raises:
        ModelLoadError: there is no dequantisation of this type.
    """
    plain = _PLAIN.get(kind)
    if plain is not None:
        return raw.view(plain)
    form = format_of(kind)
    if form is None:
        return _reference(raw, kind)
    return values(form, levels_of(raw, kind, 1)).view(-1)


def _reference(raw: Tensor, kind: GGMLQuantizationType) -> Tensor:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        found = gguf.quants.dequantize(raw.view(-1, block_bytes).cpu().numpy(), kind)
    except NotImplementedError as error:
        raise ModelLoadError(f"tensors of ggml type {kind.name} cannot be dequantised") from error
    return torch.from_numpy(found).view(-1).to(raw.device)
