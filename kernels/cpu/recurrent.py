"""Short convolution, gated delta rule and state space on the CPU, compiled for this processor and for the model's
sizes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.delta_rule import define_delta_rule
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.jit import Function, Processor
from nbengine.kernels.cpu.recurrent_layout import ConvolutionShape, MatrixShape, RecurrentArguments, Work
from nbengine.kernels.cpu.short_convolution import define_short_convolution
from nbengine.kernels.cpu.state_space import define_state_space
from nbengine.kernels.cpu.threads import select_runner
from nbengine.kernels.cpu.trials import compile_tried
from nbengine.kernels.recurrent_metadata import RecurrentMetadata

_ITEMS_FOR_THREADS = 4
"""Fewer items of a convolution's decodes are not worth waking the other threads."""


@cache
def compile_delta_rule(key_dim: int, value_dim: int, element: Element) -> tuple[Function, int]:
    """Return the function, and into how many parts it can cut a head's columns."""
    from nbengine.kernels.cpu.recurrent_trials import try_delta_rule

    def choose(processor: Processor) -> tuple[MatrixShape]:
        return (MatrixShape(key_dim, value_dim, element, processor.accumulators),)

    (function,), (shape,) = compile_tried(_define_delta_rule, ["delta_rule"], choose, try_delta_rule)
    return function, len(shape.panels)


def _define_delta_rule(module: ir.Module, shape: MatrixShape) -> None:
    define_delta_rule(module, "delta_rule", shape)


@cache
def compile_state_space(state_size: int, head_dim: int, element: Element) -> tuple[Function, int]:
    """Return the function, and into how many parts it can cut a head's columns."""
    from nbengine.kernels.cpu.recurrent_trials import try_state_space

    def choose(processor: Processor) -> tuple[MatrixShape]:
        return (MatrixShape(state_size, head_dim, element, processor.accumulators),)

    (function,), (shape,) = compile_tried(_define_state_space, ["state_space"], choose, try_state_space)
    return function, len(shape.panels)


def _define_state_space(module: ir.Module, shape: MatrixShape) -> None:
    define_state_space(module, "state_space", shape)


@cache
def compile_short_convolution(
    channels: int, kernel: int, element: Element, has_bias: bool, silu: bool
) -> tuple[Function, int]:
    """Return the function, and how many parts the channels have."""
    from nbengine.kernels.cpu.recurrent_trials import try_short_convolution

    def choose(processor: Processor) -> tuple[ConvolutionShape]:
        return (ConvolutionShape(channels, kernel, element, has_bias, silu, processor.accumulators),)

    (function,), (shape,) = compile_tried(
        _define_short_convolution, ["short_convolution"], choose, try_short_convolution
    )
    return function, -(-channels // shape.span)


def _define_short_convolution(module: ir.Module, shape: ConvolutionShape) -> None:
    define_short_convolution(module, "short_convolution", shape)


@dataclass(frozen=True)
class Plan:
    """A step's work list, and the arguments of the kernels that have its addresses."""

    work: NDArray[np.int32]
    checkpoints: NDArray[np.int32]
    convolution: RecurrentArguments
    matrix: RecurrentArguments


class CpuRecurrent:
    """Kernels for a float32, bfloat16 or float16 model on the CPU; arithmetic, sums and states are float32.

    A request's results are bit for bit the same in whatever steps and beside whatever requests its tokens are run.
    An instance is used by one thread at a time, the one that calls torch.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._run = select_runner()

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
        channels, kernel = weight.shape
        self._check("weight", weight, (channels, kernel))
        self._check("conv", conv, (len(conv), channels, kernel - 1))
        _check_slots("conv", conv, metadata)
        if bias is not None:
            self._check("bias", bias, (channels,))
        self._check("x", x[:1], (1, channels))
        function, parts = compile_short_convolution(
            channels, kernel, ELEMENTS[self._dtype], bias is not None, silu
        )
        output = torch.empty((metadata.num_tokens, channels), dtype=self._dtype)
        arguments = convolution_arguments(x, weight, bias, conv, output, metadata, parts)
        is_small = metadata.num_tokens * parts < _ITEMS_FOR_THREADS
        threads = 1 if is_small else torch.get_num_threads()
        self._run(function, ctypes.addressof(arguments), threads)
        return output

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
        (tokens, heads, value_dim), key_dim = value.shape, key.shape[2]
        query, key, value = (
            self._heads(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))
        )
        decay, beta = (_gates(x, name, (tokens, heads)) for x, name in ((decay, "decay"), (beta, "beta")))
        _check_states(state, (heads, key_dim, value_dim))
        _check_slots("state", state, metadata)
        function, panels = compile_delta_rule(key_dim, value_dim, ELEMENTS[self._dtype])
        output = torch.empty((tokens, heads, value_dim), dtype=self._dtype)
        arguments = matrix_arguments(query, key, value, state, output, metadata, panels)
        arguments.decay, arguments.beta = decay.data_ptr(), beta.data_ptr()
        self._run(function, ctypes.addressof(arguments), _threads_for(arguments))
        return output

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
        (tokens, heads, head_dim), (_, _, state_size) = x.shape, b.shape
        x, b, c = (self._heads(y, name) for y, name in ((x, "x"), (b, "b"), (c, "c")))
        dt = _gates(dt, "dt", (tokens, heads))
        rate, skip = (_gates(y, name, (heads,)) for y, name in ((rate, "rate"), (skip, "skip")))
        _check_states(state, (heads, state_size, head_dim))
        _check_slots("state", state, metadata)
        function, panels = compile_state_space(state_size, head_dim, ELEMENTS[self._dtype])
        output = torch.empty((tokens, heads, head_dim), dtype=self._dtype)
        arguments = matrix_arguments(c, b, x, state, output, metadata, panels)
        arguments.dt, arguments.rate, arguments.skip = dt.data_ptr(), rate.data_ptr(), skip.data_ptr()
        self._run(function, ctypes.addressof(arguments), _threads_for(arguments))
        return output

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tensor.dtype is not self._dtype or tensor.shape != shape or not tensor.is_contiguous():
            found = (tensor.dtype, tuple(tensor.shape), tensor.stride())
            raise InvalidArgumentError(name, found, f"contiguous, {self._dtype}, of shape {shape}")

    def _heads(self, tensor: Tensor, name: str) -> Tensor:
        if tensor.dtype is not self._dtype:
            raise InvalidArgumentError(f"{name}.dtype", tensor.dtype, f"the model's, {self._dtype}")
        _, heads, channels = tensor.stride()
        return tensor if channels == 1 and heads == tensor.shape[2] else tensor.contiguous()


def convolution_arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Tensor,
    output: Tensor,
    metadata: RecurrentMetadata,
    parts: int,
) -> RecurrentArguments:
    """Return what a convolution's function is called with; `parts` are those of its channels."""
    arguments = plan_of(metadata).convolution
    arguments.counter, arguments.heads = 0, 1
    arguments.parts = parts
    arguments.items = metadata.num_reqs * parts
    arguments.states, arguments.output = conv.data_ptr(), output.data_ptr()
    arguments.x, arguments.x_stride = x.data_ptr(), x.stride(0) * x.element_size()
    arguments.weight, arguments.bias = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
    return arguments


def matrix_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    output: Tensor,
    metadata: RecurrentMetadata,
    panels: int,
) -> RecurrentArguments:
    """Return what the functions whose states are matrices have in common."""
    heads, size = value.shape[1], value.element_size()
    arguments = plan_of(metadata).matrix
    arguments.counter, arguments.heads, arguments.group = 0, heads, heads // key.shape[1]
    arguments.parts = parts_of(metadata, heads, panels, torch.get_num_threads())
    arguments.items = metadata.num_reqs * heads * arguments.parts
    arguments.states, arguments.output = state.data_ptr(), output.data_ptr()
    arguments.query, arguments.query_stride = query.data_ptr(), query.stride(0) * size
    arguments.key, arguments.key_stride = key.data_ptr(), key.stride(0) * size
    arguments.value, arguments.value_stride = value.data_ptr(), value.stride(0) * size
    return arguments


