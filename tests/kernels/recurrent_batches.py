"""Steps for the tests of recurrent kernels: states that a request may read, NaN everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nbengine.kernels import recurrent_reference as reference
from nbengine.kernels.dispatch import RecurrentKernels
from nbengine.kernels.recurrent_metadata import (
    NO_SOURCE,
    Checkpoints,
    RecurrentMetadata,
    build_recurrent_metadata,
)

NAN = float("nan")
PRECISION = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Request:
    """A request of a step: its new tokens, what it starts from ("zeros", "own" or "other"), and after how many tokens
    its state is kept as well."""

    tokens: int
    start: str = "own"
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True)
class Heads:
    """The sizes of a delta rule."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 48


@dataclass(frozen=True)
class Space:
    """The sizes of a state space."""

    groups: int = 2
    heads: int = 4
    state_size: int = 32
    head_dim: int = 48


@dataclass
class Step:
    """A step's metadata; `sources` are the slots that it reads."""

    metadata: RecurrentMetadata
    generator: torch.Generator
    device: str
    read: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, kernels: RecurrentKernels, requests: Sequence[Request], seed: int = 0, device: str = "cpu"
    ) -> Step:
        """Make a step of requests, those of one token first, with slots in random order."""
        count = sum(2 + len(request.checkpoints) for request in requests) + 2
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(count, generator=generator).tolist()
        slots = [free.pop() for _ in requests]
        sources = [
            {"zeros": NO_SOURCE, "own": slot}.get(request.start, free[-1 - number])
            for number, (request, slot) in enumerate(zip(requests, slots, strict=True))
        ]
        del free[len(free) - len(requests) :]
        kept = [(n, end, free.pop()) for n, request in enumerate(requests) for end in request.checkpoints]
        columns = np.array(kept, np.int32).reshape(-1, 3)[
            torch.randperm(len(kept), generator=generator).numpy()
        ]
        metadata = build_recurrent_metadata(
            np.array([request.tokens for request in requests], np.int32),
            np.array(slots, np.int32),
            np.array(sources, np.int32),
            Checkpoints(*columns.T),
            num_slots=count,
            kernels=kernels,
            device=torch.device(device),
        )
        return cls(metadata, generator, device, [slot for slot in sources if slot != NO_SOURCE])

    def states(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return states that are NaN but for those that the step reads."""
        states = torch.full((self.metadata.num_slots, *shape), NAN, dtype=dtype)
        for slot in self.read:
            states[slot] = torch.randn(shape, generator=self.generator)
        return states.to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)


def on_cpu(metadata: RecurrentMetadata) -> RecurrentMetadata:
    """Return metadata for the reference."""
    names = RecurrentMetadata.__dataclass_fields__
    values: dict[str, Any] = {name: getattr(metadata, name) for name in names}
    return RecurrentMetadata(**{n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in values.items()})


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Compare numbers that were rounded to a type; NaN has to be where it is expected."""
    tolerance = scale * (4e-6 + PRECISION[dtype])
    torch.testing.assert_close(
        actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def check_convolution(
    step: Step,
    channels: int,
    kernel: int,
    *,
    silu: bool = True,
    has_bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare a convolution with the reference: its results, and all slots."""
    weight, joint = (
        step.normal(channels, kernel, dtype=dtype),
        step.normal(step.metadata.num_tokens, channels + 5),
    )
    x = joint.to(dtype)[:, 3 : 3 + channels]
    bias = step.normal(channels, dtype=dtype) if has_bias else None
    conv = step.states(channels, kernel - 1, dtype=dtype)
    expected_conv = conv.cpu().clone()
    expected = reference.short_convolution(
        x.cpu(),
        weight.cpu(),
        None if bias is None else bias.cpu(),
        expected_conv,
        on_cpu(step.metadata),
        silu=silu,
    )
    output = step.metadata.kernels.short_convolution(x, weight, bias, conv, step.metadata, silu=silu)
    assert output.dtype is dtype
    assert output.is_contiguous()
    assert not output.isnan().any()
    assert_near(output, expected, dtype)
    torch.testing.assert_close(conv.cpu(), expected_conv, rtol=0, atol=0, equal_nan=True)


def delta_inputs(step: Step, heads: Heads, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return query, key and value, views of one tensor, decay and beta."""
    tokens = step.metadata.num_tokens
    sizes = [heads.key_heads * heads.key_dim] * 2 + [heads.value_heads * heads.value_dim]
    joint = step.normal(tokens, sum(sizes) + 3, dtype=dtype)
    query, key, value, _ = joint.split([*sizes, 3], dim=1)
    return [
        query.view(tokens, heads.key_heads, heads.key_dim),
        key.view(tokens, heads.key_heads, heads.key_dim),
        value.view(tokens, heads.value_heads, heads.value_dim),
        -torch.nn.functional.softplus(step.normal(tokens, heads.value_heads)),
        step.normal(tokens, heads.value_heads).sigmoid(),
    ]


def check_delta_rule(
    step: Step,
    heads: Heads,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """Compare a delta rule with the reference: its results, and all slots, as precisely as of `state_dtype`."""
    inputs = delta_inputs(step, heads, dtype)
    state = step.states(heads.value_heads, heads.key_dim, heads.value_dim)
    expected_state = state.cpu().clone()
    expected = reference.gated_delta_rule(*(x.cpu() for x in inputs), expected_state, on_cpu(step.metadata))
    output = step.metadata.kernels.gated_delta_rule(*inputs, state, step.metadata)
    assert output.dtype is dtype
    assert output.is_contiguous()
    assert not output.isnan().any()
    assert_near(output, expected, dtype, scale)
    assert_near(state, expected_state, state_dtype, scale)


def space_inputs(step: Step, sizes: Space, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return x, dt, b and c, those of hidden states views of one tensor, rate and skip."""
    tokens = step.metadata.num_tokens
    widths = [sizes.heads * sizes.head_dim, *[sizes.groups * sizes.state_size] * 2]
    x, b, c, _ = step.normal(tokens, sum(widths) + 3, dtype=dtype).split([*widths, 3], dim=1)
    return [
        x.view(tokens, sizes.heads, sizes.head_dim),
        torch.nn.functional.softplus(step.normal(tokens, sizes.heads) - 1),
        b.view(tokens, sizes.groups, sizes.state_size) * sizes.state_size**-0.5,
        c.view(tokens, sizes.groups, sizes.state_size),
        -step.normal(sizes.heads).exp(),
        step.normal(sizes.heads),
    ]


def check_state_space(
    step: Step,
    sizes: Space,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 4.0,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """Compare a state space with the reference: its results, and all slots, as precisely as of `state_dtype`."""
    inputs = space_inputs(step, sizes, dtype)
    state = step.states(sizes.heads, sizes.state_size, sizes.head_dim)
    expected_state = state.cpu().clone()
    expected = reference.state_space(*(x.cpu() for x in inputs), expected_state, on_cpu(step.metadata))
    output = step.metadata.kernels.state_space(*inputs, state, step.metadata)
    assert output.dtype is dtype
    assert output.is_contiguous()
    assert not output.isnan().any()
    assert_near(output, expected, dtype, scale)
    assert_near(state, expected_state, state_dtype, scale)
