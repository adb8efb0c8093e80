"""Measure the state space of Mamba-2 on the CPU: the compiled kernel against transformers' torch code, alternating in
one run.

    python benchmarks/bench_state_space.py [--json PATH]

The sizes are those of a hybrid of about 1B parameters (Granite 4): 48 heads of 64 channels in one group, states of 128,
36 layers. The opponent is what transformers runs for a layer where no other package is installed: `mamba2_chunk_scan`
in chunks of 256 for prompts, `mamba2_selective_state_update` for decode; its states are contiguous and need not be
gathered. A step is all layers. Times are medians in milliseconds; the ratio is the median of the ratios of neighbouring
runs, theirs by ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from recurrent_frame import CPU, Case, Step, run
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as peer

from nbengine.kernels.dispatch import select_recurrent_kernels

LAYERS, HEADS, HEAD_DIM, STATE_SIZE, CHUNK = 36, 48, 64, 128, 256


CASES = [
    *(Case(f"decode, batch {batch}", batch, 1) for batch in (1, 8, 32)),
    Case("prefill 512", 1, 512),
    Case("prefill 8 x 64", 8, 64),
]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a layer, [batch, tokens, …], and what a head has."""

    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    rate: torch.Tensor
    skip: torch.Tensor

    @classmethod
    def random(cls, case: Case) -> Inputs:
        """Make inputs for a case."""
        batch = (case.batch, case.tokens)
        return cls(
            torch.randn(*batch, HEADS, HEAD_DIM),
            torch.nn.functional.softplus(torch.randn(*batch, HEADS) - 1),
            torch.randn(*batch, 1, STATE_SIZE),
            torch.randn(*batch, 1, STATE_SIZE),
            -torch.linspace(1, 16, HEADS),
            torch.ones(HEADS),
        )


def ours(case: Case, inputs: Inputs) -> Step:
    """Make a step of the compiled kernel, its metadata included."""
    kernels = select_recurrent_kernels(CPU, torch.float32)
    states = [torch.zeros(case.batch, HEADS, STATE_SIZE, HEAD_DIM) for _ in range(LAYERS)]
    x, dt, b, c = (y.flatten(0, 1) for y in (inputs.x, inputs.dt, inputs.b, inputs.c))

    def step() -> None:
        metadata = case.metadata(kernels)
        for state in states:
            kernels.state_space(x, dt, b, c, inputs.rate, inputs.skip, state, metadata)

    return step


def theirs(case: Case, inputs: Inputs) -> Step:
    """Make a step of transformers' functions, as its layer calls them."""
    states = [torch.zeros(case.batch, HEADS, HEAD_DIM, STATE_SIZE) for _ in range(LAYERS)]
    x, dt, b, c = inputs.x, inputs.dt, inputs.b, inputs.c

    def decode(state: torch.Tensor) -> None:
        peer.mamba2_selective_state_update(
            state,
            x[:, 0],
            dt[:, 0, :, None].expand(-1, -1, HEAD_DIM),
            inputs.rate[:, None, None].expand(-1, HEAD_DIM, STATE_SIZE),
            b[:, 0],
            c[:, 0],
            inputs.skip[:, None].expand(-1, HEAD_DIM),
        )

    def prefill(state: torch.Tensor) -> None:
        _, last = peer.mamba2_chunk_scan(
            x,
            dt,
            inputs.rate,
            b,
            c,
            chunk_size=CHUNK,
            D=inputs.skip,
            initial_states=state,
            return_final_states=True,
        )
        state.copy_(last)

    def step() -> None:
        for state in states:
            (decode if case.tokens == 1 else prefill)(state)

    return step


def sides(case: Case) -> tuple[Step, Step]:
    """Make a step of each side, on the same inputs."""
    inputs = Inputs.random(case)
    return ours(case, inputs), theirs(case, inputs)


if __name__ == "__main__":
    run(__doc__, f"state space on the CPU, {LAYERS} layers", CASES, sides)