def _threads_for(arguments: RecurrentArguments) -> int:
    return torch.get_num_threads() if arguments.items > 1 else 1


def _gates(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    if tensor.dtype is not torch.float32 or tensor.shape != shape:
        raise InvalidArgumentError(name, (tensor.dtype, tuple(tensor.shape)), f"float32, of shape {shape}")
    return tensor.contiguous()


def _check_states(state: Tensor, shape: tuple[int, int, int]) -> None:
    if state.dtype is not torch.float32 or state.shape[1:] != shape or not state.is_contiguous():
        found = (state.dtype, tuple(state.shape), state.stride())
        raise InvalidArgumentError("state", found, f"contiguous, float32, with slots of shape {shape}")


def _check_slots(name: str, states: Tensor, metadata: RecurrentMetadata) -> None:
    if len(states) < metadata.num_slots:
        raise InvalidArgumentError(f"len({name})", len(states), f"at least {metadata.num_slots}, the slots")


def parts_of(metadata: RecurrentMetadata, heads: int, panels: int, threads: int) -> int:
    """Return into how many parts a head's columns are cut, so that every thread has something to do with prompts."""
    prompts = metadata.num_reqs - metadata.num_decodes
    return max(1, min(panels, -(-2 * threads // (prompts * heads)))) if prompts else 1


def plan_of(metadata: RecurrentMetadata) -> Plan:
    """Return the plan of a step, made when it is first asked for."""
    if not isinstance(metadata.plan, Plan):
        metadata.plan = _make_plan(metadata)
    return metadata.plan


def _make_plan(metadata: RecurrentMetadata) -> Plan:
    work = np.empty((metadata.num_reqs, len(Work)), np.int32)
    starts, places = metadata.query_start_loc.numpy(), metadata.checkpoint_start_loc.numpy()
    work[:, Work.FIRST_TOKEN], work[:, Work.TOKENS] = starts[:-1], np.diff(starts)
    work[:, Work.SLOT], work[:, Work.SOURCE] = metadata.slots.numpy(), metadata.sources.numpy()
    work[:, Work.FIRST_CHECKPOINT], work[:, Work.CHECKPOINTS_END] = places[:-1], places[1:]
    checkpoints = np.ascontiguousarray(
        np.stack((metadata.checkpoint_ends.numpy(), metadata.checkpoint_slots.numpy()), axis=1)
    )
    addresses = {"work": work.ctypes.data, "checkpoints": checkpoints.ctypes.data}
    return Plan(work, checkpoints, RecurrentArguments(**addresses), RecurrentArguments(**addresses))
