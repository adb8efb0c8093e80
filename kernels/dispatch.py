"""This module chooses the kernels that run a model: once, from the device and the data type."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.dense_kernels import select_dense
from nbengine.kernels.latent import LatentKernels
from nbengine.kernels.quantized_kernels import BlockPacker, QuantizedProducts
from nbengine.kernels.row_kernels import has_compiled_rows

if TYPE_CHECKING:
    from nbengine.kernels.cpu.penalties import CpuPenalties
    from nbengine.kernels.cpu.routing import CpuRouting
    from nbengine.kernels.cpu.row_calls import CpuSigmoidScale
    from nbengine.kernels.recurrent_metadata import RecurrentMetadata

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REASONS = {
    "cpu": "llvmlite is not installed, or the processor lacks an instruction",
    "cuda": "triton is not installed",
}


class Kernels(LatentKernels, Protocol):
    """The operations on the paged KV cache of one layer, and on the latents of a layer that has those instead.

    The cache is one contiguous tensor of the shape that `nbengine.kernels.kv_cache.cache_shape` gives for the type
    for which the kernels were selected; index 0 holds keys, 1 values. Only the kernels know a block's contents:
    where `keys_transposed` is set, its keys are stored `[head_dim, block_size]`, and behind the numbers of an int8
    cache lie their scales, float32 `[block_size]`.
    """

    name: str
    keys_transposed: bool

    def warm_up(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        options: AttentionOptions | None = None,
    ) -> None:
        """Compile what layers of this shape with these options (None: plain ones) need, so that the first step does
        not wait for it."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store keys and values, both [T, num_kv_heads, head_dim], at distinct slots, [T] int64.

        Slot s is offset s % block_size of block s // block_size; a token with a negative slot is skipped.
        """

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Compute causal attention of queries [T, num_heads, head_dim] over their requests' cached tokens, as
        `options` say.

        A request's last query is at position `seq_lens[b] - 1`; query head h reads KV head
        h // (num_heads // num_kv_heads). Returns [T, num_heads, head_dim], contiguous. Blocks of which no query of
        the batch sees a token are not read: their entries in the block table may be any number.
        """


