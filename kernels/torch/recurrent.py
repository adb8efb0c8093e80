"""Short convolution, gated delta rule and state space in plain torch, for devices without their own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.kernels.recurrent_metadata import NO_SOURCE, RecurrentMetadata
from nbengine.kernels.recurrent_reference import L2_EPS

CHUNK = 64
"""The tokens whose changes of the state are computed together."""


@dataclass(frozen=True)
class _Segment:
    """A run of tokens of one request, `start` to `stop` in the batch, behind which states are kept in `slots`.

    `source` is that of the request's first segment, None of the others, which go on.
    """

    start: int
    stop: int
    source: int | None
    slots: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    segments: tuple[_Segment, ...]
    """The requests beside the decodes."""
    decode_checkpoints: int
    """The first checkpoints are those of decodes, each after the one token."""


class TorchRecurrent:
    """Kernels that compute all decodes at once, and the other requests one by one, in chunks of tokens."""

    name = "torch"

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv: Tensor,
        metadata: RecurrentMetadata,
        *,
        silu: bool,
    ) -> Tensor:
        """See `nbengine.kernels.dispatch.RecurrentKernels.short_convolution`."""
        plan, decodes, factors = _plan_of(metadata), metadata.num_decodes, weight.float()
        output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if decodes:
            seen = torch.cat((_starts(conv, metadata), x[:decodes, :, None]), dim=2)
            output[:decodes] = (seen.float() * factors).sum(2)
            _keep_decodes(conv, seen[:, :, 1:], metadata, plan)
        window = conv[0]
        for segment in plan.segments:
            if segment.source is not None:
                window = _start(conv, segment.source)
            seen = torch.cat((window, x[segment.start : segment.stop].T), dim=1)
            convolved = F.conv1d(seen.float()[None], factors[:, None], groups=len(weight))
            output[segment.start : segment.stop] = convolved[0].T
            window = seen[:, seen.shape[1] - conv.shape[2] :]
            for slot in segment.slots:
                conv[slot] = window
        if bias is not None:
            output += bias.float()
        return (F.silu(output) if silu else output).to(x.dtype)

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        metadata: RecurrentMetadata,
    ) -> Tensor:
        """See `nbengine.kernels.dispatch.RecurrentKernels.gated_delta_rule`."""
        plan, decodes = _plan_of(metadata), metadata.num_decodes
        group = value.shape[1] // key.shape[1]
        query, key = (_normalised(x.float()).repeat_interleave(group, dim=1) for x in (query, key))
        query = query * query.shape[2] ** -0.5
        wide = value.float()
        output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        if decodes:
            rows = [x[:decodes] for x in (query, key, wide, decay, beta)]
            output[:decodes], matrices = _step(_starts(state, metadata), *rows)
            _keep_decodes(state, matrices, metadata, plan)
        matrix = state[0]
        for segment in plan.segments:
            if segment.source is not None:
                matrix = _start(state, segment.source)
            for first in range(segment.start, segment.stop, CHUNK):
                tokens = slice(first, min(first + CHUNK, segment.stop))
                rows = [x[tokens].transpose(0, 1) for x in (query, key, wide, decay, beta)]
                attended, matrix = _chunk(matrix, *rows)
                output[tokens] = attended.transpose(0, 1)
            for slot in segment.slots:
                state[slot] = matrix
        return output.to(value.dtype)

    def state_space(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        rate: Tensor,
        skip: Tensor,
        state: Tensor,
        metadata: RecurrentMetadata,
    ) -> Tensor:
        """See `nbengine.kernels.dispatch.RecurrentKernels.state_space`."""
        plan, decodes = _plan_of(metadata), metadata.num_decodes
        group = x.shape[1] // b.shape[1]
        wide, (b, c) = x.float(), (y.float().repeat_interleave(group, dim=1) for y in (b, c))
        added, decay = wide * dt[:, :, None], dt * rate
        output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if decodes:
            rows = (y[:decodes] for y in (b, c, added, decay))
            output[:decodes], matrices = _space_step(_starts(state, metadata), *rows)
            _keep_decodes(state, matrices, metadata, plan)
        matrix = state[0]
        for segment in plan.segments:
            if segment.source is not None:
                matrix = _start(state, segment.source)
            for first in range(segment.start, segment.stop, CHUNK):
                tokens = slice(first, min(first + CHUNK, segment.stop))
                rows = (y[tokens].transpose(0, 1) for y in (b, c, added, decay))
                seen, matrix = _space_chunk(matrix, *rows)
                output[tokens] = seen.transpose(0, 1)
            for slot in segment.slots:
                state[slot] = matrix
        return output.addcmul_(wide, skip[:, None]).to(x.dtype)


def _step(
    states: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Do one token of each request: [B, heads, size], decay and beta [B, heads]."""
    states = states * decay.exp()[:, :, None, None]
    known = torch.einsum("bhk,bhkv->bhv", key, states)
    change = (value - known) * beta[:, :, None]
    states = torch.addcmul(states, key[:, :, :, None], change[:, :, None, :])
    return torch.einsum("bhk,bhkv->bhv", query, states), states


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Do a chunk of one request's tokens together: [heads, tokens, size], decay and beta [heads, tokens].

    The changes that the tokens make to the state depend on each other through a triangular system, which is solved
    (Yang et al., 2024, Parallelizing linear transformers with the delta rule).
    """
    total = decay.cumsum(1)
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    since_start = total.exp()[:, :, None]
    coupling = beta[:, :, None] * (key @ key.transpose(1, 2)) * between
    wanted = beta[:, :, None] * (value - since_start * (key @ state))
    change = torch.linalg.solve_triangular(coupling, wanted, upper=False, unitriangular=True)
    output = since_start * (query @ state) + ((query @ key.transpose(1, 2)) * between) @ change
    to_end = (total[:, -1:] - total).exp()[:, :, None]
    return output, since_start[:, -1:] * state + (key * to_end).transpose(1, 2) @ change


def _space_step(states: Tensor, b: Tensor, c: Tensor, added: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Do one token of each request with the state space: b and c [B, heads, state_size], `added` [B, heads, head_dim],
    decay [B, heads]."""
    states = torch.addcmul(states * decay.exp()[:, :, None, None], b[:, :, :, None], added[:, :, None, :])
    return torch.einsum("bhn,bhnp->bhp", c, states), states


