"""The trials of products with quantised weights, and of what they need: see `nbengine.kernels.cpu.trials`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.elements import TYPES
from nbengine.kernels.cpu.integers import LANES, QuadProduct
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.products import GatedArguments, ProductArguments
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.cpu.taken_rows import TakeArguments
from nbengine.kernels.cpu.trials import Trial, is_near, poisoned, random_numbers
from nbengine.kernels.cpu.vectors import Activation
from nbengine.kernels.quantized import SPAN, Format, dense

_ROWS = 15
"""Rows that are multiplied 8, 4, 2 at a time and alone."""
_FEATURES, _PART = 32, 20
_ERROR = 1e-6
"""The error of a sum in float32, as a part of the sum of its terms' sizes."""

ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, other: F.silu(gate) * other,
    "gelu_tanh": lambda gate, other: F.gelu(gate, approximate="tanh") * other,
    "sigmoid": lambda gate, other: gate.sigmoid() * other,
    "relu2": lambda gate, _: F.relu(gate).square(),
}
"""The gates of `nbengine.kernels.cpu.vectors.GATES` in torch."""


def activated(activation: Activation, gate: Tensor, other: Tensor) -> Tensor:
    """Return what `nbengine.kernels.cpu.vectors.gate_of` makes."""
    if isinstance(activation, str):
        return ACTIVATIONS[activation](gate, other)
    alpha, limit = activation
    gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    return (gate * alpha).sigmoid() * gate * (other + 1)


def try_round_rows(functions: Sequence[Function], layout: RecordLayout) -> Trial:
    """Try the function that makes records."""
    x = random_numbers(3, 2 * SPAN)
    x[1] = 0
    records = poisoned((3, 2, layout.bytes), torch.uint8)
    arguments = ProductArguments(
        items=1,
        rows=3,
        item_size=3,
        spans=2,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        records=records.data_ptr(),
        record_stride=records.stride(0),
    )
    yield [(functions[0], arguments)]
    return are_records_of(records, layout, x.double(), 1e-4)


def try_multiply(
    functions: Sequence[Function], form: Format, layout: RecordLayout, _: QuadProduct, has_bias: bool
) -> Trial:
    """Try the function that multiplies."""
    features = _FEATURES if has_bias else _PART
    data, weight = _random_weight(form, features, 1)
    records, x = _random_records(layout, weight.shape[1])
    bias, output = random_numbers(features, seed=2), poisoned((_ROWS, features), torch.float32)
    arguments = ProductArguments(
        items=1,
        rows=_ROWS,
        item_size=len(data),
        tiles=len(data),
        spans=records.shape[1],
        weight=data.data_ptr(),
        tile_bytes=data.stride(0),
        records=records.data_ptr(),
        record_stride=records.stride(0),
        output=output.data_ptr(),
        output_stride=output.stride(0) * output.element_size(),
        out_features=features,
        bias=bias.data_ptr(),
    )
    yield [(functions[0], arguments)]
    error = _ERROR * (x.abs() @ weight.abs().T).max()
    return is_near(output, x @ weight.T + bias.double() * has_bias, error)


