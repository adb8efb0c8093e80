"""The decoder divided among ranks, which are threads here, against transformers and against itself in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_support import ThreadWorld
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.errors import NBEngineError
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.basic import Linear
from nbengine.models.loading import weights_bytes_of
from tests.support.thorough import amount


def sizes(num_heads: int, num_kv_heads: int, **others: Any) -> dict[str, Any]:
    """Settings of a model with heads of 16 dimensions and an inner size that all tested ranks divide."""
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "intermediate_size": 144,
        **others,
    }


BIASES = {"attention_bias": True, "mlp_bias": True}
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "llama 4/2": ("Llama", sizes(4, 2, vocab_size=97), (2, 4)),
    "llama 8/8 tied": ("Llama", sizes(8, 8, tie_word_embeddings=True, vocab_size=95), (2, 4)),
    "llama 9/3": ("Llama", sizes(9, 3, hidden_size=72, tie_word_embeddings=True), (3, 9)),
    "llama 4/1 biases": ("Llama", sizes(4, 1, vocab_size=94, **BIASES), (2, 4)),
    "llama 8/2 biases": ("Llama", sizes(8, 2, **BIASES), (4,)),
    "qwen2 6/2": ("Qwen2", sizes(6, 2, vocab_size=95), (2, 6)),
    "qwen2 6/3 tied": ("Qwen2", sizes(6, 3, tie_word_embeddings=True), (3,)),
    "qwen3 8/2": ("Qwen3", sizes(8, 2, attention_bias=True), (2, 8)),
    "mistral 4/2": ("Mistral", sizes(4, 2, sliding_window=None), (4,)),
    "vocabulary of 9": ("Llama", sizes(4, 4, vocab_size=9), (4,)),
}
CASES = [
    pytest.param(name, tp_size, pp_size, id=f"{name} TP{tp_size} PP{pp_size}")
    for name, (_, _, tp_sizes) in VARIANTS.items()
    for number, tp_size in enumerate((1, *tp_sizes))
    # A usual run has each variant on two stages, once.
    for pp_size in amount((2,) if number == 1 else (1,), thorough=(1, 2))
    if tp_size * pp_size > 1
]


def tokens_of(length: int, vocab_size: int, seed: int) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class World:
    """The ranks of a model; what is returned is of the last stage's."""

    def __init__(self, tp_size: int, pp_size: int, load: Any, make_runner: Any, directory: Path) -> None:
        self.world = ThreadWorld(tp_size, pp_size)
        self.models = [load(directory, parallel=state) for state in self.world.states]
        self._runners = [
            make_runner(model, parallel=state)
            for model, state in zip(self.models, self.world.states, strict=True)
        ]

    def step(self, chunks: dict[str, list[int]]) -> list[dict[str, Tensor]]:
        """The logits of the chunks on every rank of the last stage."""

        def run(state: ParallelState) -> dict[str, Tensor]:
            runner = self._runners[state.layout.rank]
            logits: dict[str, Tensor] = (
                runner.step(chunks) if state.layout.is_last_stage else runner.hidden(chunks)
            )
            return logits

        last_stage = self.world.states[-1].layout.pp_rank * self.world.states[-1].layout.tp_size
        return self.world.run(run)[last_stage:]