def _space_chunk(state: Tensor, b: Tensor, c: Tensor, added: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Do a chunk of one request's tokens with the state space: sizes as in `_space_step`, but heads before tokens."""
    total = decay.cumsum(1)
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    since_start = total.exp()[:, :, None]
    output = since_start * (c @ state) + ((c @ b.transpose(1, 2)) * between) @ added
    to_end = (total[:, -1:] - total).exp()[:, :, None]
    return output, since_start[:, -1:] * state + (b * to_end).transpose(1, 2) @ added


def _normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _start(states: Tensor, source: int) -> Tensor:
    return torch.zeros_like(states[0]) if source == NO_SOURCE else states[source]


def _starts(states: Tensor, metadata: RecurrentMetadata) -> Tensor:
    """Return the states from which the decodes start, in new memory."""
    sources = metadata.sources[: metadata.num_decodes]
    found = states[sources.clamp(min=0).long()]
    begins = (sources == NO_SOURCE).view(-1, *(1,) * (states.dim() - 1))
    return found.masked_fill_(begins, 0)


def _keep_decodes(states: Tensor, results: Tensor, metadata: RecurrentMetadata, plan: _Plan) -> None:
    states[metadata.slots[: metadata.num_decodes].long()] = results
    if count := plan.decode_checkpoints:
        owners = metadata.checkpoint_requests[:count].long()
        states[metadata.checkpoint_slots[:count].long()] = results[owners]


def _plan_of(metadata: RecurrentMetadata) -> _Plan:
    if not isinstance(metadata.plan, _Plan):
        places = metadata.checkpoint_start_loc.tolist()
        segments = tuple(_segments(metadata, places))
        metadata.plan = _Plan(segments, places[metadata.num_decodes])
    return metadata.plan


def _segments(metadata: RecurrentMetadata, places: list[int]) -> Iterator[_Segment]:
    starts, sources = metadata.query_start_loc.tolist(), metadata.sources.tolist()
    slots, kept = metadata.slots.tolist(), metadata.checkpoint_slots.tolist()
    ends = metadata.checkpoint_ends.tolist()
    for request in range(metadata.num_decodes, metadata.num_reqs):
        begin, end = starts[request], starts[request + 1]
        first = begin
        by_end: dict[int, list[int]] = {}
        for number in range(places[request], places[request + 1]):
            by_end.setdefault(begin + ends[number], []).append(kept[number])
        by_end.setdefault(end, []).append(slots[request])
        for stop, where in by_end.items():
            yield _Segment(first, stop, sources[request] if first == begin else None, tuple(where))
            first = stop
