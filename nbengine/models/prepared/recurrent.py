"""The operations of layers with a recurrent state in a prepared step, between their projections."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.program import Program, places_of
from nbengine.kernels.cpu.recurrent import (
    compile_delta_rule,
    compile_short_convolution,
    compile_state_space,
    parts_of,
    plan_of,
)
from nbengine.kernels.cpu.recurrent_layout import RecurrentArguments
from nbengine.kernels.cpu.row_functions import DELTA_GATES, compile_rows
from nbengine.kernels.recurrent_metadata import RecurrentMetadata
from nbengine.models.configs.recurrent_config import Mamba2Config
from nbengine.models.layers.gated_convolution import GatedConvolution
from nbengine.models.layers.gated_delta_net import GatedDeltaNet, RecurrentState
from nbengine.models.layers.mamba2 import Mamba2Mixer
from nbengine.models.prepared.products import row_bytes
from nbengine.models.prepared.rows import Operation, row_operation

PreparedMixer = GatedDeltaNet | GatedConvolution | Mamba2Mixer
"""The recurrent blocks that prepared steps know."""

_AT = places_of(RecurrentArguments)


@dataclass(frozen=True, slots=True)
class RecurrentBuffers:
    """The memory in which the operations of all recurrent layers leave numbers for each other, float32."""

    projected: Tensor
    """[tokens, features]: what the first projection makes."""
    convolved: Tensor
    """[tokens, channels]"""
    gates: Tensor
    """[2, tokens, heads]: the decays and betas of the delta rule, or first the steps of a state space."""
    mixed: Tensor
    """[tokens, features]: what the last projection takes."""

    @classmethod
    def make(cls, mixer: PreparedMixer, tokens: int) -> RecurrentBuffers:
        """Allocate them for layers like this one and up to this number of tokens."""
        if isinstance(mixer, GatedConvolution):
            features, channels, heads, inner = 3 * mixer.channels, mixer.channels, 0, mixer.channels
        else:
            features, channels, heads = sum(mixer.split), mixer.split[0], mixer.heads
            inner = mixer.inner
        return cls(
            torch.empty(tokens, features, dtype=torch.float32),
            torch.empty(tokens, channels, dtype=torch.float32),
            torch.empty(2, tokens, heads, dtype=torch.float32),
            torch.empty(tokens, inner, dtype=torch.float32),
        )


def mixing(mixer: PreparedMixer, buffers: RecurrentBuffers) -> Iterator[Operation]:
    """Yield the operations from the first projection's outcome to what the last one takes."""
    if isinstance(mixer, GatedConvolution):
        yield from _gated_convolution(mixer, buffers)
    elif isinstance(mixer, Mamba2Mixer):
        yield from _state_space(mixer, buffers)
    else:
        yield from _delta_rule(mixer, buffers)


def _gated_convolution(mixer: GatedConvolution, buffers: RecurrentBuffers) -> Iterator[Operation]:
    before, after, inner = buffers.projected.chunk(3, dim=1)
    multiply = compile_rows("multiply", mixer.channels, Element.FLOAT32)
    yield row_operation(multiply, before, inner, before)
    yield _convolution(before, mixer.conv_weight, mixer.conv_bias, buffers.convolved, silu=False)
    yield row_operation(multiply, buffers.convolved, after, buffers.mixed)


def _delta_rule(mixer: GatedDeltaNet, buffers: RecurrentBuffers) -> Iterator[Operation]:
    rule, heads = mixer.rule, mixer.heads
    inputs, gate, beta, step = buffers.projected.split_with_sizes(mixer.split, dim=1)
    decay, betas = buffers.gates
    yield _convolution(inputs, mixer.conv_weight, None, buffers.convolved, silu=True)
    for name, source, target in zip(DELTA_GATES, (step, beta), (decay, betas), strict=True):
        function = compile_rows(name, heads, Element.FLOAT32)
        yield row_operation(function, source, mixer.gate_weights, target, repeats=True)
    query, key, value = buffers.convolved.split_with_sizes(mixer.sizes, dim=1)
    arguments = _matrix_arguments(heads, mixer.key_heads, query, key, value, buffers.mixed)
    arguments.decay, arguments.beta = decay.data_ptr(), betas.data_ptr()
    function, _ = compile_delta_rule(rule.key_dim, rule.value_dim, Element.FLOAT32)
    yield Operation(function, arguments, has_tokens=False)
    normalise = compile_rows("rms_norm_heads", heads, Element.FLOAT32, rule.value_dim)
    weight = mixer.norm_weight
    yield row_operation(normalise, buffers.mixed, weight, buffers.mixed, repeats=True, eps=mixer.eps)
    silu = compile_rows("silu", mixer.inner, Element.FLOAT32)
    yield row_operation(silu, gate, buffers.mixed, buffers.mixed)


