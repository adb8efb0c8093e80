"""The trials of what recurrent layers compute: see `nbengine.kernels.cpu.trials`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import nbengine.kernels.recurrent_reference as reference
from nbengine.kernels.cpu.elements import TYPES
from nbengine.kernels.cpu.jit import Function
from nbengine.kernels.cpu.recurrent import CpuRecurrent, convolution_arguments, matrix_arguments
from nbengine.kernels.cpu.recurrent_layout import ConvolutionShape, MatrixShape
from nbengine.kernels.cpu.trials import Trial, is_near, poisoned, random_numbers
from nbengine.kernels.recurrent_metadata import NO_SOURCE, RecurrentMetadata, build_recurrent_metadata

_LENS = (1, 9)
"""New tokens of a request that decodes, from a state, and of one that begins."""
_TOKENS, _SLOTS, _HEADS = sum(_LENS), 3, 2
_ERROR = 2e-5


def try_short_convolution(functions: Sequence[Function], shape: ConvolutionShape) -> Trial:
    """Try the function of a convolution."""
    dtype, channels = TYPES[shape.element], shape.channels
    metadata = _metadata(dtype)
    x = random_numbers(_TOKENS, channels, dtype=dtype, seed=1)
    weight = random_numbers(channels, shape.kernel, dtype=dtype, seed=2)
    bias = random_numbers(channels, dtype=dtype, seed=3) if shape.has_bias else None
    conv = _states(channels, shape.kernel - 1, dtype=dtype)
    expected_conv, output = conv.clone(), poisoned((_TOKENS, channels), dtype)
    parts = -(-channels // shape.span)
    arguments = convolution_arguments(x, weight, bias, conv, output, metadata, parts)
    yield [(functions[0], arguments)]
    expected = reference.short_convolution(x, weight, bias, expected_conv, metadata, silu=shape.silu)
    return is_near(output, expected, _ERROR) and torch.equal(conv, expected_conv)


def try_delta_rule(functions: Sequence[Function], shape: MatrixShape) -> Trial:
    """Try the function of the delta rule."""
    dtype = TYPES[shape.element]
    metadata = _metadata(dtype)
    query, key = (random_numbers(_TOKENS, 1, shape.key_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    value = random_numbers(_TOKENS, _HEADS, shape.value_dim, dtype=dtype, seed=3)
    decay, beta = -F.softplus(random_numbers(_TOKENS, _HEADS, seed=4)), _shares(5)
    state = _states(_HEADS, shape.key_dim, shape.value_dim)
    expected_state, output = state.clone(), poisoned(value.shape, dtype)
    arguments = matrix_arguments(query, key, value, state, output, metadata, len(shape.panels))
    arguments.decay, arguments.beta = decay.data_ptr(), beta.data_ptr()
    yield [(functions[0], arguments)]
    expected = reference.gated_delta_rule(query, key, value, decay, beta, expected_state, metadata)
    return _are_near(output, expected, state, expected_state)


def try_state_space(functions: Sequence[Function], shape: MatrixShape) -> Trial:
    """Try the function of a state space."""
    dtype = TYPES[shape.element]
    metadata = _metadata(dtype)
    x = random_numbers(_TOKENS, _HEADS, shape.value_dim, dtype=dtype, seed=1)
    b, c = (random_numbers(_TOKENS, 1, shape.key_dim, dtype=dtype, seed=seed) for seed in (2, 3))
    dt, rate, skip = _shares(4), -random_numbers(_HEADS, seed=5).exp(), random_numbers(_HEADS, seed=6)
    state = _states(_HEADS, shape.key_dim, shape.value_dim)
    expected_state, output = state.clone(), poisoned(x.shape, dtype)
    arguments = matrix_arguments(c, b, x, state, output, metadata, len(shape.panels))
    arguments.dt, arguments.rate, arguments.skip = dt.data_ptr(), rate.data_ptr(), skip.data_ptr()
    yield [(functions[0], arguments)]
    expected = reference.state_space(x, dt, b, c, rate, skip, expected_state, metadata)
    return _are_near(output, expected, state, expected_state)


def _metadata(dtype: torch.dtype) -> RecurrentMetadata:
    return build_recurrent_metadata(
        np.array(_LENS, np.int32),
        np.array([0, 2], np.int32),
        np.array([1, NO_SOURCE], np.int32),
        num_slots=_SLOTS,
        kernels=CpuRecurrent(dtype),
        device=torch.device("cpu"),
    )


def _states(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_numbers(_SLOTS, *shape, dtype=dtype, seed=9)


def _shares(seed: int) -> Tensor:
    """Return a number from 0 to 1 for each token and head."""
    return random_numbers(_TOKENS, _HEADS, seed=seed).sigmoid()


def _are_near(output: Tensor, expected: Tensor, state: Tensor, expected_state: Tensor) -> bool:
    results = is_near(output, expected, _ERROR * expected.abs().max())
    return results and is_near(state, expected_state.double(), _ERROR * expected_state.abs().max())
