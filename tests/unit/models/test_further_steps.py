"""Steps that follow each other at once compute the bits of as many steps one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.draw_parameters import DRAW_ROW
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.further_steps import MOST_FURTHER_STEPS, FurtherSteps
from nbengine.sampling.compiled_draws import CompiledDraws
from nbengine.sampling.random_streams import uniforms
from tests.support.thorough import in_turn
from tests.unit.models.prepared_batches import (
    EXPERTS,
    NUM_BLOCKS,
    Batches,
    Load,
    copies_of,
    expert_metadata,
    is_same,
    load_gguf,
)
from tests.unit.models.test_prepared_groups import MODELS as GROUPED


@pytest.fixture
def load_file(tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any) -> Load:
    def load(kind: str = "Llama", weight_type: Kind = Kind.Q4_1, **settings: Any) -> DecoderForCausalLM:
        arch = kind.lower()
        metadata = expert_metadata(arch) if kind.endswith("Moe") else {}
        variant = gguf_variant(arch=arch, weight_type=weight_type, metadata=metadata)
        return load_gguf(write_gguf(tmp_path / "model.gguf", random_model(kind, **settings), variant))

    return load


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


MODELS: dict[str, tuple[str, Kind, dict[str, Any]]] = {
    "llama": ("Llama", Kind.Q4_1, {"head_dim": 32}),
    "norms of heads": ("Qwen3", Kind.Q4_0, {"head_dim": 32}),
    "experts": ("Qwen3Moe", Kind.Q4_1, EXPERTS),
}
GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "intermediate_size": 128,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 40,
}
ANY = np.ones((), DRAW_ROW)
"""The parameters of a draw that does not count."""
LENGTHS = [3, 90, 15, 16, 200]


@dataclass
class Walk:
    """Requests that go on from step to step, in caches of their own."""

    batches: Batches
    lengths: list[int]

    def __post_init__(self) -> None:
        self.caches = copies_of(self.batches.caches)
        chance = torch.Generator().manual_seed(3)
        vocabulary = self.batches.model.config.vocab_size
        self.ids = torch.randint(0, vocabulary, (len(self.lengths),), generator=chance)
        self.ends = torch.full((8, 3), -1)
        self.stop = torch.zeros(1, dtype=torch.int64)
        self.draws = np.zeros(8, DRAW_ROW)

    @torch.inference_mode()
    def step(self, most: int = 0) -> tuple[Tensor, list[list[int]]]:
        """Compute a step and what follows it; return the last hidden states, and the tokens that were taken."""
        attention = self.batches.attention(self.lengths, most=NUM_BLOCKS // 4 // len(self.lengths))
        positions = torch.tensor(self.lengths) - 1
        taken = torch.full((MOST_FURTHER_STEPS, 8), -5)
        rows = self.draws[: len(positions)]
        rows["uniform"] = uniforms(rows["stream"], rows["number"])
        draws = torch.from_numpy(self.draws.view(np.uint8).reshape(8, -1))
        has_draws = bool(rows["inverse"].any())
        ended_at = torch.full((MOST_FURTHER_STEPS, 2), -5)
        further = FurtherSteps(self.ends, self.stop, taken, draws, ended_at, has_draws, most)
        before = time.time_ns()
        output = self.batches.model.step(self.ids, positions, self.caches, attention, None, further)
        assert further.taken <= most
        assert (taken[further.taken :] == -5).all()
        assert (ended_at[further.taken :] == -5).all()
        ends = [seconds * 10**9 + rest for seconds, rest in ended_at[: further.taken].tolist()]
        times = [before, *ends, time.time_ns()]
        assert times == sorted(times)
        assert output.largest is not None
        self.ids = output.largest[0].clone()
        if has_draws:
            assert output.logits is not None
            assert rows["uniform"].tolist() == uniforms(rows["stream"], rows["number"]).tolist()
            drawn, _ = CompiledDraws()(output.logits, np.where(rows["inverse"] > 0, rows, ANY))
            self.ids = torch.where(torch.from_numpy(rows["inverse"] > 0), drawn, self.ids)
            rows["number"] += 1
        self.lengths = [length + further.taken + 1 for length in self.lengths]
        return output.hidden.clone(), taken[: further.taken, : len(positions)].tolist()


@pytest.mark.parametrize(("name", "num_threads"), in_turn(MODELS, [1, 2, 3]))
def test_steps_at_once_have_the_bits_of_steps_one_by_one(
    name: str, num_threads: int, load_file: Load
) -> None:
    torch.set_num_threads(num_threads)
    kind, weight_type, settings = MODELS[name]
    model = load_file(kind, weight_type, **settings)
    assert model.goes_on
    compare(Batches(model))


IN_GROUPS = {"gemma3": ("Gemma3", GEMMA, torch.int8), "gemma4": (*GROUPED["gemma4"], None)}


@pytest.mark.parametrize(("name", "num_threads"), in_turn(IN_GROUPS, [1, 3]))
def test_layers_in_several_groups_find_their_own_blocks(
    name: str, num_threads: int, load: Any, random_model: Any, tmp_path: Path
) -> None:
    torch.set_num_threads(num_threads)
    kind, settings, kv_dtype = IN_GROUPS[name]
    random_model(kind, **settings).save_pretrained(tmp_path)
    batches = Batches(load(tmp_path, torch.bfloat16, quantization="int4"), kv_dtype)
    assert batches.groups.num_tables == 3
    compare(batches)


RECURRENT = {name: GROUPED[name] for name in ("qwen3.5", "lfm2", "granite 4")}


@pytest.mark.parametrize(("name", "num_threads"), in_turn(RECURRENT, [1, 3]))
def test_recurrent_states_go_on(
    name: str, num_threads: int, load: Any, random_model: Any, tmp_path: Path
) -> None:
    torch.set_num_threads(num_threads)
    kind, settings = RECURRENT[name]
    random_model(kind, **settings).save_pretrained(tmp_path)
    model = load(tmp_path, torch.bfloat16, quantization="int8")
    assert model.goes_on
    batches = Batches(model)
    batches.states_go_on = True
    compare(batches)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_tokens_are_drawn_as_one_by_one(num_threads: int, load_file: Load) -> None:
    torch.set_num_threads(num_threads)
    draws = np.zeros(8, DRAW_ROW)
    draws["inverse"], draws["log_min_p"], draws["top_p"] = [1, 0, 0.5, 2, 1, 0, 0, 0], -np.inf, 1
    draws["top_k"][2], draws["top_p"][3] = 9, 0.8
    draws["stream"], draws["number"] = np.arange(8) * 10**18, [0, 0, 5, 9, 2, 0, 0, 0]
    compare(Batches(load_file(head_dim=32)), draws)


def compare(batches: Batches, draws: NDArray[np.void] | None = None) -> None:
    at_once, one_by_one = Walk(batches, LENGTHS), Walk(batches, LENGTHS)
    for walk in (at_once, one_by_one):
        walk.draws[:] = 0 if draws is None else draws
    for most in (MOST_FURTHER_STEPS, 0, 1, MOST_FURTHER_STEPS, 3):
        hidden, tokens = at_once.step(most)
        assert len(tokens) == most
        for row in [*tokens, at_once.ids.tolist()]:
            expected, _ = one_by_one.step()
            assert one_by_one.ids.tolist() == row
        assert is_same(hidden, expected)
    assert at_once.lengths == one_by_one.lengths
    assert all(map(is_same, tensors(at_once.caches), tensors(one_by_one.caches)))


def tensors(caches: list[Any]) -> list[Tensor]:
    parts = [(each,) if isinstance(each, Tensor) else (each.conv, each.state) for each in caches]
    return [tensor for each in parts for tensor in each]


def test_no_step_follows_the_one_that_gives_an_end(load_file: Load) -> None:
    torch.set_num_threads(1)
    batches = Batches(load_file(head_dim=32))
    _, tokens = Walk(batches, LENGTHS).step(MOST_FURTHER_STEPS)
    for row in range(len(LENGTHS)):
        walk = Walk(batches, LENGTHS)
        walk.ends[row, row % 3] = end = tokens[4][row]
        first = [step[row] for step in tokens].index(end)
        assert walk.step(MOST_FURTHER_STEPS)[1] == tokens[:first]
        assert walk.ids.tolist() == tokens[first]
        # The next run begins where this one has ended.
        walk.ends.fill_(-1)
        assert walk.step(MOST_FURTHER_STEPS)[1][: 6 - first] == tokens[first + 1 :]


def test_steps_end_when_another_thread_wants_it(load_file: Load) -> None:
    torch.set_num_threads(1)
    batches = Batches(load_file(head_dim=32))
    whole, walk = Walk(batches, LENGTHS), Walk(batches, LENGTHS)
    _, tokens = whole.step(MOST_FURTHER_STEPS)
    walk.stop[0] = 1
    assert walk.step(MOST_FURTHER_STEPS)[1] == []
    assert walk.ids.tolist() == tokens[0]


def test_a_model_whose_steps_end_in_python_takes_no_further_ones(load_file: Load) -> None:
    torch.set_num_threads(1)
    model = load_file(head_dim=32)
    assert model.goes_on
    model._prepared = None
    assert not model.goes_on
