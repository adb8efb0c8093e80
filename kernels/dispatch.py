"""Which kernels run a model: decided once, from the device and the data type."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from nbengine.errors import InvalidArgumentError
from nbengine.worker.attention_metadata import AttentionMetadata

if TYPE_CHECKING:
    from nbengine.kernels.penalties_cpu import CpuPenalties

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REASONS = {
    "cpu": "llvmlite is not installed, or the processor lacks an instruction",
    "cuda": "triton is not installed",
}


class Kernels(Protocol):
    """The operations on the paged KV cache of one layer.

    The cache is one tensor `[2, num_blocks, num_kv_heads, block_size, head_dim]` of the model's data type,
    contiguous; index 0 holds keys, 1 values. A block's contents are the kernels' own affair: where
    `keys_transposed` is set, its keys are stored `[head_dim, block_size]`.
    """

    name: str
    keys_transposed: bool

    def warm_up(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        """Compile what a model of this shape needs, so that its first step does not wait for it."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store keys and values, both [T, num_kv_heads, head_dim], at distinct slots, [T] int64.

        Slot s is offset s % block_size of block s // block_size; a token with a negative slot is skipped.
        """

    def paged_attention(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        """Causal attention of queries [T, num_heads, head_dim] over their requests' cached tokens.

        A request's last query is at position `seq_lens[b] - 1`; query head h reads KV head
        h // (num_heads // num_kv_heads). Returns [T, num_heads, head_dim], contiguous.
        """


class ExpertKernels(Protocol):
    """The feed-forward blocks of a mixture of experts."""

    name: str

    def warm_up(self, gate_up: torch.Tensor, down: torch.Tensor, experts_per_token: int) -> None:
        """Compile what blocks with weights of these shapes need, so that no step waits for it."""

    def experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        """The sum over each token's experts e of weight * down[e](silu(gate[e](x)) * up[e](x)), [T, hidden].

        x is [T, hidden], T >= 1, gate_up [E, 2 * inner, hidden] with the rows of the gate first, down
        [E, hidden, inner], of the model's data type; weights, float32, and experts, int64, are [T, experts_per_token].
        A token's experts are all different, but for the number E, which stands for experts that are elsewhere and add
        nothing.
        """


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that this installation has for a device and data type.

    On the CPU kernels compiled with llvmlite, on CUDA those of Triton; where they are missing, and on other
    devices, plain torch, with a warning. They serve one model on one thread.

    Raises:
        InvalidArgumentError: `dtype` is not float32, bfloat16 or float16.
    """
    if dtype not in DTYPES:
        raise InvalidArgumentError("dtype", dtype, "float32, bfloat16 or float16")
    if device.type == "cpu" and _installed("llvmlite"):
        from nbengine.kernels.cpu_backend import CpuKernels, supports

        if supports(dtype):
            return CpuKernels(dtype)
    if device.type == "cuda" and _installed("triton"):
        from nbengine.kernels.triton_backend import TritonKernels

        return TritonKernels(device, dtype)
    from nbengine.kernels.torch_backend import TorchKernels

    reason = _REASONS.get(device.type, "there are no kernels for this device")
    logger.warning("attention in %s on %s runs through plain torch, which is slow: %s", dtype, device, reason)
    return TorchKernels()


def select_expert_kernels(device: torch.device, dtype: torch.dtype) -> ExpertKernels:
    """The fastest expert kernels that this installation has for a device and data type.

    Raises:
        InvalidArgumentError: `dtype` is not float32, bfloat16 or float16.
    """
    if dtype not in DTYPES:
        raise InvalidArgumentError("dtype", dtype, "float32, bfloat16 or float16")
    if device.type == "cuda" and _installed("triton"):
        from nbengine.kernels.experts_triton import TritonExperts

        return TritonExperts()
    from nbengine.kernels.experts_torch import TorchExperts

    if device.type == "cuda":
        logger.warning("experts on %s run through plain torch, which is slow: %s", device, _REASONS["cuda"])
    return TorchExperts()


@cache
def select_penalties(device: torch.device) -> CpuPenalties | None:
    """Compiled penalties for a device; None where plain torch applies them, as on every GPU."""
    if device.type != "cpu" or not _installed("llvmlite"):
        return None
    from nbengine.kernels.penalties_cpu import CpuPenalties

    return CpuPenalties()


def shares_memory() -> bool:
    """Whether ranks on this machine can exchange tensors through shared memory; else torch.distributed does it."""
    if not _installed("llvmlite"):
        logger.warning("workers exchange tensors through gloo, which is slow: llvmlite is not installed")
        return False
    from nbengine.kernels.cpu_flags import available

    return available()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
