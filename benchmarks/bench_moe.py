"""Measure a layer's experts on the CPU: the block here, a loop over experts and transformers in turn.

    python benchmarks/bench_moe.py [--json PATH]

One layer with half the widths of Qwen3-30B-A3B: 64 experts of 384 inner features, 8 a token, hidden size 1024
(302 MB in float32). All sides have the same weights, and route the tokens too. The loop computes every expert
that has tokens for exactly these, picked and added by index; transformers' block runs its own implementations
"eager" and "grouped_mm". Times are medians in milliseconds; the ratios are medians of the ratios of
neighbouring runs, theirs by ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import alternate, median_ratio, parser, report
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nbengine.distributed.communicator import SINGLE
from nbengine.kernels.dispatch import select_expert_kernels
from nbengine.models.configs.moe_config import MoEConfig
from nbengine.models.layers.moe import DenseExperts, SparseMoeBlock
from nbengine.models.layers.weights import Place

MOE = MoEConfig(num_experts=64, experts_per_token=8, intermediate_size=384, renormalize=True)
HIDDEN = 1024
TOKENS = (1, 8, 64, 512)
CPU = torch.device("cpu")


def make_ours(dtype: torch.dtype) -> SparseMoeBlock:
    """Make the block here with random weights."""
    kernels = select_expert_kernels(CPU, dtype)
    block = SparseMoeBlock(MOE, HIDDEN, kernels, place=Place(dtype, CPU), parallel=SINGLE)
    for weight in (block.router.weight.tensor, *stacked(block)):
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return block


def stacked(block: SparseMoeBlock) -> tuple[Tensor, Tensor]:
    """Return the experts' weights: those of gate and other projection together, and the last one's."""
    experts = block.experts.blocks
    assert isinstance(experts, DenseExperts)
    return experts.gate_up, experts.down


def make_transformers(block: SparseMoeBlock, implementation: str) -> Callable[[Tensor], Tensor]:
    """Make transformers' block with the same weights."""
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=MOE.num_experts,
        num_experts_per_tok=MOE.experts_per_token,
        moe_intermediate_size=MOE.intermediate_size,
        norm_topk_prob=MOE.renormalize,
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        theirs = Qwen3MoeSparseMoeBlock(config)
    gate_up, down = stacked(block)
    weights = {
        "gate.weight": block.router.weight.tensor,
        "experts.gate_up_proj": gate_up,
        "experts.down_proj": down,
    }
    theirs.load_state_dict(weights, assign=True)
    return lambda x: theirs(x[None])[0]


def loop_over_experts(block: SparseMoeBlock) -> Callable[[Tensor], Tensor]:
    """Make a call that computes each expert for its tokens, one after the other."""

    gate_ups, downs = stacked(block)

    def run(x: Tensor) -> Tensor:
        weights, chosen = block.route(x)
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, choice = torch.where(chosen == expert)
            gate, up = F.linear(x[tokens], gate_ups[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, downs[expert])
            result.index_add_(0, tokens, out * weights[tokens, choice, None].to(out.dtype))
        return result

    return run


def milliseconds(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the milliseconds of a pass, the fastest of as many as fit into some tenths of a second."""
    best = float("inf")
    for _ in range(max(1, 64 // len(x))):
        start = time.perf_counter()
        run(x)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def measure(dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Measure one row for each number of tokens."""
    block = make_ours(dtype)
    others = {
        "loop": loop_over_experts(block),
        "transformers eager": make_transformers(block, "eager"),
        "transformers grouped_mm": make_transformers(block, "grouped_mm"),
    }
    rows = []
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, HIDDEN).to(dtype)
        for other in others.values():
            torch.testing.assert_close(other(x), block(x), rtol=0, atol=5e-2 if dtype.itemsize == 2 else 1e-4)
        sides = [block, *others.values()]
        times = alternate(rounds, *(partial(milliseconds, side, x) for side in sides))
        row: dict[str, Any] = {
            "type": str(dtype).removeprefix("torch."),
            "tokens": num_tokens,
            "nbengine ms": statistics.median(times[0]),
        }
        for name, theirs in zip(others, times[1:], strict=True):
            row[f"{name} ms"] = statistics.median(theirs)
            row[f"{name} / nbengine"] = 1 / median_ratio(times[0], theirs)
        rows.append(row)
    return rows


def main() -> None:
    """Measure one row for each data type and number of tokens."""
    arguments = parser(__doc__).parse_args()
    with torch.inference_mode():
        rows = [row for dtype in (torch.float32, torch.bfloat16) for row in measure(dtype, arguments.rounds)]
    report("a layer of 64 experts on the CPU", rows, arguments.json, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
