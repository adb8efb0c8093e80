"""Families with recurrent layers against their classes of transformers in float32: token by token, alone and in mixed
batches, in chunks, from checkpoints, and divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel_support import ThreadWorld
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbengine.kernels.dispatch import RecurrentKernels, select_kernels, select_recurrent_kernels
from nbengine.kernels.kv_cache import cache_shape
from nbengine.kernels.recurrent_metadata import Checkpoints, build_recurrent_metadata
from nbengine.kernels.torch.recurrent import TorchRecurrent
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.decoder_layer import ResidualStream
from tests.support.recurrent_cases import CASES, QWEN, QWEN_EXPERTS, saved
from tests.support.thorough import amount, combinations, in_turn
from tests.unit.models.conftest import BLOCK_SIZE, Runner

CPU = torch.device("cpu")
NUM_SLOTS = 24
LENGTH = 150
"""Tokens of the longest request: two chunks of transformers, and a part of one."""
SHORT = amount(24, thorough=LENGTH)
"""Tokens of a request in small chunks, which need not be as long as those of transformers."""


@dataclass
class Hybrid:
    """A decoder whose recurrent layers are given states and metadata made by hand, the others a batch."""

    model: DecoderForCausalLM
    kernels: RecurrentKernels

    def __post_init__(self) -> None:
        self.config, self.dtype = self.model.config, self.model.dtype
        self.compute_logits = self.model.compute_logits
        self.states = self.model.new_states(NUM_SLOTS)
        for state in self.states:
            state.conv.fill_(torch.nan)
            state.state.fill_(torch.nan)
        self.slots: list[int] = []
        self.sources: list[int] = []
        self.checkpoints: list[tuple[int, int, int]] = []

    def forward(
        self, ids: Tensor, positions: Tensor, caches: list[Tensor], batch: Any, received: Any
    ) -> Tensor:
        columns = np.array(self.checkpoints, np.int32).reshape(-1, 3).T
        metadata = build_recurrent_metadata(
            np.diff(batch.query_start_loc).astype(np.int32),
            np.array(self.slots, np.int32),
            np.array(self.sources, np.int32),
            Checkpoints(*columns),
            num_slots=NUM_SLOTS,
            kernels=self.kernels,
            device=CPU,
        )
        x = self.model.embed(ids) if received is None else received
        angles = [rotary.at(positions) for rotary in self.model.rotaries]
        stream, states = ResidualStream(x, self.config.residual_scale), iter(self.states)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            own = (next(states), metadata) if layer.is_recurrent else (cache, batch)
            layer(stream, angles, *own)
        return stream.read(self.model.norm)


class HybridRunner(Runner):
    """Runs a decoder with recurrent layers; every request has a slot, and begins from zeros."""

    def __init__(
        self, model: DecoderForCausalLM, kernels: RecurrentKernels | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        kernels = kernels or select_recurrent_kernels(CPU, torch.float32)
        self.hybrid = self.model = Hybrid(model, kernels)  # type: ignore[assignment]
        self._slots = {}
        self._sources: dict[str, int] = {}
        self.kept: list[tuple[str, int, int]] = []

    def begin_from(self, name: str, other: str, length: int, slot: int) -> None:
        """Let a request begin with the first tokens of another one, whose state is in a slot."""
        self._tables[name] = list(self._tables[other][: length // BLOCK_SIZE])
        self._lengths[name] = length
        self._sources[name] = slot

    def hidden(self, chunks: dict[str, list[int]]) -> dict[str, Tensor]:
        """See `Runner.hidden`; `kept` are the checkpoints (request, tokens of this step, slot)."""
        for name in chunks:
            self._slots.setdefault(name, len(self._slots))
        self.hybrid.slots = [self._slots[name] for name in chunks]
        self.hybrid.sources = [self._sources.get(name, -1) for name in chunks]
        places = {name: place for place, name in enumerate(chunks)}
        self.hybrid.checkpoints = [(places[name], end, slot) for name, end, slot in self.kept]
        self.kept = []
        self._sources |= {name: self._slots[name] for name in chunks}
        return super().hidden(chunks)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_of(oracle: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([tokens])).logits[0]
    return logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-4)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


def chunked(runner: Any, tokens: list[int], size: int, others: dict[str, list[int]]) -> Tensor:
    """The logits of a request that comes in chunks, other requests in the batch of the first."""
    parts = []
    for first in range(0, len(tokens), size):
        chunks = {**(others if first == 0 else {}), f"{size}": tokens[first : first + size]}
        parts.append(runner.step(chunks)[f"{size}"])
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "tied", "kernels"), in_turn(CASES, [False, True], [None, TorchRecurrent()]))
def test_tokens_are_those_of_transformers_however_a_request_is_cut(
    name: str, tied: bool, kernels: Any, tmp_path: Path, load: Any, random_model: Any, compared: Any
) -> None:
    oracle = saved(name, tmp_path, random_model, tie_word_embeddings=tied)
    runner = HybridRunner(load(tmp_path), kernels)
    others = {f"other {length}": tokens_of(length, length) for length in (1, 21, 2)}
    tokens = tokens_of(LENGTH)
    expected = expected_of(oracle, tokens)
    for found_name, logits in runner.step(others).items():
        assert_same(logits, expected_of(oracle, others[found_name]))
    for size, length in ((LENGTH, LENGTH), (64, LENGTH), (7, SHORT), (1, SHORT)):
        found = chunked(runner, tokens[:length], size, {f"beside {size}": tokens_of(5, size)})
        assert_same(found, expected[:length])
    compared(oracle, "cut")


@pytest.mark.parametrize("name", ["qwen3.5", "granite 4 moe", "lfm2"])
def test_a_request_that_goes_on_from_a_checkpoint_gives_the_tokens_of_a_cold_one(
    name: str, tmp_path: Path, load: Any, random_model: Any
) -> None:
    oracle = saved(name, tmp_path, random_model)
    runner = HybridRunner(load(tmp_path))
    first = tokens_of(60)
    runner.kept = [("a", 24, NUM_SLOTS - 1)]
    assert_same(runner.step({"a": first})["a"], expected_of(oracle, first))
    edited = first[:24] + tokens_of(40, 1)
    cold = runner.step({"cold": edited})["cold"]
    runner.begin_from("b", "a", 24, NUM_SLOTS - 1)
    runner.begin_from("c", "a", 24, NUM_SLOTS - 1)
    warm = runner.step({"b": edited[24:], "c": first[24:], "a": tokens_of(1)})
    assert_same(warm["b"], cold[24:])
    assert_same(warm["b"], expected_of(oracle, edited)[24:])
    assert_same(warm["c"], expected_of(oracle, first)[24:])


@pytest.mark.parametrize(
    ("name", "sizes"), combinations(CASES, amount([(2, 2)], thorough=[(2, 1), (1, 2), (2, 2)]))
)
def test_tokens_are_those_of_transformers_on_ranks(
    name: str, sizes: tuple[int, int], tmp_path: Path, load: Any, random_model: Any, compared: Any
) -> None:
    oracle = check_on_ranks(name, ThreadWorld(*sizes), tmp_path, load, random_model)
    compared(oracle, *["tensor"] * (sizes[0] > 1), *["pipeline"] * (sizes[1] > 1))


def test_four_ranks_share_two_groups(tmp_path: Path, load: Any, random_model: Any) -> None:
    check_on_ranks("granite 4 moe", ThreadWorld(4, 1), tmp_path, load, random_model)


def check_on_ranks(name: str, world: Any, directory: Path, load: Any, random_model: Any) -> Any:
    """Check the logits of all ranks; gives the model of transformers."""
    oracle = saved(name, directory, random_model)
    runners = [HybridRunner(load(directory, parallel=state), parallel=state) for state in world.states]
    tokens = tokens_of(LENGTH)

    def run(state: Any) -> Tensor:
        runner, parts = runners[state.layout.rank], []
        for chunk in (tokens[:50], tokens[50:51], tokens[51:]):
            step = runner.step if state.layout.is_last_stage else runner.hidden
            parts.append(step({"a": chunk})["a"])
        return torch.cat(parts)

    layout = world.states[-1].layout
    for logits in world.run(run)[layout.pp_rank * layout.tp_size :]:
        assert_same(logits, expected_of(oracle, tokens))
    return oracle


@pytest.mark.parametrize("name", ["qwen3.5", "granite 4 moe", "granite 4 without attention", "lfm2"])
def test_a_model_that_begins_with_recurrent_layers_is_warmed_up(
    name: str, tmp_path: Path, load: Any, random_model: Any
) -> None:
    saved(name, tmp_path, random_model)
    model, kernels = load(tmp_path), select_kernels(CPU, torch.float32)
    states = iter(model.new_states(2))
    shape = cache_shape(torch.float32, 2, model.shard.num_kv_heads, 16, model.config.head_dim)
    caches = [next(states) if layer.is_recurrent else torch.zeros(shape) for layer in model.layers]
    model.warm_up(kernels, caches, 16)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_a_model_with_images_and_heads_for_further_tokens_runs_as_its_text(
    kind: str, tmp_path: Path, load: Any, random_model: Any
) -> None:
    import transformers

    text = {**QWEN, **(QWEN_EXPERTS if "Moe" in kind else {}), "vocab_size": 96, "hidden_size": 64}
    text |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    config = model_class.config_class(text_config=text, vision_config=vision)
    oracle = model_class._from_config(config, attn_implementation="eager").float().eval()
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, file)
    tokens = tokens_of(70)
    assert_same(HybridRunner(load(tmp_path)).step({"a": tokens})["a"], expected_of(oracle, tokens))


@pytest.mark.parametrize("name", ["qwen3.5", "granite 4 moe", "lfm2"])
def test_narrow_types_run_and_keep_their_states_in_float32(
    name: str, tmp_path: Path, load: Any, random_model: Any
) -> None:
    oracle = saved(name, tmp_path, random_model)
    model = load(tmp_path, torch.bfloat16)
    runner = HybridRunner(model, select_recurrent_kernels(CPU, model.hidden_dtype))
    states = runner.hybrid.states
    assert {each.dtype for state in states for each in (state.conv, state.state)} == {torch.float32}
    tokens = tokens_of(40)
    found = torch.cat([runner.step({"a": tokens[:30]})["a"], runner.step({"a": tokens[30:]})["a"]])
    expected = expected_of(oracle, tokens)
    assert (found - expected).abs().mean() < 0.04 * expected.abs().mean()
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.5)
