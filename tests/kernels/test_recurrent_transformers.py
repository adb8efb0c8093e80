"""The recurrent kernels, and their reference, against the functions that transformers' models call."""

from __future__ import annotations

import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from nbengine.kernels import recurrent_reference as reference
from nbengine.kernels.cpu.recurrent import CpuRecurrent
from nbengine.kernels.torch.recurrent import TorchRecurrent
from tests.kernels.recurrent_batches import Heads, Request, Step, delta_inputs

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
HEADS = Heads(2, 6, 64, 32)


class Reference:
    """The reference in the place of kernels."""

    name = "reference"
    gated_delta_rule = staticmethod(reference.gated_delta_rule)
    short_convolution = staticmethod(reference.short_convolution)


@pytest.fixture(params=["reference", "cpu", "torch"])
def kernels(request):
    return {"reference": Reference(), "cpu": CpuRecurrent(torch.float32), "torch": TorchRecurrent()}[
        request.param
    ]


@pytest.mark.parametrize("peer", [qwen3_5, qwen3_next], ids=["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("start", ["zeros", "own"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_the_delta_rule_is_that_of_transformers_chunked_and_recurrent(kernels, peer, start, tokens):
    step = Step.of(kernels, [Request(tokens, start)])
    inputs, states = delta_inputs(step, HEADS), step.states(HEADS.value_heads, HEADS.key_dim, HEADS.value_dim)
    slot = int(step.metadata.slots[0])
    initial = states[slot : slot + 1].clone() if start == "own" else None
    output = kernels.gated_delta_rule(*inputs, states, step.metadata)
    query, key, value, decay, beta = (x[None] for x in inputs)
    for function in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        expected, last = function(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(output.float(), expected[0], **CLOSE)
        torch.testing.assert_close(states[slot], last[0], **CLOSE)


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("peer", "activation"), [(qwen3_5, "silu"), (lfm2, None)], ids=["qwen3_5", "lfm2"])
def test_the_convolution_is_that_of_transformers_for_prompts_and_for_one_token(
    kernels, peer, activation, has_bias, tokens
):
    step = Step.of(kernels, [Request(tokens, "own")])
    x, weight, conv = step.normal(tokens, 48), step.normal(48, 4), step.states(48, 3)
    bias = step.normal(48) if has_bias else None
    slot = int(step.metadata.slots[0])
    before = conv[slot].clone()[None]
    output = kernels.short_convolution(x, weight, bias, conv, step.metadata, silu=activation is not None)
    joint = torch.cat((before, x.T[None]), dim=2)
    expected = peer.causal_conv1d_fn(joint, weight, bias, activation=activation)[0, :, 3:].T
    torch.testing.assert_close(output.float(), expected, **CLOSE)
    updated = peer.causal_conv1d_update(x.T[None], before, weight, bias, activation)[0].T
    torch.testing.assert_close(output.float(), updated, **CLOSE)
    assert torch.equal(conv[slot], before[0])