def _state_space(mixer: Mamba2Mixer, buffers: RecurrentBuffers) -> Iterator[Operation]:
    space, heads = mixer.space, mixer.heads
    inputs, gate, step = buffers.projected.split_with_sizes(mixer.split, dim=1)
    steps, rate = buffers.gates[0], mixer.rate
    yield _convolution(inputs, mixer.conv_weight, mixer.conv_bias, buffers.convolved, silu=True)
    softplus = compile_rows("softplus", heads, Element.FLOAT32)
    yield row_operation(softplus, step, mixer.dt_bias, steps, repeats=True)
    for name, limit in _limits(space):
        function = compile_rows(name, heads, Element.FLOAT32)
        limits = torch.full((heads,), limit, dtype=torch.float32)
        yield row_operation(function, steps, limits, steps, repeats=True)
    x, b, c = buffers.convolved.split_with_sizes(mixer.sizes, dim=1)
    arguments = _matrix_arguments(heads, mixer.groups, c, b, x, buffers.mixed)
    arguments.dt, arguments.rate, arguments.skip = steps.data_ptr(), rate.data_ptr(), mixer.d.data_ptr()
    function, _ = compile_state_space(space.state_size, space.head_dim, Element.FLOAT32)
    yield Operation(function, arguments, has_tokens=False, holds=(rate,))
    silu = compile_rows("silu", mixer.inner, Element.FLOAT32)
    yield row_operation(silu, gate, buffers.mixed, buffers.mixed)
    norm = mixer.norm
    normalise = compile_rows("rms_norm_groups", norm.groups, Element.FLOAT32, mixer.inner // norm.groups)
    yield row_operation(normalise, buffers.mixed, norm.weight, buffers.mixed, repeats=True, eps=norm.eps)


def _limits(space: Mamba2Config) -> Iterator[tuple[str, float]]:
    """Yield the functions that keep steps, which are positive, within the limits that there are."""
    if space.least_step > 0:
        yield "at_least", space.least_step
    if space.most_step < math.inf:
        yield "at_most", space.most_step


def _matrix_arguments(
    heads: int, groups: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor
) -> RecurrentArguments:
    """Return what the kernels whose states are matrices have in common."""
    return RecurrentArguments(
        heads=heads,
        parts=1,
        group=heads // groups,
        output=output.data_ptr(),
        query=query.data_ptr(),
        query_stride=row_bytes(query),
        key=key.data_ptr(),
        key_stride=row_bytes(key),
        value=value.data_ptr(),
        value_stride=row_bytes(value),
    )


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, *, silu: bool) -> Operation:
    channels, kernel = weight.shape
    function, parts = compile_short_convolution(channels, kernel, Element.FLOAT32, bias is not None, silu)
    arguments = RecurrentArguments(
        heads=1,
        parts=parts,
        output=output.data_ptr(),
        x=x.data_ptr(),
        x_stride=row_bytes(x),
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
    )
    return Operation(function, arguments, has_tokens=False)


class RecurrentGroup:
    """The recurrent layers of a stage, whose operations on states follow a step's plan.

    `places` are those of the operations on states among a program's; of every layer first the convolution's, and then
    that of its matrices, if it has any.
    """

    def __init__(self, mixers: Sequence[PreparedMixer], places: Sequence[int], program: Program) -> None:
        self._program = program
        self._all = list(places)
        first = mixers[0]
        each = 1 if isinstance(first, GatedConvolution) else 2
        self._convolutions, self._matrices = self._all[::each], self._all[1::2] if each == 2 else []
        self._parts = program.view(self._convolutions[0], RecurrentArguments).parts
        self._heads = self._panels = 0
        if isinstance(first, GatedDeltaNet):
            self._heads = first.heads
            _, self._panels = compile_delta_rule(first.rule.key_dim, first.rule.value_dim, Element.FLOAT32)
        elif isinstance(first, Mamba2Mixer):
            self._heads, space = first.heads, first.space
            _, self._panels = compile_state_space(space.state_size, space.head_dim, Element.FLOAT32)
        self._plan: object = None

    def use(self, states: Sequence[RecurrentState]) -> None:
        """Tell the operations where the states of each layer lie."""
        words, at = self._program.arguments, _AT["states"]
        words[self._convolutions, at] = [each.conv.data_ptr() for each in states]
        if self._matrices:
            words[self._matrices, at] = [each.state.data_ptr() for each in states]

    def take_in(self, metadata: RecurrentMetadata) -> None:
        """Take in a step's batch."""
        plan = plan_of(metadata)
        # The operations read its memory.
        self._plan = plan
        words, requests = self._program.arguments, metadata.num_reqs
        words[self._all, _AT["work"]] = plan.work.ctypes.data
        words[self._all, _AT["checkpoints"]] = plan.checkpoints.ctypes.data
        words[self._convolutions, _AT["items"]] = requests * self._parts
        if self._matrices:
            parts = parts_of(metadata, self._heads, self._panels, torch.get_num_threads())
            words[self._matrices, _AT["parts"]] = parts
            words[self._matrices, _AT["items"]] = requests * self._heads * parts