@pytest.mark.parametrize(("variant", "tp_size", "pp_size"), CASES)
def test_divided_models_give_the_logits_of_transformers_on_all_ranks(
    variant: str, tp_size: int, pp_size: int, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    kind, settings, _ = VARIANTS[variant]
    oracle = random_model(kind, **settings)
    oracle.save_pretrained(tmp_path)
    world = World(tp_size, pp_size, load, make_runner, tmp_path)
    vocab_size = oracle.config.vocab_size
    a, b = tokens_of(21, vocab_size, 0), tokens_of(6, vocab_size, 1)
    steps = [{"a": a[:20], "b": b[:5]}, {"b": b[5:], "a": a[20:]}]
    parts: dict[str, list[Tensor]] = {"a": [], "b": []}
    for step in steps:
        first, *others = world.step(step)
        for name, logits in first.items():
            assert all(torch.equal(logits, other[name]) for other in others)
            assert logits.is_contiguous()
            parts[name].append(logits)
    for name, tokens in (("a", a), ("b", b)):
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0]
        logits = torch.cat(parts[name])
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_divided_classifiers_give_the_labels_of_transformers(
    tp_size: int, pp_size: int, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    oracle = random_model("Qwen3", "ForSequenceClassification", **sizes(4, 2, num_labels=3, pad_token_id=0))
    oracle.save_pretrained(tmp_path)
    world = World(tp_size, pp_size, load, make_runner, tmp_path)
    tokens = tokens_of(12, 96, 3)

    def classify(state: ParallelState) -> Tensor | None:
        runner = make_runner(world.models[state.layout.rank], parallel=state)
        hidden = runner.hidden({"a": tokens})["a"]
        with torch.inference_mode():
            return runner.model.classify(hidden[-1:]) if state.layout.is_last_stage else None

    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits
    labels = [found for found in world.world.run(classify) if found is not None]
    assert len(labels) == tp_size
    for found in labels:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_layer_costs_two_sums_and_the_ends_one_exchange_each(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    random_model("Llama", **sizes(4, 2)).save_pretrained(tmp_path)
    world = World(2, 1, load, make_runner, tmp_path)
    world.step({"a": [1, 2, 3]})
    for state in world.world.states:
        hidden = ("all_reduce", (3, 64))
        assert state.tp.calls == [hidden] * (1 + 2 * 3) + [("all_gather", (3, 48))]  # type: ignore[attr-defined]


CONFIG = DecoderConfig(96, 64, 144, 5, 4, 2, 16, 1e-5, 1e4, None, 256, tie_word_embeddings=True)


def nowhere(layout: RankLayout, config: DecoderConfig = CONFIG) -> DecoderForCausalLM:
    where = torch.device("meta")
    return DecoderForCausalLM(config, dtype=torch.float32, device=where, parallel=ParallelState(layout))


def test_a_rank_on_its_own_has_the_plain_products() -> None:
    layer = nowhere(RankLayout()).layers[0]
    assert type(layer.self_attn.o_proj) is type(layer.mlp.down_proj) is Linear


def test_stages_hold_their_own_layers_and_ends() -> None:
    first, middle, last = (nowhere(RankLayout(0, 1, stage, 3)) for stage in range(3))
    assert [list(model.shard.layers) for model in (first, middle, last)] == [[0, 1], [2, 3], [4]]
    assert [len(model.layers) for model in (first, middle, last)] == [2, 2, 1]
    ends = [
        [name for name in model.weight_slots() if ".layers." not in name] for model in (first, middle, last)
    ]
    assert ends == [["model.embed_tokens.weight"], [], ["model.norm.weight", "model.embed_tokens.weight"]]


def test_what_a_stage_does_not_have_is_refused() -> None:
    first, last = (nowhere(RankLayout(0, 1, stage, 2)) for stage in range(2))
    with pytest.raises(NBEngineError, match="PP1: tokens are embedded on the first"):
        last.embed(torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises(NBEngineError, match="PP0: the model has no output projection here"):
        first.compute_logits(torch.zeros(1, 64, device="meta"))


def test_the_bytes_foretold_of_a_rank_are_those_that_it_takes(
    tmp_path: Path, load: Any, random_model: Any
) -> None:
    oracle = random_model("Llama", **sizes(4, 2, tie_word_embeddings=True, vocab_size=95))
    oracle.save_pretrained(tmp_path)
    world = ThreadWorld(2, 2)
    hf_config = {**oracle.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    for state in world.states:
        model = load(tmp_path, parallel=state)
        assert weights_bytes_of(hf_config, torch.float32, state.layout) == model.weights_bytes
        assert model.weights_bytes < weights_bytes_of(hf_config, torch.float32) / 2
