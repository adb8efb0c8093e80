"""The state space of Mamba-2 on the CPU, compiled and plain torch, against the reference and transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.mamba2 import modeling_mamba2 as mamba2

from nbengine.errors import InvalidArgumentError
from nbengine.kernels import recurrent_reference as reference
from nbengine.kernels.cpu.recurrent import CpuRecurrent
from nbengine.kernels.torch.recurrent import TorchRecurrent
from tests.kernels.recurrent_batches import Request, Space, Step, check_state_space, space_inputs
from tests.kernels.test_recurrent import DTYPES, STEPS, requests_of_a_step
from tests.support.thorough import amount, combinations

BACKENDS = ["cpu", "torch"]
SIZES = [
    Space(),
    Space(1, 4, 128, 64),
    Space(4, 4, 16, 16),
    Space(2, 6, 20, 37),
    Space(1, 3, 5, 1),
    Space(3, 3, 64, 256),
]
CLOSE = {"rtol": 2e-5, "atol": 5e-5}


class Reference:
    """The reference in the place of kernels."""

    name = "reference"
    state_space = staticmethod(reference.state_space)


@pytest.fixture(params=["cpu", "torch"])
def make_kernels(request):
    return CpuRecurrent if request.param == "cpu" else lambda dtype: TorchRecurrent()


@pytest.mark.parametrize(
    ("make_kernels", "requests", "sizes"), combinations(BACKENDS, STEPS, SIZES), indirect=["make_kernels"]
)
def test_the_state_space_equals_the_reference_and_touches_no_other_slot(make_kernels, requests, sizes):
    check_state_space(Step.of(make_kernels(torch.float32), STEPS[requests]), sizes)


@pytest.mark.parametrize(
    ("make_kernels", "requests", "dtype"), combinations(BACKENDS, STEPS, DTYPES), indirect=["make_kernels"]
)
def test_the_state_space_of_every_type_equals_the_reference(make_kernels, requests, dtype):
    check_state_space(Step.of(make_kernels(dtype), STEPS[requests]), Space(), dtype=dtype)


@settings(deadline=None, max_examples=amount(10, thorough=800))
@given(
    requests=requests_of_a_step(),
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    state_size=st.integers(1, 40),
    head_dim=st.integers(1, 70),
    backend=st.sampled_from([CpuRecurrent, lambda dtype: TorchRecurrent()]),
    seed=st.integers(0, 1000),
)
def test_any_step_of_any_sizes_equals_the_reference(
    requests, groups, heads, state_size, head_dim, backend, seed
):
    step = Step.of(backend(torch.float32), requests, seed)
    check_state_space(step, Space(groups, groups * heads, state_size, head_dim))


@pytest.mark.parametrize("cuts", [[1] * 150, [7] * 22, [64, 64, 22], [1, 63, 1, 85], [150]], ids=len)
def test_results_are_the_same_bits_wherever_a_prompt_is_cut_and_whatever_runs_beside_it(cuts):
    sizes, kernels = Space(1, 4, 128, 64), CpuRecurrent(torch.float32)
    whole = Step.of(kernels, [Request(150, "zeros", (64, 128))])
    *tokens, rate, skip = space_inputs(whole, sizes)
    state = whole.states(4, 128, 64)
    expected = kernels.state_space(*tokens, rate, skip, state, whole.metadata)
    own, first = None, 0
    for length in cuts:
        length = min(length, 150 - first)
        # The other request has one token, so that it comes first.
        beside = [Request(1, "other"), Request(length, "zeros" if own is None else "own")]
        step = Step.of(kernels, beside, seed=first)
        states, slot = step.states(4, 128, 64), int(step.metadata.slots[1])
        if own is not None:
            states[slot] = own
        rows = [torch.cat((torch.full_like(y[:1], 0.5), y[first : first + length])) for y in tokens]
        output = kernels.state_space(*rows, rate, skip, states, step.metadata)
        assert torch.equal(output[1:], expected[first : first + length])
        own, first = states[slot].clone(), first + length
        for end, kept in zip(whole.metadata.checkpoint_ends, whole.metadata.checkpoint_slots, strict=True):
            if end == first:
                assert torch.equal(own, state[kept])
    assert torch.equal(own, state[whole.metadata.slots[0]])


def test_one_thread_and_several_give_the_same_bits(monkeypatch):
    kernels, sizes = CpuRecurrent(torch.float32), Space(1, 1, 128, 256)
    results = []
    for threads in (1, 2, 9):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        step = Step.of(kernels, [Request(1), Request(70, "own", (16,))])
        inputs, state = space_inputs(step, sizes), step.states(1, 128, 256)
        results.append((kernels.state_space(*inputs, state, step.metadata), state.nan_to_num(7.0)))
    for output, state in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(state, results[0][1])


def test_a_fast_rate_forgets_and_a_rate_of_zero_keeps(make_kernels):
    kernels, sizes = make_kernels(torch.float32), Space()
    step = Step.of(kernels, [Request(1, "own"), Request(70, "own")])
    x, dt, b, c, rate, skip = space_inputs(step, sizes)
    rate[:2], rate[2:], dt[:] = -1e4, 0.0, 1.0
    state = step.states(4, 32, 48)
    before = state.clone()
    output = kernels.state_space(torch.zeros_like(x), dt, b, c, rate, skip, state, step.metadata)
    slots = step.metadata.slots.long()
    assert not state[slots, :2].any()
    assert not output[:, :2].any()
    assert torch.equal(state[slots, 2:], before[slots, 2:])


@pytest.mark.parametrize("name", ["x", "dt", "b", "c", "rate", "skip", "state", "short state"])
def test_what_the_compiled_state_space_cannot_read_is_refused_by_name(name):
    kernels = CpuRecurrent(torch.float32)
    step = Step.of(kernels, [Request(3)])
    names = ("x", "dt", "b", "c", "rate", "skip")
    arguments = dict(zip(names, space_inputs(step, Space()), strict=True))
    arguments["state"] = step.states(4, 32, 48)
    if name == "short state":
        arguments["state"] = arguments["state"][:1]
    else:
        arguments[name] = arguments[name].to(torch.float64)
    with pytest.raises(InvalidArgumentError, match=name.split()[-1]):
        kernels.state_space(**arguments, metadata=step.metadata)


@pytest.mark.parametrize(
    ("backend", "peer", "start", "tokens"),
    combinations(["reference", "cpu", "torch"], [granite, mamba2], ["zeros", "own"], [1, 7, 64, 150]),
)
def test_the_state_space_is_that_of_transformers_chunked_and_recurrent(backend, peer, start, tokens):
    kernels = {"reference": Reference(), "cpu": CpuRecurrent(torch.float32), "torch": TorchRecurrent()}[
        backend
    ]
    sizes = Space(2, 6, 64, 32)
    step = Step.of(kernels, [Request(tokens, start)])
    inputs, states = space_inputs(step, sizes), step.states(sizes.heads, sizes.state_size, sizes.head_dim)
    slot = int(step.metadata.slots[0])
    initial = states[slot].clone() if start == "own" else torch.zeros(states.shape[1:])
    output = kernels.state_space(*inputs, states, step.metadata).float()
    x, dt, b, c, rate, skip = inputs
    theirs = initial.transpose(1, 2)[None].clone()
    expected, last = peer.mamba2_chunk_scan(
        x[None], dt[None], rate, b[None], c[None], 32, D=skip, initial_states=theirs, return_final_states=True
    )
    torch.testing.assert_close(output, expected[0], **CLOSE)
    torch.testing.assert_close(states[slot], last[0].transpose(1, 2), **CLOSE)
    sizes_of_each = (sizes.head_dim, sizes.state_size)
    for token in range(tokens):
        expected = peer.mamba2_selective_state_update(
            theirs,
            x[token : token + 1],
            dt[token : token + 1, :, None].expand(-1, -1, sizes.head_dim),
            rate[:, None, None].expand(-1, *sizes_of_each),
            b[token : token + 1],
            c[token : token + 1],
            skip[:, None].expand(-1, sizes.head_dim),
        )
        torch.testing.assert_close(output[token], expected[0], **CLOSE)
    torch.testing.assert_close(states[slot], theirs[0].transpose(1, 2), **CLOSE)