class RecurrentKernels(Protocol):
    """The operations on the recurrent states of one layer.

    They start each request's state from its source and leave it in its slot, and at checkpoints, as
    `nbengine.kernels.recurrent_metadata.RecurrentMetadata` says; other slots stay as they are. A request's results do
    not depend on the others of the step.
    """

    name: str

    def short_convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv: torch.Tensor,
        metadata: RecurrentMetadata,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """Convolve each channel of each request over time, causally; then apply silu, if asked.

        x is [T, channels], its rows contiguous, weight [channels, kernel], contiguous, kernel >= 2, the last column
        that of the token itself, bias [channels]; the state `conv` [slots, channels, kernel - 1], contiguous, has the
        last inputs; all are of one type. Returns [T, channels], contiguous; arithmetic is in float32.
        """

    def gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        """Run the gated delta rule (Yang, Kautz and Hatamizadeh, 2025): for each token and head

            state = exp(decay) * state;  state += outer(key, beta * (value - key @ state));  output = query @ state

        with queries and keys divided by their norms, and queries by the root of their size.

        query and key are [T, key_heads, key_dim], value is [T, value_heads, value_dim], all of one type, each row's
        heads contiguous; value head h belongs to key head h // (value_heads // key_heads). decay (at most 0) and
        beta are float32 [T, value_heads], `state` float32 [slots, value_heads, key_dim, value_dim], contiguous.
        Returns [T, value_heads, value_dim] of the values' type, contiguous; arithmetic is in float32.
        """

    def state_space(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        rate: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        """Run the selective state space of Mamba-2 (Dao and Gu, 2024): for each token and head

            state = exp(dt * rate) * state;  state += outer(b, dt * x);  output = c @ state + skip * x

        x is [T, heads, head_dim], b and c are [T, groups, state_size], all of one type, each row's heads or groups
        contiguous; head h belongs to group h // (heads // groups). dt (at least 0) is float32 [T, heads], rate (at most
        0) and skip are float32 [heads], `state` float32 [slots, heads, state_size, head_dim], contiguous. Returns
        [T, heads, head_dim] of x's type, contiguous; arithmetic is in float32.
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
        """Return the sum over each token's experts e of weight * down[e](silu(gate[e](x)) * up[e](x)), [T,
        hidden].

        x is [T, hidden], T >= 1, gate_up [E, 2 * inner, hidden] with the rows of the gate first, down [E,
        hidden, inner], of the model's data type; weights, float32, and experts, int64, are [T,
        experts_per_token]. A token's experts are all different, but for the number E, which stands for
        experts that are elsewhere and add nothing.
        """


def select_kernels(
    device: torch.device, dtype: torch.dtype, hidden_dtype: torch.dtype | None = None
) -> Kernels:
    """Return the fastest kernels that this installation has for a device and the type of the KV cache.

    Queries, keys and values are of `hidden_dtype` (None: `dtype`, float32 for int8), and so is what attention
    returns.

    On the CPU these are kernels compiled with llvmlite, on CUDA those of Triton; where they are missing, and
    on other devices, plain torch, with a warning. They serve one model on one thread.

    Raises:
        InvalidArgumentError: `dtype` is not float32, bfloat16, float16 or int8, or it is int8, as `kv_cache_dtype` asks, and
            there are no kernels for it (`why_not_int8`).
    """
    if dtype is torch.int8:
        why_not = why_not_int8(device, hidden_dtype or torch.float32)
        if why_not is not None:
            raise InvalidArgumentError("kv_cache_dtype", "int8", f"'auto' on {device.type} ({why_not})")
    elif dtype not in DTYPES:
        raise InvalidArgumentError("dtype", dtype, "float32, bfloat16 or float16, or int8 on a CPU")
    if device.type == "cpu" and _installed("llvmlite"):
        from nbengine.kernels.cpu.backend import CpuKernels
        from nbengine.kernels.cpu.elements import supports

        if dtype is torch.int8 or supports(dtype):
            return CpuKernels(dtype, hidden_dtype)
    if device.type == "cuda" and _installed("triton"):
        from nbengine.kernels.triton.backend import TritonKernels

        return TritonKernels(device, dtype)
    from nbengine.kernels.torch.backend import TorchKernels

    reason = _REASONS.get(device.type, "there are no kernels for this device")
    logger.warning("attention in %s on %s runs through plain torch, which is slow: %s", dtype, device, reason)
    return TorchKernels()


def why_not_int8(device: torch.device, hidden_dtype: torch.dtype) -> str | None:
    """Return why a model with hidden states of a type cannot have an int8 KV cache on a device; None: it can."""
    if device.type != "cpu":
        return "only the CPU has kernels for an int8 KV cache"
    if _installed("llvmlite"):
        from nbengine.kernels.cpu.elements import supports

        if supports(hidden_dtype):
            return None
    return _REASONS["cpu"]


def attends_in_pairs(head_dim: int, block_size: int) -> bool:
    """Return whether attention on the CPU to a KV cache of bfloat16 multiplies pairs, which is the fastest way."""
    if not _installed("llvmlite"):
        return False
    from nbengine.kernels.cpu import attention_functions
    from nbengine.kernels.cpu.jit import host_processor

    return attention_functions.attends_in_pairs(host_processor(), head_dim, block_size)


def select_expert_kernels(device: torch.device, dtype: torch.dtype) -> ExpertKernels:
    """Return the fastest expert kernels that this installation has for a device and data type.

    Raises:
        InvalidArgumentError: `dtype` is not float32, bfloat16 or float16.
    """
    if dtype not in DTYPES:
        raise InvalidArgumentError("dtype", dtype, "float32, bfloat16 or float16")
    if device.type == "cuda" and _installed("triton"):
        from nbengine.kernels.triton.experts import TritonExperts

        return TritonExperts()
    from nbengine.kernels.torch.experts import TorchExperts

    if device.type == "cuda":
        logger.warning("experts on %s run through plain torch, which is slow: %s", device, _REASONS["cuda"])
    return TorchExperts(select_dense(device, dtype))


def select_recurrent_kernels(device: torch.device, dtype: torch.dtype) -> RecurrentKernels:
    """Return the fastest kernels for recurrent layers that this installation has for a device and the type of the
    hidden states.

    Raises:
        InvalidArgumentError: `dtype` is not float32, bfloat16 or float16.
    """
    if dtype not in DTYPES:
        raise InvalidArgumentError("dtype", dtype, "float32, bfloat16 or float16")
    if device.type == "cpu" and _installed("llvmlite"):
        from nbengine.kernels.cpu.elements import supports
        from nbengine.kernels.cpu.recurrent import CpuRecurrent

        if supports(dtype):
            return CpuRecurrent(dtype)
    if device.type == "cuda" and _installed("triton"):
        from nbengine.kernels.triton.recurrent import TritonRecurrent

        return TritonRecurrent()
    from nbengine.kernels.torch.recurrent import TorchRecurrent

    reason = _REASONS.get(device.type, "there are no kernels for this device")
    logger.warning(
        "recurrent layers in %s on %s run through plain torch, which is slow: %s", dtype, device, reason
    )
    return TorchRecurrent()


def select_products(device: torch.device) -> QuantizedProducts | None:
    """Return the products with quantised weights for a device; None where there are none, so that weights have
    to be dense."""
    if device.type != "cpu" or not _installed("llvmlite"):
        return None
    from nbengine.kernels.cpu.quantized import CpuProducts, supports_quantized

    return CpuProducts() if supports_quantized() else None


@cache
def select_block_packer(device: torch.device) -> BlockPacker | None:
    """Return the packer that brings GGUF blocks into the layout of quantised weights on a device; None where plain
    torch has to do it."""
    if device.type != "cpu" or not _installed("llvmlite"):
        return None
    from nbengine.kernels.cpu.block_packing import CpuBlockPacker, available

    return CpuBlockPacker() if available() else None


def select_routing(
    device: torch.device,
    hidden_size: int,
    experts: int,
    per_token: int,
    *,
    renormalize: bool,
    factors: torch.Tensor | None = None,
) -> CpuRouting | None:
    """Return the compiled choice of `per_token` of `experts`, with `factors` of their weights, float32 [experts], for
    hidden states in float32; None where plain torch has to do it."""
    if not has_compiled_rows(device, torch.float32, hidden_size):
        return None
    from nbengine.kernels.cpu.routing import CpuRouting

    return CpuRouting(experts, per_token, renormalize=renormalize, factors=factors)


def select_grouped_routing(
    device: torch.device,
    hidden_size: int,
    experts: int,
    per_token: int,
    *,
    renormalize: bool,
    is_sigmoid: bool,
    correction: torch.Tensor | None,
    groups: int,
    chosen_groups: int,
    factor: float,
) -> CpuRouting | None:
    """Return what `select_routing` does for experts in groups; see
    `nbengine.kernels.cpu.grouped_routing.CpuGroupedRouting`."""
    if not has_compiled_rows(device, torch.float32, hidden_size):
        return None
    from nbengine.kernels.cpu.grouped_routing import CpuGroupedRouting

    return CpuGroupedRouting(
        experts,
        per_token,
        renormalize=renormalize,
        is_sigmoid=is_sigmoid,
        correction=correction,
        groups=groups,
        chosen_groups=chosen_groups,
        factor=factor,
    )


def select_sigmoid_scale(device: torch.device, size: int) -> CpuSigmoidScale | None:
    """Return what multiplies rows of float32 with sigmoid of a number each; None where plain torch has to do it."""
    if not has_compiled_rows(device, torch.float32, size):
        return None
    from nbengine.kernels.cpu.row_calls import CpuSigmoidScale

    return CpuSigmoidScale(size)


def select_combine(
    device: torch.device, hidden_size: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the compiled sum of experts' outcomes in float32, `nbengine.kernels.cpu.expert_steps.CpuCombine`; None
    where plain torch has to do it."""
    if not has_compiled_rows(device, torch.float32, hidden_size):
        return None
    from nbengine.kernels.cpu.expert_steps import CpuCombine

    return CpuCombine(hidden_size)


@cache
def select_penalties(device: torch.device) -> CpuPenalties | None:
    """Return compiled penalties for a device; None where plain torch applies them, as on every GPU."""
    if device.type != "cpu" or not _installed("llvmlite"):
        return None
    from nbengine.kernels.cpu.penalties import CpuPenalties

    return CpuPenalties()


def shares_memory() -> bool:
    """Return whether ranks on this machine can exchange tensors through shared memory; else torch.distributed
    does it."""
    if not _installed("llvmlite"):
        logger.warning("workers cannot exchange tensors through shared memory: llvmlite is not installed")
        return False
    from nbengine.kernels.cpu.flags import available

    return available()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
