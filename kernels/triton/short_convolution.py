"""The short causal convolution in Triton. One kernel convolves, and a second one, when all have read the states, keeps
the last inputs."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nbengine.kernels.recurrent_metadata import RecurrentMetadata

TOKENS = 16
COLUMNS = 128


@triton.jit
def _input(
    x, conv, begin, token, channel, source, present, x_stride, CHANNELS: tl.constexpr, KERNEL: tl.constexpr
):
    """Load a request's inputs at tokens of this step, or before it, where they are negative."""
    # A request that begins has no tokens before this step.
    oldest = (source >= 0).to(tl.int32) * (1 - KERNEL)
    inside = present & (channel < CHANNELS)
    place = (begin + token).to(tl.int64) * x_stride + channel
    now = tl.load(x + place, mask=inside & (token >= 0), other=0.0)
    kept = (source * CHANNELS + channel) * (KERNEL - 1) + (KERNEL - 1 + token)
    before = tl.load(conv + kept, mask=inside & (token < 0) & (token >= oldest), other=0.0)
    return tl.where(token >= 0, now, before)


@triton.jit(do_not_specialize=["first_request", "x_stride"])
def convolve_kernel(
    output,
    x,
    weight,
    bias,
    conv,
    query_start_loc,
    sources,
    first_request,
    x_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Convolve, on the grid (tiles of tokens, blocks of channels, requests)."""
    request = tl.program_id(2) + first_request
    begin = tl.load(query_start_loc + request)
    length = tl.load(query_start_loc + request + 1) - begin
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    source = tl.load(sources + request).to(tl.int64)
    present = token < length
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for place in tl.static_range(KERNEL):
        at = token - (KERNEL - 1) + place
        number = _input(x, conv, begin, at, channel, source, present, x_stride, CHANNELS, KERNEL)
        factor = tl.load(weight + channel * KERNEL + place, mask=channel < CHANNELS, other=0.0)
        total += number.to(tl.float32) * factor.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    target = output + (begin + token).to(tl.int64) * CHANNELS + channel
    tl.store(target, total.to(output.dtype.element_ty), mask=present & (channel < CHANNELS))


@triton.jit(do_not_specialize=["x_stride"])
def keep_kernel(
    x,
    conv,
    query_start_loc,
    slots,
    sources,
    checkpoint_start_loc,
    checkpoint_ends,
    checkpoint_slots,
    x_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Keep the last inputs of a request, and those at its checkpoints, on the grid (blocks of channels, requests).

    The own slot is written last, and in ascending order: where it is the source as well, nothing is read behind what
    was written.
    """
    request = tl.program_id(1)
    begin = tl.load(query_start_loc + request)
    length = tl.load(query_start_loc + request + 1) - begin
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(sources + request).to(tl.int64)
    last = tl.load(checkpoint_start_loc + request + 1)
    for number in range(tl.load(checkpoint_start_loc + request), last + 1):
        end = length
        own = tl.load(slots + request)
        if number < last:
            end = tl.load(checkpoint_ends + number)
            own = tl.load(checkpoint_slots + number)
        slot = own.to(tl.int64)
        for place in tl.static_range(KERNEL - 1):
            token = end - (KERNEL - 1) + place + channel * 0
            numbers = _input(
                x, conv, begin, token, channel, source, token < length, x_stride, CHANNELS, KERNEL
            )
            target = conv + (slot * CHANNELS + channel) * (KERNEL - 1) + place
            tl.store(target, numbers, mask=channel < CHANNELS)


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: torch.Tensor,
    metadata: RecurrentMetadata,
    *,
    silu: bool,
) -> torch.Tensor:
    """See `nbengine.kernels.dispatch.RecurrentKernels.short_convolution`."""
    channels, kernel = weight.shape
    output = torch.empty((metadata.num_tokens, channels), dtype=x.dtype, device=x.device)
    blocks, decodes = triton.cdiv(channels, COLUMNS), metadata.num_decodes
    parts = ((0, decodes, 1), (decodes, metadata.num_reqs - decodes, TOKENS))
    for first, count, size in parts:
        if not count:
            continue
        tiles = triton.cdiv(metadata.max_query_len, size) if size > 1 else 1
        convolve_kernel[(tiles, blocks, count)](
            output,
            x,
            weight,
            weight if bias is None else bias,
            conv,
            metadata.query_start_loc,
            metadata.sources,
            first,
            x.stride(0),
            CHANNELS=channels,
            KERNEL=kernel,
            TOKENS=size,
            COLUMNS=COLUMNS,
            HAS_BIAS=bias is not None,
            SILU=silu,
            enable_fp_fusion=True,
        )
    keep_kernel[(blocks, metadata.num_reqs)](
        x,
        conv,
        metadata.query_start_loc,
        metadata.slots,
        metadata.sources,
        metadata.checkpoint_start_loc,
        metadata.checkpoint_ends,
        metadata.checkpoint_slots,
        x.stride(0),
        CHANNELS=channels,
        KERNEL=kernel,
        COLUMNS=COLUMNS,
    )
    return output
