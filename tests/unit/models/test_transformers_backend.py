"""Decoders through their classes of transformers, with our attention, against the same classes with their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_support import ThreadWorld
from random_models import assert_greedy
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.stablelm import modeling_stablelm
from transformers_cases import CLASSES, GROUPED, HEADS, LATENT, LLAMA_4, WINDOW

from nbengine.config import ModelConfig
from nbengine.distributed.communicator import ParallelState
from nbengine.errors import InvalidArgumentError, ModelLoadError, NBEngineError
from nbengine.kv_cache.specs import FULL, LayerRule
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.transformers_config import transformers_config
from nbengine.models.families import transformers_class
from nbengine.models.families.transformers_backend import (
    TransformersForCausalLM,
    TransformersForSequenceClassification,
)
from nbengine.models.loading import weights_bytes_of
from tests.support.thorough import amount
from tests.tools.compared_models import THROUGH_TRANSFORMERS

PROMPTS = {"long": amount(40, thorough=100), "one": 1, "short": 9}
NEW_TOKENS = 8


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def greedy(runner: Any, prompts: dict[str, list[int]], chunk: int) -> dict[str, list[int]]:
    """The tokens that follow in our runner: every request goes on in every step, by at most `chunk` tokens, so that
    prompts and single tokens meet."""
    waiting = {name: list(tokens) for name, tokens in prompts.items()}
    found: dict[str, list[int]] = {name: [] for name in prompts}
    while waiting:
        step = {name: tokens[:chunk] for name, tokens in waiting.items()}
        for name, logits in runner.step(step).items():
            del waiting[name][:chunk]
            if not waiting[name]:
                found[name].append(int(logits[-1].argmax()))
                waiting[name].append(found[name][-1])
                if len(found[name]) == NEW_TOKENS:
                    del waiting[name]
    return found


@pytest.fixture(scope="module", params=CLASSES)
def saved(
    request: pytest.FixtureRequest, random_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    kind, settings = CLASSES[request.param]
    model = random_model(kind, HEADS.get(kind, "ForCausalLM"), **settings)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def model(saved: tuple[PreTrainedModel, Path], load: Any) -> TransformersForCausalLM:
    found = load(saved[1], model_impl="transformers")
    assert isinstance(found, TransformersForCausalLM)
    return found


@pytest.mark.parametrize("chunk", amount([7], thorough=[1, 7, 64, 1000]))
def test_greedy_tokens_are_those_of_transformers_in_mixed_batches_and_in_chunks(
    saved: tuple[PreTrainedModel, Path],
    model: TransformersForCausalLM,
    make_runner: Any,
    chunk: int,
    compared: Any,
) -> None:
    prompts = {name: tokens_of(length, length) for name, length in PROMPTS.items()}
    found = greedy(make_runner(model), prompts, chunk)
    for name, tokens in prompts.items():
        assert_greedy(saved[0], tokens, found[name])
    assert greedy(make_runner(model), {"alone": prompts["short"]}, chunk)["alone"] == found["short"]
    compared(THROUGH_TRANSFORMERS, "cut")


def test_logits_of_all_positions_are_those_of_transformers(
    saved: tuple[PreTrainedModel, Path], model: TransformersForCausalLM, make_runner: Any
) -> None:
    prompts = {name: tokens_of(length, length) for name, length in PROMPTS.items()}
    logits = make_runner(model).step(prompts)
    for name, tokens in prompts.items():
        torch.testing.assert_close(logits[name], logits_of(saved[0], tokens), rtol=0, atol=1e-4)


def test_the_memory_of_weights_is_known_before_they_are_loaded(
    saved: tuple[PreTrainedModel, Path], model: TransformersForCausalLM
) -> None:
    oracle, directory = saved
    expected = sum(weight.nbytes for weight in oracle.parameters())
    config = ModelConfig(directory=str(directory), model_impl="transformers")
    assert weights_bytes_of(load_hf_config(config), torch.float32) == model.weights_bytes
    # Beside them are buffers that a checkpoint has.
    assert expected <= model.weights_bytes <= expected + 4096
    assert sum(weight.nbytes for weight in model.parameters()) == model.weights_bytes


DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": 4}),
    "Starcoder2": ("Starcoder2", WINDOW),
    "Cohere, tied": ("Cohere", {"tie_word_embeddings": True, "logit_scale": 0.3, "head_dim": 16}),
    "Granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "Gemma 2": ("Gemma2", {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "OLMo 2: gathered queries and keys, a split input": ("Olmo2", {}),
    "GLM: gates and their other projections gathered": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "DeepSeek-V3: all heads everywhere, shared experts": (
        "DeepseekV3",
        {**LATENT, **GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "Granite with sinks: one number a head": ("GraniteSWA", {**WINDOW, "head_dim": 16}),
}
DIVIDED_BY_TENSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMoE: experts divided within, gathered queries": (
        "Olmoe",
        {"num_experts": 8, "num_experts_per_tok": 2},
    ),
    "PhiMoE: experts of another name": ("Phimoe", {"num_local_experts": 4}),
    "GraniteMoE: all heads everywhere, experts in one tensor": (
        "GraniteMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""Classes without a plan for pipeline parallelism."""
