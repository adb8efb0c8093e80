"""The trials of what a step computes beside a layer's products and attention: see `nbengine.kernels.cpu.trials`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.elements import TYPES
from nbengine.kernels.cpu.expert_steps import CombineArguments
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.largest import PARTS, LargestArguments
from nbengine.kernels.cpu.latent_rows import LatentRowArguments, LatentRowShape
from nbengine.kernels.cpu.norm_rounding import NormRoundArguments
from nbengine.kernels.cpu.product_trials import are_records_of
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.cpu.routing import ScoreArguments
from nbengine.kernels.cpu.row_trials import EPS, neighbours, other_halves, turned
from nbengine.kernels.cpu.trials import Trial, is_near, poisoned, random_numbers
from nbengine.kernels.quantized import SPAN

_ROWS, _FLOAT = 5, 4
_ERROR = 1e-5


def try_norm_round(functions: Sequence[Function], size: int, layout: RecordLayout, adds: bool) -> Trial:
    """Try the function that adds, normalises and rounds."""
    x, added = (random_numbers(_ROWS, size, seed=seed) for seed in (1, 2))
    weight, records = (
        random_numbers(size, seed=3),
        poisoned((_ROWS, size // SPAN, layout.bytes), torch.uint8),
    )
    total = x + added if adds else x.clone()
    arguments = NormRoundArguments(
        items=1,
        rows=_ROWS,
        x=x.data_ptr(),
        x_stride=x.stride(0) * _FLOAT,
        added=added.data_ptr(),
        added_stride=added.stride(0) * _FLOAT,
        weight=weight.data_ptr(),
        records=records.data_ptr(),
        record_stride=records.stride(0),
        eps=EPS,
    )
    yield [(functions[0], arguments)]
    expected = F.rms_norm(total.double(), weight.shape, weight.double(), EPS)
    return torch.equal(x, total) and are_records_of(records, layout, expected, 1e-4)


def try_latent_rows(functions: Sequence[Function], shape: LatentRowShape) -> Trial:
    """Try the function of the rows before attention over latents."""
    heads, rank, turns = shape.heads, shape.rank, shape.turned
    queries = random_numbers(_ROWS, heads, shape.plain + turns, seed=1)
    projected, weight = random_numbers(_ROWS, rank + turns, seed=2), random_numbers(rank, seed=3)
    angles, positions = random_numbers(7, 2 * turns, seed=4), torch.tensor([6, 0, 3, 3, 1], dtype=torch.int64)
    absorbed = torch.zeros(_ROWS, heads, rank + turns, dtype=torch.float32)
    output = poisoned((_ROWS, rank + turns), torch.float32)
    arguments = LatentRowArguments(
        items=_ROWS,
        rows=_ROWS,
        queries=queries.data_ptr(),
        query_stride=queries.stride(0) * _FLOAT,
        projected=projected.data_ptr(),
        projected_stride=projected.stride(0) * _FLOAT,
        weight=weight.data_ptr(),
        angles=angles.data_ptr(),
        angle_stride=angles.stride(0) * _FLOAT,
        positions=positions.data_ptr(),
        absorbed=absorbed.data_ptr(),
        absorbed_stride=absorbed.stride(0) * _FLOAT,
        output=output.data_ptr(),
        output_stride=output.stride(0) * _FLOAT,
        eps=EPS,
    )
    yield [(functions[0], arguments)]
    partners = neighbours if shape.has_pairs else other_halves

    def turn(x: Tensor) -> Tensor:
        return turned(x.double(), angles[positions].double(), partners)

    latents = F.rms_norm(projected[:, :rank].double(), (rank,), weight.double(), EPS)
    keys = torch.cat((latents, turn(projected[:, None, rank:])[:, 0]), 1)
    found = turn(queries[..., shape.plain :])
    return is_near(output, keys, _ERROR) and is_near(absorbed[..., rank:], found, _ERROR)


def try_scores(functions: Sequence[Function], element: Element) -> Trial:
    """Try the function of a router's product."""
    weight = random_numbers(7, 48, dtype=TYPES[element], seed=1)
    x, output = random_numbers(_ROWS, 48, seed=2), poisoned((_ROWS, 7), torch.float32)
    arguments = ScoreArguments(
        items=len(weight),
        rows=_ROWS,
        columns=weight.shape[1],
        x=x.data_ptr(),
        x_stride=x.stride(0) * _FLOAT,
        weight=weight.data_ptr(),
        output=output.data_ptr(),
        output_stride=output.stride(0) * _FLOAT,
    )
    yield [(functions[0], arguments)]
    return is_near(output, x.double() @ weight.double().T, _ERROR)


def try_combine(functions: Sequence[Function], size: int) -> Trial:
    """Try the function that sums experts' outputs."""
    outputs, weights = random_numbers(2 * _ROWS, size, seed=1), random_numbers(_ROWS, 2, seed=2)
    places = torch.arange(2 * _ROWS).flip(0).view(_ROWS, 2)
    sums = poisoned((_ROWS, size), torch.float32)
    arguments = CombineArguments(
        items=_ROWS,
        rows=_ROWS,
        per_token=2,
        weights=weights.data_ptr(),
        places=places.data_ptr(),
        outputs=outputs.data_ptr(),
        output_stride=outputs.stride(0) * _FLOAT,
        sums=sums.data_ptr(),
        sum_stride=sums.stride(0) * _FLOAT,
    )
    yield [(functions[0], arguments)]
    expected = (outputs[places].double() * weights.double()[..., None]).sum(1)
    return is_near(sums, expected, _ERROR)


def try_largest(functions: Sequence[Function]) -> Trial:
    """Try the functions that find the largest number of each row."""
    x = random_numbers(_ROWS, 301, seed=1)
    peaks, values = poisoned((_ROWS, PARTS), torch.float32), poisoned((_ROWS,), torch.float32)
    ids = torch.zeros(_ROWS, dtype=torch.int64)
    calls = [
        (
            function,
            LargestArguments(
                items=_ROWS,
                rows=_ROWS,
                parts=parts,
                width=x.shape[1],
                x=x.data_ptr(),
                x_stride=x.stride(0) * _FLOAT,
                peaks=peaks.data_ptr(),
                ids=ids.data_ptr(),
                values=values.data_ptr(),
            ),
        )
        for function, parts in zip(functions, (PARTS, 1), strict=True)
    ]
    yield calls
    expected, places = x.max(1)
    return torch.equal(values, expected) and torch.equal(ids, places)
