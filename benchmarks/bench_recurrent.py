"""Measure the gated delta rule and its short convolution on the CPU: the compiled kernels against transformers' torch
code, alternating in one run.

    python benchmarks/bench_recurrent.py [--json PATH] [--cpu-time]

The sizes are those of Qwen3.5-0.8B: 16 heads of 128 by 128 channels, a kernel of 4 tokens, 18 recurrent layers. The
opponent is what transformers runs for a layer where no other package is installed: `causal_conv1d_fn` and
`torch_chunk_gated_delta_rule` for prompts, `causal_conv1d_update` and `torch_recurrent_gated_delta_rule` for decode;
its states are contiguous and need not be gathered. A step is all layers. Times are medians in milliseconds; the ratio
is the median of the ratios of neighbouring runs, theirs by ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from recurrent_frame import CPU, Case, Step, run
from transformers.models.qwen3_5 import modeling_qwen3_5 as peer

from nbengine.kernels.dispatch import select_recurrent_kernels

LAYERS, HEADS, SIZE, KERNEL = 18, 16, 128, 4
CHANNELS = 3 * HEADS * SIZE
DELTA_RULE, CONVOLUTION = "delta rule", "convolution"


@dataclass(frozen=True)
class LayerCase(Case):
    """A batch of equal requests, and the operations that are measured."""

    parts: tuple[str, ...] = (DELTA_RULE,)


CASES = [
    *(LayerCase(f"decode, batch {batch}", batch, 1) for batch in (1, 8, 32)),
    LayerCase("prefill 512", 1, 512),
    LayerCase("prefill 8 x 64", 8, 64),
    LayerCase("convolution, decode, batch 8", 8, 1, (CONVOLUTION,)),
    LayerCase("convolution, prefill 512", 1, 512, (CONVOLUTION,)),
    LayerCase("both, decode, batch 1", 1, 1, (CONVOLUTION, DELTA_RULE)),
    LayerCase("both, prefill 512", 1, 512, (CONVOLUTION, DELTA_RULE)),
]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a layer, [batch, tokens, …]."""

    mixed: torch.Tensor
    weight: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(cls, case: LayerCase) -> Inputs:
        """Make inputs for a case."""
        gates = torch.randn(2, case.batch, case.tokens, HEADS)
        return cls(
            torch.randn(case.batch, case.tokens, CHANNELS),
            torch.randn(CHANNELS, KERNEL),
            -torch.nn.functional.softplus(gates[0]),
            gates[1].sigmoid(),
        )


def ours(case: LayerCase, inputs: Inputs) -> Step:
    """Make a step of the compiled kernels, its metadata included."""
    kernels = select_recurrent_kernels(CPU, torch.float32)
    convs = [torch.zeros(case.batch, CHANNELS, KERNEL - 1) for _ in range(LAYERS)]
    states = [torch.zeros(case.batch, HEADS, SIZE, SIZE) for _ in range(LAYERS)]
    rows = inputs.mixed.flatten(0, 1)
    gates = [x.flatten(0, 1) for x in (inputs.decay, inputs.beta)]

    def step() -> None:
        metadata = case.metadata(kernels)
        for conv, state in zip(convs, states, strict=True):
            mixed = rows
            if CONVOLUTION in case.parts:
                mixed = kernels.short_convolution(rows, inputs.weight, None, conv, metadata, silu=True)
            if DELTA_RULE in case.parts:
                heads = mixed.view(-1, 3, HEADS, SIZE).unbind(1)
                kernels.gated_delta_rule(*heads, *gates, state, metadata)

    return step


def theirs(case: LayerCase, inputs: Inputs) -> Step:
    """Make a step of transformers' functions, as its layer calls them."""
    is_decode = case.tokens == 1
    convs = [torch.zeros(case.batch, CHANNELS, KERNEL - 1) for _ in range(LAYERS)]
    states = [torch.zeros(case.batch, HEADS, SIZE, SIZE) for _ in range(LAYERS)]
    rule = peer.torch_recurrent_gated_delta_rule if is_decode else peer.torch_chunk_gated_delta_rule

    def convolve(conv: torch.Tensor) -> torch.Tensor:
        channels_first = inputs.mixed.transpose(1, 2)
        if is_decode:
            out = peer.causal_conv1d_update(channels_first, conv, inputs.weight, None, "silu")
        else:
            joint = torch.cat((conv, channels_first), dim=-1)
            conv.copy_(joint[:, :, 1 - KERNEL :])
            out = peer.causal_conv1d_fn(joint, inputs.weight, None, activation="silu")[:, :, KERNEL - 1 :]
        return out.transpose(1, 2)

    def step() -> None:
        for conv, state in zip(convs, states, strict=True):
            mixed = convolve(conv) if CONVOLUTION in case.parts else inputs.mixed
            if DELTA_RULE in case.parts:
                heads = mixed.reshape(case.batch, case.tokens, 3, HEADS, SIZE).unbind(2)
                _, last = rule(
                    *heads,
                    g=inputs.decay,
                    beta=inputs.beta,
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )
                state.copy_(last)

    return step


def sides(case: LayerCase) -> tuple[Step, Step]:
    """Make a step of each side, on the same inputs."""
    inputs = Inputs.random(case)
    return ours(case, inputs), theirs(case, inputs)


if __name__ == "__main__":
    run(__doc__, f"recurrent layers on the CPU, {LAYERS} layers", CASES, sides)