WORLDS = [(2, 1), (1, 2), (2, 2), (1, 3)]
IN_WORLDS = [
    (name, *world)
    for name in DIVIDED
    for world in amount([(2, 2), (1, 3)] if name == "GPT-NeoX" else [(2, 2)], thorough=WORLDS)
]
"""A usual run divides every class both ways at once, one in stages alone, and those below by tensors alone."""


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"), [*IN_WORLDS, *((name, 2, 1) for name in DIVIDED_BY_TENSORS)]
)
def test_divided_models_give_the_tokens_of_transformers_on_all_ranks(
    name: str,
    tp_size: int,
    pp_size: int,
    tmp_path: Path,
    load: Any,
    make_runner: Any,
    random_model: Any,
    compared: Any,
) -> None:
    kind, settings = {**DIVIDED, **DIVIDED_BY_TENSORS}[name]
    oracle = random_model(kind, **settings)
    oracle.save_pretrained(tmp_path)
    world = ThreadWorld(tp_size, pp_size)
    models = [load(tmp_path, parallel=state, model_impl="transformers") for state in world.states]
    runners = [make_runner(model, parallel=state) for model, state in zip(models, world.states, strict=True)]

    def step(chunks: dict[str, list[int]]) -> list[dict[str, Tensor]]:
        @torch.inference_mode()
        def run(state: ParallelState) -> dict[str, Tensor]:
            runner = runners[state.layout.rank]
            found: dict[str, Tensor] = (
                runner.step(chunks) if state.layout.is_last_stage else runner.hidden(chunks)
            )
            return found

        return world.run(run)[-tp_size:]

    a, b = tokens_of(21), tokens_of(6, 1)
    parts: dict[str, list[Tensor]] = {"a": [], "b": []}
    for chunks in ({"a": a[:20], "b": b[:5]}, {"b": b[5:], "a": a[20:]}):
        first, *others = step(chunks)
        for request, logits in first.items():
            assert all(torch.equal(logits, other[request]) for other in others)
            parts[request].append(logits)
    for request, tokens in (("a", a), ("b", b)):
        torch.testing.assert_close(torch.cat(parts[request]), logits_of(oracle, tokens), rtol=0, atol=1e-4)
    whole = load(tmp_path, model_impl="transformers").weights_bytes
    hf = load_hf_config(ModelConfig(directory=str(tmp_path), model_impl="transformers"))
    for model in models:
        # Nothing but the place of a rank is known when the bytes are counted.
        assert model.weights_bytes == weights_bytes_of(hf, torch.float32, model.layout) < 0.9 * whole
    compared(THROUGH_TRANSFORMERS, *["tensor"] * (tp_size > 1), *["pipeline"] * (pp_size > 1))


