"""Mixtures of experts divided among the ranks of several engine cores, which are threads here, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES as FAMILIES
from parallel_support import ThreadDataParallelGroup, ThreadWorld
from torch import Tensor

from nbengine.distributed.communicator import ParallelState, SingleGroup
from nbengine.models.checkpoints.loader import open_weights
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.basic import WeightSlot
from nbengine.models.loading import weights_bytes_of
from nbengine.models.redivision import Redivision
from tests.support.thorough import combinations, in_turn

SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 96,
}
DEEPSEEK = FAMILIES["deepseek v3"]
QWEN3 = {**SIZES, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral of 5": ("Mixtral", {**SIZES, "num_local_experts": 5, "intermediate_size": 48}),
    "qwen3": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3 top-1 of 7, some dense": (
        "Qwen3Moe",
        {
            **QWEN3,
            "num_experts": 7,
            "num_experts_per_tok": 1,
            "mlp_only_layers": [0],
            "intermediate_size": 32,
        },
    ),
    "qwen2 shared": (
        "Qwen2Moe",
        {
            **SIZES,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "deepseek v3 latents, groups": ("DeepseekV3", {**DEEPSEEK.settings, "moe_intermediate_size": 24}),
    "llama 4 weighted inputs, some dense": (
        "Llama4",
        {
            **FAMILIES["llama 4"].settings,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_layers": [0, 1, 3],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "swiglu_limit": 0.8,
            "sliding_window": 8,
        },
    ),
}
WORLDS = {
    # (tensor, pipeline, data) parallel sizes
    "TP2": (2, 1, 1),
    "DP2": (1, 1, 2),
    "DP3": (1, 1, 3),
    "TP2 DP2": (2, 1, 2),
    "PP2 DP2": (1, 2, 2),
}
CASES = [
    pytest.param(name, sizes, expert_parallel, id=f"{name} {world}{' EP' if expert_parallel else ''}")
    for (expert_parallel, (world, sizes)), name in in_turn(product((False, True), WORLDS.items()), VARIANTS)
]
"""A usual run has every division, with experts in parts and whole, and every variant."""
Chunks = dict[str, list[int]]


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Cores:
    """The ranks of several engine cores with one model."""

    def __init__(
        self, sizes: tuple[int, int, int], expert_parallel: bool, load: Any, directory: Path
    ) -> None:
        self.world = ThreadWorld(*sizes, expert_parallel=expert_parallel)
        self.models: list[DecoderForCausalLM] = [
            load(directory, parallel=state) for state in self.world.states
        ]

    def run(self, steps: list[list[Chunks]], make_runner: Any) -> list[list[dict[str, Tensor]]]:
        """By step and rank the logits of the core's chunks; a core without any makes a dummy batch.

        What other stages than the last give is empty.
        """

        def run(state: ParallelState) -> list[dict[str, Tensor]]:
            model = self.models[self.world.states.index(state)]
            runner = make_runner(model, parallel=state)
            return [self._step(runner, state, step[state.layout.dp_rank]) for step in steps]

        by_rank = self.world.run(run)
        return [list(ranks) for ranks in zip(*by_rank, strict=True)]

    @staticmethod
    def _step(runner: Any, state: ParallelState, chunks: Chunks) -> dict[str, Tensor]:
        state.dp.begin_step(sum(map(len, chunks.values())))
        if not chunks:
            with torch.inference_mode():
                runner.model.dummy_forward()
            return {}
        if state.layout.is_last_stage:
            logits: dict[str, Tensor] = runner.step(chunks)
            return logits
        runner.hidden(chunks)
        return {}


@pytest.mark.parametrize(("variant", "sizes", "expert_parallel"), CASES)
def test_divided_experts_give_the_logits_of_transformers_on_all_ranks(
    variant: str,
    sizes: tuple[int, int, int],
    expert_parallel: bool,
    tmp_path: Path,
    load: Any,
    make_runner: Any,
    random_model: Any,
) -> None:
    kind, settings = VARIANTS[variant]
    oracle = random_model(kind, **settings)
    oracle.save_pretrained(tmp_path)
    cores = Cores(sizes, expert_parallel, load, tmp_path)
    dp_size = sizes[2]
    prompts = [tokens_of(13 - 4 * core, core) for core in range(dp_size)]
    steps = [
        [{"a": prompt} for prompt in prompts],
        [{} if core else {"a": [7], "b": [5, 6, 7]} for core in range(dp_size)],
        [{"a": [core]} if core else {} for core in range(dp_size)],
    ]
    results = cores.run(steps, make_runner)
    context: list[Chunks] = [{} for _ in range(dp_size)]
    for step, by_rank in zip(steps, results, strict=True):
        for core, chunks in enumerate(step):
            for name, tokens in chunks.items():
                context[core].setdefault(name, []).extend(tokens)
                with torch.inference_mode():
                    expected = oracle(torch.tensor([context[core][name]])).logits[0, -len(tokens) :]
                ranks = [
                    logits[name]
                    for state, logits in zip(cores.world.states, by_rank, strict=True)
                    if state.layout.dp_rank == core and logits
                ]
                assert len(ranks) == sizes[0]
                for logits in ranks:
                    assert torch.equal(logits, ranks[0])
                    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
                    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def saved(random_model: Any, directory: Path, variant: str = "qwen2 shared") -> dict[str, Any]:
    """Saves a model; gives its configuration."""
    kind, settings = VARIANTS[variant]
    oracle = random_model(kind, **settings)
    oracle.save_pretrained(directory)
    config: dict[str, Any] = {**oracle.config.to_dict(), "architectures": oracle.config.architectures}
    return config


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_block_costs_one_exchange_between_cores_each_way_and_one_sum(
    expert_parallel: bool, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    saved(random_model, tmp_path)
    cores = Cores((2, 1, 2), expert_parallel, load, tmp_path)
    cores.run([[{"a": [1, 2, 3]}, {}]], make_runner)
    for state in cores.world.states:
        own = 0 if state.layout.dp_rank else 3
        between = [("gather", (own, 64)), ("reduce_scatter", (3, 64))]
        assert state.dp.calls == between * 3  # type: ignore[attr-defined]
        within = [("all_reduce", (3, 64))] * (1 + 2 * 3) + [("all_gather", (3, 48))]
        assert state.tp.calls == (within if own else [])  # type: ignore[attr-defined]


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_the_bytes_foretold_of_a_rank_are_those_that_it_takes(
    expert_parallel: bool, tmp_path: Path, load: Any, random_model: Any
) -> None:
    hf_config = saved(random_model, tmp_path, "mixtral of 5")
    cores = Cores((2, 1, 2), expert_parallel, load, tmp_path)
    held = [model.weights_bytes for model in cores.models]
    assert held == [weights_bytes_of(hf_config, torch.float32, state.layout) for state in cores.world.states]
    one_expert = 3 * 64 * 48 * 4 * 3
    assert (len(set(held)) > 1) is expert_parallel
    assert max(held) - min(held) == (one_expert if expert_parallel else 0)


def part(slot: WeightSlot, values: Tensor) -> Tensor:
    return values if slot.dim is None else values.narrow(slot.dim, slot.start, slot.tensor.shape[slot.dim])


@pytest.mark.parametrize(("variant", "expert_parallel"), in_turn(VARIANTS, [False, True]))
def test_ranks_together_hold_every_expert_and_each_reads_its_part_only(
    variant: str, expert_parallel: bool, tmp_path: Path, load: Any, random_model: Any
) -> None:
    saved(random_model, tmp_path, variant)
    whole = {name: slot.tensor for name, slot in load(tmp_path).weight_slots().items()}
    held = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in whole.items()}
    cores = Cores((2, 1, 2), expert_parallel, load, tmp_path)
    for model in cores.models:
        slots = model.weight_slots()
        for name, slot in slots.items():
            assert torch.equal(slot.tensor, part(slot, whole[name]))
            part(slot, held[name]).fill_(True)
        weights = open_weights((tmp_path / "model.safetensors",), model.config)
        assert weights.num_bytes(slots) == model.weights_bytes
    assert [name for name, places in held.items() if not places.all()] == []
    copies = sum(model.weights_bytes for model in cores.models)
    assert copies < 4 * sum(values.nbytes for values in whole.values())


def no_reading(model: DecoderForCausalLM, slots: dict[str, WeightSlot]) -> None:
    raise AssertionError(f"read from the files: {sorted(slots)}")


def redivide(
    directory: Path,
    load: Any,
    sizes: tuple[int, int],
    expert_parallel: bool,
    before: int,
    after: int,
    read: Callable[[DecoderForCausalLM, dict[str, WeightSlot]], None] = no_reading,
) -> tuple[list[DecoderForCausalLM], ThreadWorld]:
    """The models of the engine cores that there are when their number has changed, and what they are joined by."""
    tp, pp = sizes
    world = ThreadWorld(tp, pp, max(before, after), expert_parallel=expert_parallel)

    def layout(state: ParallelState, cores: int) -> ParallelState:
        return replace(state, layout=replace(state.layout, dp_size=cores))

    def model_of(state: ParallelState) -> DecoderForCausalLM:
        if state.layout.dp_rank < before:
            return load(directory, parallel=layout(state, before))
        model = load(directory, parallel=state)
        with torch.inference_mode():
            for weight in model.parameters():
                weight.fill_(torch.nan if weight.is_floating_point() else 0xA5)
        return model

    models = [model_of(state) for state in world.states]

    def change(state: ParallelState) -> None:
        model = models[world.states.index(state)]
        Redivision(before, after, state.dp, layout(state, after)).run(model, partial(read, model))

    world.run(change)
    return models[: tp * pp * after], world


@pytest.mark.parametrize(
    ("sizes", "change", "variant", "expert_parallel"),
    combinations(
        [(1, 1), (2, 1), (1, 2)],
        [(1, 2), (2, 1), (1, 4), (4, 2), (2, 3)],
        ["qwen3", "gpt-oss"],
        [False, True],
        together=1,
    ),
)
def test_weights_go_from_those_who_have_them_to_those_who_need_them(
    sizes: tuple[int, int],
    change: tuple[int, int],
    expert_parallel: bool,
    variant: str,
    tmp_path: Path,
    load: Any,
    random_model: Any,
) -> None:
    hf_config = saved(random_model, tmp_path, variant)
    whole = {name: slot.tensor for name, slot in load(tmp_path).weight_slots().items()}
    models, world = redivide(tmp_path, load, sizes, expert_parallel, *change)
    for model, state in zip(models, world.states, strict=False):
        assert model.layout == replace(state.layout, dp_size=change[1])
        assert model.weights_bytes == weights_bytes_of(hf_config, torch.float32, model.layout)
        for name, slot in model.weight_slots().items():
            assert torch.equal(slot.tensor, part(slot, whole[name])), name


def test_experts_that_stay_where_they_are_are_not_sent(tmp_path: Path, load: Any, random_model: Any) -> None:
    saved(random_model, tmp_path, "mixtral of 5")
    _, world = redivide(tmp_path, load, (1, 1), True, 4, 5)
    group = world.states[0].dp
    assert isinstance(group, ThreadDataParallelGroup)
    sent = [shape for name, shape in group.calls if name == "broadcast"]
    # Of five experts on four cores only the second of the first core moves, and all those after it.
    assert sent.count((48, 64)) == 3 * 2 * 4


def test_redivided_experts_compute_with_the_new_group(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    saved(random_model, tmp_path, "qwen3")
    cores = Cores((1, 1, 1), True, load, tmp_path)
    (alone,) = cores.run([[{"a": [1, 2, 3]}]], make_runner)
    cores.models, cores.world = redivide(tmp_path, load, (1, 1), True, 1, 2)
    (both,) = cores.run([[{"a": [1, 2, 3]}, {"b": [4]}]], make_runner)
    torch.testing.assert_close(both[0]["a"], alone[0]["a"], rtol=0, atol=1e-4)


def test_an_unchanged_division_copies_nothing(tmp_path: Path, load: Any, random_model: Any) -> None:
    saved(random_model, tmp_path)
    model = load(tmp_path)
    before = [weight.data_ptr() for weight in model.parameters()]
    Redivision(1, 1, SingleGroup(), ParallelState()).run(model, partial(no_reading, model))
    assert [weight.data_ptr() for weight in model.parameters()] == before
