"""The element of kernels for each of torch's types, and which of them this processor has."""

from __future__ import annotations

import torch

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.jit import host_processor

ELEMENTS = {
    torch.float32: Element.FLOAT32,
    torch.bfloat16: Element.BFLOAT16,
    torch.float16: Element.FLOAT16,
}
"""The types in which rows are stored."""
TYPES = {element: dtype for dtype, element in ELEMENTS.items()} | {Element.INT8: torch.int8}
"""The type of torch of each element."""


def supports(dtype: torch.dtype) -> bool:
    """Return whether there are kernels for rows of type `dtype` on this processor."""
    return dtype in ELEMENTS and (dtype != torch.float16 or host_processor().converts_float16)
