"""The arguments of the products of a program, which depend on the weight alone: callers add rows and memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nbengine.kernels.cpu.products import GatedArguments, ProductArguments
from nbengine.kernels.cpu.quantized import share_size
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.cpu.vectors import UNGATED, Activation
from nbengine.kernels.quantized import SPAN
from nbengine.models.layers.weights import PackedWeight, Weight

_LINE = 64


def are_packed(weights: Sequence[Weight]) -> bool:
    """Return whether all weights are quantised."""
    return all(isinstance(weight, PackedWeight) for weight in weights)


def layout_of(weight: PackedWeight) -> RecordLayout:
    """Return the layout of the records that are multiplied with a weight."""
    return RecordLayout(weight.activation_bits)


def record_bytes(weight: Weight) -> int:
    """Return the bytes of a rounded row that is multiplied with a weight: none if it is dense."""
    return weight.shape[1] // SPAN * layout_of(weight).bytes if isinstance(weight, PackedWeight) else 0


def product_arguments(
    weight: PackedWeight, num_threads: int, records: Tensor, target: Tensor
) -> ProductArguments:
    """Return the arguments of the product of `records` with a weight into `target`; their addresses are left out."""
    tiles = weight.tensor.shape[0]
    size = share_size(tiles, num_threads)
    return ProductArguments(
        items=-(-tiles // size),
        item_size=size,
        tiles=tiles,
        spans=weight.shape[1] // SPAN,
        weight=weight.tensor.data_ptr(),
        tile_bytes=weight.tensor.stride(0),
        record_stride=row_bytes(records),
        output_stride=row_bytes(target),
        out_features=weight.rows,
    )


def gated_arguments(
    weight: PackedWeight, activation: Activation, num_threads: int, records: Tensor, target: Tensor
) -> GatedArguments:
    """Return the arguments of the gated product of `records` with gate and other projection, one weight, into the
    records `target`; their addresses are left out. An activation without a gate has the other projection alone."""
    halves = 1 if activation in UNGATED else 2
    pairs, tile_bytes = weight.rows // halves // SPAN, weight.tensor.stride(0)
    size = share_size(pairs, num_threads)
    return GatedArguments(
        items=-(-pairs // size),
        item_size=size,
        pairs=pairs,
        spans=weight.shape[1] // SPAN,
        gate=weight.tensor.data_ptr(),
        up=weight.tensor.data_ptr() + weight.tensor.shape[0] // 2 * tile_bytes * (halves - 1),
        tile_bytes=tile_bytes,
        record_stride=row_bytes(records),
        output_stride=row_bytes(target),
    )


def row_bytes(tensor: Tensor) -> int:
    """Return the bytes from one row to the next."""
    return tensor.stride(0) * tensor.element_size()


def aligned(memory: Tensor) -> int:
    """Return the address of the first cache line that lies in memory whole."""
    return -(-memory.data_ptr() // _LINE) * _LINE