def try_gated(
    functions: Sequence[Function],
    form: Format,
    layout: RecordLayout,
    _: QuadProduct,
    activation: Activation,
    has_bias: bool,
) -> Trial:
    """Try the function that multiplies with two weights and makes records."""
    (gate, gate_weight), (up, up_weight) = (_random_weight(form, _FEATURES, seed) for seed in (1, 2))
    records, x = _random_records(layout, gate_weight.shape[1])
    gate_bias, up_bias = (random_numbers(_FEATURES, seed=seed) for seed in (3, 4))
    output = poisoned((_ROWS, _FEATURES // SPAN, layout.bytes), torch.uint8)
    arguments = GatedArguments(
        items=1,
        rows=_ROWS,
        item_size=1,
        pairs=1,
        spans=records.shape[1],
        gate=gate.data_ptr(),
        up=up.data_ptr(),
        tile_bytes=gate.stride(0),
        records=records.data_ptr(),
        record_stride=records.stride(0),
        output=output.data_ptr(),
        output_stride=output.stride(0),
        gate_bias=gate_bias.data_ptr(),
        up_bias=up_bias.data_ptr(),
    )
    yield [(functions[0], arguments)]
    gates = x @ gate_weight.T + gate_bias.double() * has_bias
    others = x @ up_weight.T + up_bias.double() * has_bias
    return are_records_of(output, layout, activated(activation, gates, others), 1e-3)


def try_take_rows(functions: Sequence[Function], form: Format | Element, is_part: bool) -> Trial:
    """Try the function that takes rows of a weight."""
    if isinstance(form, Element):
        data = random_numbers(_PART, 3 * LANES, dtype=TYPES[form], seed=1)
        weight, cells, stride = data.double(), 3, data.stride(0) * data.element_size()
    else:
        data, weight = _random_weight(form, _PART, 1)
        cells, stride = data.shape[1], data.stride(0)
    ids = torch.tensor([0, _PART - 1, 7], dtype=torch.int64)
    output = poisoned((len(ids), weight.shape[1]), torch.float32)
    first = 5 if is_part else 0
    arguments = TakeArguments(
        items=len(ids),
        ids=ids.data_ptr(),
        cells=cells,
        weight=data.data_ptr(),
        tile_bytes=stride,
        output=output.data_ptr(),
        output_stride=output.stride(0) * output.element_size(),
        first=first,
        count=_PART,
    )
    yield [(functions[0], arguments)]
    expected = weight[(ids - first).clamp(min=0)]
    expected[ids < first] = 0
    return is_near(output, expected, _ERROR * weight.abs().max())


def _random_weight(form: Format, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a packed weight of two cells a row with all levels, and the weight, float64."""
    chance = torch.Generator().manual_seed(seed)
    shape = form.data_shape(rows, 2 * form.columns)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=chance)
    if form.is_micro:
        data[..., form.scales_at :].clamp_(120, 131)
    else:
        # What else a cell has are small integers, which may be any.
        start = form.supers_at if form.is_super else form.scales_at
        stop = form.minima_at if form.has_zero else form.cell_bytes
        halves = torch.randn(*shape[:2], (stop - start) // 2, generator=chance).half() / 64
        data[..., start:stop] = halves.view(torch.uint8)
    return data, dense(form, data, rows).double()


def _random_records(layout: RecordLayout, columns: int) -> tuple[Tensor, Tensor]:
    """Return records of some rows, [rows, spans, bytes], and the numbers that they stand for, float64."""
    spans = random_numbers(_ROWS, columns // SPAN, SPAN)
    scales = spans.abs().amax(-1, keepdim=True) / layout.largest
    levels = (spans / scales).round()
    planes = [levels]
    if layout.planes > 1:
        second = ((levels + 128) % 256 - 128).clamp(min=-127)
        planes = [((levels + 128) / 256).floor(), second]
        levels = planes[0] * 256 + second
    sums, first = levels.sum(-1, keepdim=True), levels[..., : SPAN // 2].sum(-1, keepdim=True)
    floats = torch.cat((scales, scales * sums, sums, first), -1)
    integers = torch.cat(planes, -1).to(torch.int8)
    records = torch.cat((integers.view(torch.uint8), floats.view(torch.uint8)), -1)
    return records, (levels.double() * scales.double()).view(_ROWS, columns)


def are_records_of(records: Tensor, layout: RecordLayout, x: Tensor, error: float) -> bool:
    """Return whether records hold rows of x, float64, which may be off by a part of the largest number."""
    integers = records[..., : layout.scale_at].view(torch.int8).double()
    levels = integers[..., :SPAN]
    if layout.planes > 1:
        levels = levels * 256 + integers[..., SPAN:]
    scale, scaled, total, first = records[..., layout.scale_at :].view(torch.float32).double().unbind(-1)
    spans = x.view(*levels.shape)
    largest = spans.abs().amax(-1)
    off = (levels * scale[..., None] - spans).abs().amax(-1)
    return bool(
        ((scale * layout.largest - largest).abs() <= error * x.abs().max()).all()
        and (off <= scale * (0.5 if layout.planes == 1 else 1.5) + error * x.abs().max()).all()
        and torch.equal(total, levels.sum(-1))
        and torch.equal(first, levels[..., : SPAN // 2].sum(-1))
        and is_near(scaled.float(), scale * total, 0.0)
    )
