"""The results that the recurrent kernels must compute, token by token in float64: the oracle of their tests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nbengine.kernels.recurrent_metadata import NO_SOURCE, RecurrentMetadata

L2_EPS = 1e-6
"""The number that is added to the sum of squares of a query or key before its root is taken."""


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv: Tensor, metadata: RecurrentMetadata, *, silu: bool
) -> Tensor:
    """Do what `RecurrentKernels.short_convolution` does; the result is float64."""
    output = torch.full(x.shape, float("nan"), dtype=torch.float64)
    for request, tokens, source in _requests(metadata):
        window = (
            torch.zeros(conv.shape[1:], dtype=conv.dtype) if source == NO_SOURCE else conv[source].clone()
        )
        for count, token in enumerate(tokens, 1):
            seen = torch.cat((window, x[token].to(conv.dtype)[:, None]), dim=1)
            result = (seen.double() * weight.double()).sum(1)
            if bias is not None:
                result += bias.double()
            output[token] = torch.nn.functional.silu(result) if silu else result
            window = seen[:, 1:]
            for slot in _slots_at(metadata, request, count, count == len(tokens)):
                conv[slot] = window
    return output


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    metadata: RecurrentMetadata,
) -> Tensor:
    """Do what `RecurrentKernels.gated_delta_rule` does; the result is float64."""
    group = value.shape[1] // key.shape[1]
    query, key = (_normalised(x.double()).repeat_interleave(group, dim=1) for x in (query, key))
    query = query * query.shape[2] ** -0.5
    value, decay, beta = value.double(), decay.double().exp(), beta.double()
    output = torch.full(value.shape, float("nan"), dtype=torch.float64)
    for request, tokens, source in _requests(metadata):
        matrix = state[source].double() if source != NO_SOURCE else torch.zeros(state.shape[1:]).double()
        for count, token in enumerate(tokens, 1):
            matrix = matrix * decay[token][:, None, None]
            known = torch.einsum("hkv,hk->hv", matrix, key[token])
            change = (value[token] - known) * beta[token][:, None]
            matrix = matrix + torch.einsum("hk,hv->hkv", key[token], change)
            output[token] = torch.einsum("hkv,hk->hv", matrix, query[token])
            for slot in _slots_at(metadata, request, count, count == len(tokens)):
                state[slot] = matrix
    return output


def state_space(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rate: Tensor,
    skip: Tensor,
    state: Tensor,
    metadata: RecurrentMetadata,
) -> Tensor:
    """Do what `RecurrentKernels.state_space` does; the result is float64."""
    group = x.shape[1] // b.shape[1]
    b, c = (y.double().repeat_interleave(group, dim=1) for y in (b, c))
    x, dt, rate, skip = (y.double() for y in (x, dt, rate, skip))
    output = torch.full(x.shape, float("nan"), dtype=torch.float64)
    for request, tokens, source in _requests(metadata):
        matrix = state[source].double() if source != NO_SOURCE else torch.zeros(state.shape[1:]).double()
        for count, token in enumerate(tokens, 1):
            added = torch.einsum("hn,hp->hnp", b[token], dt[token][:, None] * x[token])
            matrix = (dt[token] * rate).exp()[:, None, None] * matrix + added
            output[token] = torch.einsum("hn,hnp->hp", c[token], matrix) + skip[:, None] * x[token]
            for slot in _slots_at(metadata, request, count, count == len(tokens)):
                state[slot] = matrix
    return output


def _normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _requests(metadata: RecurrentMetadata) -> Iterator[tuple[int, range, int]]:
    """Yield each request with its tokens and its source."""
    starts = metadata.query_start_loc.tolist()
    for request, source in enumerate(metadata.sources.tolist()):
        yield request, range(starts[request], starts[request + 1]), source


def _slots_at(metadata: RecurrentMetadata, request: int, count: int, is_last: bool) -> Iterator[int]:
    """Yield the slots that get the state of a request after `count` of its tokens."""
    columns = (metadata.checkpoint_requests, metadata.checkpoint_ends, metadata.checkpoint_slots)
    for owner, end, slot in zip(*(column.tolist() for column in columns), strict=True):
        if (owner, end) == (request, count):
            yield slot
    if is_last:
        yield int(metadata.slots[request])
