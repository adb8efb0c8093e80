"""The recurrent kernels that run on the CPU, compiled and plain torch, against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu.recurrent import CpuRecurrent
from nbengine.kernels.torch.recurrent import TorchRecurrent
from tests.kernels.recurrent_batches import (
    Heads,
    Request,
    Step,
    check_convolution,
    check_delta_rule,
    delta_inputs,
)
from tests.support.thorough import amount, combinations

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
STEPS = {
    "decodes": [Request(1, "own"), Request(1, "zeros"), Request(1, "other"), Request(1, "other", (1,))],
    "prompts": [Request(2, "zeros"), Request(63, "own"), Request(64, "zeros"), Request(130, "other")],
    "mixed": [Request(1), Request(1, "zeros", (1,)), Request(5, "zeros"), Request(97, "own", (16, 32, 96))],
    "checkpoint at the end": [Request(40, "zeros", (8, 40)), Request(3, "other", (1, 2, 3))],
    "one token of nothing": [Request(1, "zeros")],
}
HEADS = [
    Heads(),
    Heads(1, 1, 128, 128),
    Heads(4, 4, 16, 16),
    Heads(2, 6, 20, 37),
    Heads(1, 3, 5, 1),
    Heads(1, 1, 16, 256),
]


@pytest.fixture(params=["cpu", "torch"])
def make_kernels(request):
    return CpuRecurrent if request.param == "cpu" else lambda dtype: TorchRecurrent()


BACKENDS = ["cpu", "torch"]


@pytest.mark.parametrize(
    ("make_kernels", "requests", "heads"), combinations(BACKENDS, STEPS, HEADS), indirect=["make_kernels"]
)
def test_the_delta_rule_equals_the_reference_and_touches_no_other_slot(make_kernels, requests, heads):
    check_delta_rule(Step.of(make_kernels(torch.float32), STEPS[requests]), heads)


@pytest.mark.parametrize(
    ("make_kernels", "requests", "dtype"), combinations(BACKENDS, STEPS, DTYPES), indirect=["make_kernels"]
)
def test_the_delta_rule_of_every_type_equals_the_reference(make_kernels, requests, dtype):
    check_delta_rule(Step.of(make_kernels(dtype), STEPS[requests]), Heads(), dtype=dtype)


@pytest.mark.parametrize(
    ("make_kernels", "requests", "sizes", "silu", "dtype"),
    combinations(BACKENDS, STEPS, [(64, 4), (83, 4), (7, 3), (600, 2), (32, 7)], [True, False], DTYPES),
    indirect=["make_kernels"],
)
def test_the_convolution_equals_the_reference_and_touches_no_other_slot(
    make_kernels, requests, sizes, silu, dtype
):
    step = Step.of(make_kernels(dtype), STEPS[requests])
    check_convolution(step, *sizes, silu=silu, has_bias=not silu, dtype=dtype)


@st.composite
def requests_of_a_step(draw):
    """Requests of one token, then others."""
    lengths = sorted(draw(st.lists(st.integers(1, 80), min_size=1, max_size=5)))
    for cut in range(draw(st.integers(0, 2))):
        lengths[cut : cut + 1] = [1]
    requests = []
    for length in sorted(lengths, key=lambda n: n > 1):
        ends = draw(st.lists(st.integers(1, length), max_size=3, unique=True))
        requests.append(Request(length, draw(st.sampled_from(["zeros", "own", "other"])), tuple(ends)))
    return requests


@settings(deadline=None, max_examples=amount(10, thorough=500))
@given(
    requests=requests_of_a_step(),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 40),
    value_dim=st.integers(1, 70),
    backend=st.sampled_from([CpuRecurrent, lambda dtype: TorchRecurrent()]),
    seed=st.integers(0, 1000),
)
def test_any_step_of_any_sizes_equals_the_reference(
    requests, key_heads, group, key_dim, value_dim, backend, seed
):
    step = Step.of(backend(torch.float32), requests, seed)
    # With few numbers in a key the states grow, and rounding with them.
    check_delta_rule(step, Heads(key_heads, key_heads * group, key_dim, value_dim), scale=8.0)
    check_convolution(step, 16 * key_dim + group, 1 + key_heads, silu=group > 1, has_bias=group == 2)


@pytest.mark.parametrize("cuts", [[1] * 150, [7] * 22, [64, 64, 22], [1, 63, 1, 85], [150]], ids=len)
def test_results_are_the_same_bits_wherever_a_prompt_is_cut_and_whatever_runs_beside_it(cuts):
    heads, kernels = Heads(2, 4, 128, 128), CpuRecurrent(torch.float32)
    whole = Step.of(kernels, [Request(150, "zeros", (64, 128))])
    inputs, state = delta_inputs(whole, heads), whole.states(4, 128, 128)
    expected = kernels.gated_delta_rule(*inputs, state, whole.metadata)
    x, weight, conv = inputs[0].reshape(150, -1), whole.normal(256, 4), whole.states(256, 3)
    convolved = kernels.short_convolution(x, weight, None, conv, whole.metadata, silu=True)
    own, own_conv, first = None, None, 0
    for length in cuts:
        length = min(length, 150 - first)
        # The other request has one token, so that it comes first.
        beside = [Request(1, "other"), Request(length, "zeros" if own is None else "own")]
        step = Step.of(kernels, beside, seed=first)
        states, conv_states = step.states(4, 128, 128), step.states(256, 3)
        slot = int(step.metadata.slots[1])
        if own is not None:
            states[slot], conv_states[slot] = own, own_conv
        rows = [torch.cat((torch.full_like(y[:1], 0.5), y[first : first + length])) for y in inputs]
        rows[3][0] = -0.5
        output = kernels.gated_delta_rule(*rows, states, step.metadata)
        assert torch.equal(output[1:], expected[first : first + length])
        tokens = torch.cat((x[:1], x[first : first + length]))
        output = kernels.short_convolution(tokens, weight, None, conv_states, step.metadata, silu=True)
        assert torch.equal(output[1:], convolved[first : first + length])
        own, own_conv, first = states[slot].clone(), conv_states[slot].clone(), first + length
        for end, kept in zip(whole.metadata.checkpoint_ends, whole.metadata.checkpoint_slots, strict=True):
            if end == first:
                assert torch.equal(own, state[kept])
                assert torch.equal(own_conv, conv[kept])
    assert torch.equal(own, state[whole.metadata.slots[0]])


def test_one_thread_and_several_give_the_same_bits(monkeypatch):
    kernels, heads = CpuRecurrent(torch.float32), Heads(1, 1, 128, 256)
    results = []
    for threads in (1, 2, 9):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        step = Step.of(kernels, [Request(1), Request(70, "own", (16,))])
        inputs, state = delta_inputs(step, heads), step.states(1, 128, 256)
        results.append((kernels.gated_delta_rule(*inputs, state, step.metadata), state.nan_to_num(7.0)))
    for output, state in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(state, results[0][1])


def test_a_strong_decay_forgets_and_a_weak_one_keeps(make_kernels):
    kernels = make_kernels(torch.float32)
    step = Step.of(kernels, [Request(1, "own"), Request(70, "own")])
    query, key, value, decay, beta = delta_inputs(step, Heads())
    decay[:, :2], decay[:, 2:], beta[:] = -200.0, 0.0, 0.0
    state = step.states(4, 32, 48)
    before = state.clone()
    output = kernels.gated_delta_rule(query, key, value, decay, beta, state, step.metadata)
    slots = step.metadata.slots.long()
    assert not state[slots, :2].any()
    assert not output[:, :2].any()
    torch.testing.assert_close(state[slots, 2:], before[slots, 2:])


def test_a_key_of_zeros_changes_nothing_and_is_not_divided_by_zero(make_kernels):
    kernels = make_kernels(torch.float32)
    step = Step.of(kernels, [Request(1, "zeros"), Request(9, "zeros")])
    query, key, value, decay, beta = delta_inputs(step, Heads())
    state = step.states(4, 32, 48)
    output = kernels.gated_delta_rule(query, torch.zeros_like(key), value, decay, beta, state, step.metadata)
    assert not output.any()


@pytest.mark.parametrize("name", ["query", "decay", "beta", "state", "short state"])
def test_what_the_compiled_delta_rule_cannot_read_is_refused_by_name(name):
    kernels = CpuRecurrent(torch.float32)
    step = Step.of(kernels, [Request(3)])
    arguments = dict(
        zip(("query", "key", "value", "decay", "beta"), delta_inputs(step, Heads()), strict=True)
    )
    arguments["state"] = step.states(4, 32, 48)
    if name == "short state":
        arguments["state"] = arguments["state"][:1]
    else:
        arguments[name] = arguments[name].to(torch.float64)
    with pytest.raises(InvalidArgumentError, match=name.split()[-1]):
        kernels.gated_delta_rule(**arguments, metadata=step.metadata)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "conv"])
def test_what_the_compiled_convolution_cannot_read_is_refused_by_name(name):
    kernels = CpuRecurrent(torch.float32)
    step = Step.of(kernels, [Request(3)])
    arguments = {
        "x": step.normal(3, 32),
        "weight": step.normal(32, 4),
        "bias": step.normal(32),
        "conv": step.states(32, 3),
    }
    arguments[name] = arguments[name].to(torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=name):
        kernels.short_convolution(**arguments, metadata=step.metadata, silu=True)


def test_a_plan_is_made_once_a_step():
    step = Step.of(CpuRecurrent(torch.float32), [Request(3)])
    check_convolution(step, 32, 4)
    plan = step.metadata.plan
    check_delta_rule(dataclasses.replace(step, metadata=step.metadata), Heads())
    assert step.metadata.plan is plan