CLASSIFIERS: dict[str, dict[str, Any]] = {
    "GPT2": {"num_key_value_heads": 4},
    "Llama": {},
    "StableLm": {},
    "Starcoder2": WINDOW,
    "Phi": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classes_of_the_last_token_are_those_of_transformers(
    kind: str, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    oracle = random_model(kind, "ForSequenceClassification", num_labels=3, **CLASSIFIERS[kind])
    oracle.config.pad_token_id = None
    oracle.save_pretrained(tmp_path)
    model = load(tmp_path, model_impl="transformers")
    assert isinstance(model, TransformersForSequenceClassification)
    assert not model.has_logits
    prompts = {name: tokens_of(length, length) for name, length in PROMPTS.items()}
    runner = make_runner(model)
    runner.hidden({name: tokens[: len(tokens) // 2] or tokens for name, tokens in prompts.items()})
    rest = {name: tokens[len(tokens) // 2 :] for name, tokens in prompts.items() if len(tokens) > 1}
    states = runner.hidden(rest)
    with torch.inference_mode():
        found = model.classify(torch.stack([states[name][-1] for name in rest]))
        want = torch.cat([oracle(torch.tensor([prompts[name]])).logits for name in rest])
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_a_classifier_on_two_stages_has_its_head_on_the_last(
    tmp_path: Path, load: Any, random_model: Any
) -> None:
    model = random_model("Starcoder2", "ForSequenceClassification", num_labels=3, **WINDOW)
    model.save_pretrained(tmp_path)
    first, last = (
        load(tmp_path, parallel=state, model_impl="transformers") for state in ThreadWorld(1, 2).states
    )
    assert "score.weight" in last.weight_slots()
    assert "score.weight" not in first.weight_slots()
    with pytest.raises(NBEngineError, match="classified on the last pipeline stage"):
        first.classify(torch.zeros(1, 64))


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "an encoder beside it": ("Bart", "ForCausalLM", {}, "an encoder beside the decoder|attention"),
    "Mamba": ("Mamba", "ForCausalLM", {}, "recurrent state"),
    "RecurrentGemma": ("RecurrentGemma", "ForCausalLM", {}, "recurrent state"),
    "linear attention": (
        "MiniMax",
        "ForCausalLM",
        {},
        "recurrent state .gated delta rule or linear attention.",
    ),
    "no attention function": ("Bloom", "ForCausalLM", {}, "attention of its own"),
    "a mask of its own": ("Doge", "ForCausalLM", {}, "an attention mask of its own"),
    "values that are longer than keys": (
        "DeepseekV3",
        "ForCausalLM",
        {**LATENT, **GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "v_head_dim": 28},
        r"queries \[1, 4, .*, 24\] for keys \[1, 4, .*, 24\] and values \[1, 4, .*, 28\] in layer 0",
    ),
    "two attentions a layer": ("DiffLlama", "ForCausalLM", {}, "more than one attention in layer 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_the_feature_that_is_missing(
    name: str, tmp_path: Path, load: Any, random_model: Any
) -> None:
    kind, head, settings, message = REFUSED[name]
    random_model(kind, head, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=f"{kind}{head} .*{message}"):
        load(tmp_path, model_impl="transformers")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
            "trust_remote_code.*never run",
        ),
        (
            {"architectures": ["OwnForCausalLM"]},
            "a class that transformers .* does not have .OwnForCausalLM.",
        ),
        (
            {"layer_types": ["full_attention", "conv", "full_attention"]},
            "short convolutions .layer type 'conv'.",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "longest sequence"),
    ],
)
def test_entries_of_the_configuration_that_ask_for_more_are_refused_by_name(
    overrides: dict[str, Any], message: str, tmp_path: Path, load: Any, random_model: Any
) -> None:
    random_model("StableLm").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, hf_overrides=overrides)


@pytest.mark.parametrize(
    ("kind", "settings", "overrides"),
    [
        ("Llama4", LLAMA_4, {"layer_types": None}),
        (
            "Qwen2Moe",
            {**WINDOW, "num_experts": 4, "use_sliding_window": True, "max_window_layers": 1},
            {"layer_types": None},
        ),
        ("StableLm", {}, {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}),
    ],
    ids=["chunks that the class finds", "windows that the class finds", "code that is not needed"],
)
def test_what_the_class_makes_of_a_configuration_counts(
    kind: str,
    settings: dict[str, Any],
    overrides: dict[str, Any],
    tmp_path: Path,
    load: Any,
    make_runner: Any,
    random_model: Any,
) -> None:
    oracle = random_model(kind, **settings)
    oracle.save_pretrained(tmp_path)
    model = load(tmp_path, model_impl="transformers", hf_overrides=overrides)
    tokens = tokens_of(30)
    found = make_runner(model).step({"a": tokens})["a"]
    torch.testing.assert_close(found, logits_of(oracle, tokens), rtol=0, atol=1e-4)


def test_what_the_cache_would_give_back_is_what_the_class_does_not_see(
    tmp_path: Path, load: Any, random_model: Any
) -> None:
    random_model("Llama").save_pretrained(tmp_path)
    overrides = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], **WINDOW}
    with pytest.raises(ModelLoadError, match="gives layer 1 a window of 5, LlamaForCausalLM none"):
        load(tmp_path, model_impl="transformers", hf_overrides=overrides)


def test_a_mask_of_another_kind_is_refused(
    tmp_path: Path, load: Any, random_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model("StableLm").save_pretrained(tmp_path)
    seeing_all = partial(create_causal_mask, or_mask_function=lambda _batch, _head, query, _key: query >= 0)
    monkeypatch.setattr(modeling_stablelm, "create_causal_mask", seeing_all)
    monkeypatch.setattr(transformers_class, "_tried", {})
    with pytest.raises(
        ModelLoadError, match=r"StableLmForCausalLM .* in layer 0 it has a mask that is neither"
    ):
        load(tmp_path)


def test_a_window_that_nothing_tells_of_is_refused(
    tmp_path: Path, load: Any, random_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = transformers_class._run

    def run(model: PreTrainedModel, attention_mask: Tensor | None = None) -> Any:
        if attention_mask is not None:
            raise TypeError("this class takes no mask")
        return real(model)

    monkeypatch.setattr(transformers_class, "_run", run)
    monkeypatch.setattr(transformers_class, "_tried", {})
    settings = {**WINDOW, "num_experts": 4, "use_sliding_window": True, "max_window_layers": 1}
    random_model("Qwen2Moe", **settings).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"Qwen2MoeForCausalLM .* a sliding_window of which its layers do not"
    ):
        load(tmp_path, model_impl="transformers", hf_overrides={"layer_types": None})
    overrides = {"layer_types": None, "use_sliding_window": False}
    assert load(tmp_path, model_impl="transformers", hf_overrides=overrides).config.num_layers == 3


@pytest.mark.parametrize("kind", ["Starcoder2", "Phimoe"])
def test_windows_of_all_layers_are_known_to_the_cache(kind: str) -> None:
    hf = {
        "architectures": [f"{kind}ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    }
    assert transformers_config(hf | WINDOW).cache_rules() == (LayerRule("window", 5),) * 3
    assert transformers_config(hf | {"sliding_window": None}).cache_rules() == (FULL,) * 3


def test_sizes_that_the_class_does_not_have_are_refused_with_both(
    tmp_path: Path, load: Any, random_model: Any
) -> None:
    random_model("OPT", ffn_dim=96, word_embed_proj_dim=64).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"computes with \(4, 4, 16, 64\) .*config.json says \(4, 2, 16, 64\)"
    ):
        load(tmp_path, model_impl="transformers")


def test_tensor_parallelism_without_a_plan_or_with_one_that_is_not_offered_is_refused(
    tmp_path: Path, load: Any, random_model: Any
) -> None:
    states = ThreadWorld(2, 1).states
    for kind, settings, why in (
        ("OPT", {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64}, "no plan for tensor"),
        (
            "Llama4",
            {"num_local_experts": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 64, "head_dim": 16},
            "divides .*gate_up_proj by 'packed_rowwise', which is not offered",
        ),
        (
            "Phimoe",
            {"num_local_experts": 4, "intermediate_size": 129},
            "a divisor of 129, which .* has of features",
        ),
        ("Starcoder2", {"num_key_value_heads": 1}, "4 attention heads, 1 key-value heads"),
    ):
        directory = tmp_path / kind
        random_model(kind, **settings).save_pretrained(directory)
        with pytest.raises(InvalidArgumentError, match=f"tensor_parallel_size must be 1 .*{why}.*got 2"):
            load(directory, parallel=states[0], model_impl="transformers")


def test_pipeline_parallelism_without_a_plan_is_refused(tmp_path: Path, load: Any, random_model: Any) -> None:
    random_model("StableLm").save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"pipeline_parallel_size must be 1 .*no plan.*got 2"):
        load(tmp_path, parallel=ThreadWorld(1, 2).states[0])


def test_a_family_is_taken_first_and_transformers_where_there_is_none(
    tmp_path: Path, load: Any, random_model: Any
) -> None:
    random_model("Llama").save_pretrained(tmp_path / "llama")
    random_model("StableLm").save_pretrained(tmp_path / "stablelm")
    assert not isinstance(load(tmp_path / "llama"), TransformersForCausalLM)
    assert isinstance(load(tmp_path / "stablelm"), TransformersForCausalLM)
    with pytest.raises(ModelLoadError, match=r"StableLmForCausalLM is not supported.*These run: .*Llama"):
        load(tmp_path / "stablelm", model_impl="nbengine")


def test_overrides_of_sizes_reach_classes_that_call_them_otherwise(tmp_path: Path, random_model: Any) -> None:
    random_model("GPT2", "LMHeadModel", num_key_value_heads=4).save_pretrained(tmp_path)
    assert "num_hidden_layers" not in (tmp_path / "config.json").read_text()
    config = ModelConfig(directory=str(tmp_path), hf_overrides={"num_hidden_layers": 1})
    two = ModelConfig(directory=str(tmp_path), hf_overrides={"n_layer": 2})
    three = ModelConfig(directory=str(tmp_path))
    sizes = [weights_bytes_of(load_hf_config(each), torch.float32) for each in (config, two, three)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
