"""Gemma 4: what its configuration says of each layer, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, FULL, GEMMA_4, GEMMA_4_EXPERTS, SLIDING
from random_models import save_tokenizer

from nbengine import LLM, SamplingParams
from nbengine.config import ParallelConfig
from nbengine.errors import InvalidArgumentError, ModelLoadError, RequestError
from nbengine.models.configs.decoder_config import DecoderConfig, LayerConfig
from nbengine.models.configs.moe_config import NORMS_BESIDE, MoEConfig
from nbengine.models.configs.rope_config import Rope, RopeScaling
from nbengine.models.division import check_parallel
from nbengine.models.registry import decoder_config, load_family
from tests.unit.models.conftest import SIZES

HF: dict[str, Any] = {
    **SIZES,
    **GEMMA_4,
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
WINDOW, WHOLE = LayerConfig("window", 8), LayerConfig("full", rope=1, head_dim=32)


def test_the_last_layers_read_the_last_of_their_type_and_are_twice_as_wide() -> None:
    found = decoder_config(HF)
    assert found.layers[:3] == (WINDOW, WHOLE, WINDOW)
    assert [layer.source for layer in found.layers[3:]] == [1, 2, 1]
    assert {layer.inner for layer in found.layers[3:]} == {256}
    assert found.of_layer(0) is found
    assert [found.of_layer(index).head_dim for index in range(6)] == [16, 32] * 3
    assert [rule.kind for rule in found.cache_rules()] == ["window", "full", "window"] + ["shared"] * 3
    assert found.ropes == (Rope(1e4), Rope(1e6, RopeScaling("proportional", part=0.25), size=32))
    assert (found.layer_inputs, found.layer_input_tokens, found.attention_scale) == (8, 96, 1.0)


def test_sizes_that_are_said_for_each_layer_are_those_that_are_said_once() -> None:
    once = {**HF, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    each = {**HF, "attention_k_eq_v": True, "global_head_dim": None}
    each["per_layer_config"] = {str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3, 5)}
    assert decoder_config(once) == decoder_config(each)
    assert decoder_config(once).of_layer(1).num_kv_heads == 1
    assert decoder_config({**HF, "per_layer_config": {}}).of_layer(1).head_dim == 16
    heads_alone = {**HF, "per_layer_config": {str(layer): {"num_key_value_heads": 1} for layer in (1, 3, 5)}}
    own = decoder_config(heads_alone).of_layer(1)
    assert (own.head_dim, own.num_kv_heads) == (16, 1)
    assert decoder_config({**once, "attention_k_eq_v": False}).of_layer(1).num_kv_heads == 2


def test_five_of_six_layers_have_a_window_where_nothing_is_said_and_the_last_never_has_one() -> None:
    usual = {**HF, "layer_types": None, "num_hidden_layers": 8, "num_kv_shared_layers": 0}
    kinds = [layer.attention for layer in decoder_config(usual).layers]
    assert kinds == ["window"] * 5 + ["full", "window", "full"]


def test_experts_are_beside_the_dense_block_and_norms_of_both_are_inside() -> None:
    family = load_family("nbengine.models.families.gemma4:Gemma4")
    found = decoder_config({**HF, **GEMMA_4_EXPERTS})
    assert found.moe == MoEConfig(6, 2, 32, renormalize=True, hidden_act="gelu_tanh", beside_dense=True)
    assert family.shares_experts({**HF, **GEMMA_4_EXPERTS})
    assert not family.shares_experts(HF)
    assert (found.norms.before_mlp, decoder_config(HF).norms.before_mlp) == (None, NORMS_BESIDE[0])

    def ours(config: DecoderConfig, name: str) -> list[str]:
        return [each for each, _ in family.tensor_parts(config, f"model.layers.1.{name}", (6,))]

    for name in NORMS_BESIDE:
        assert ours(found, f"{name}.weight") == [f"model.layers.1.mlp.{name}.weight"]
        assert ours(decoder_config(HF), f"{name}.weight") == [f"model.layers.1.{name}.weight"]
    for name in ("router.scale", "mlp.gate.scale"):
        assert ours(found, name) == ["model.layers.1.mlp.router_norm.weight"]
    for name in ("router.per_expert_scale", "mlp.experts.down_proj.scale"):
        assert ours(found, name) == ["model.layers.1.mlp.expert_factors"]


def test_tensors_of_layers_that_read_others_are_left_out_and_keys_may_be_values() -> None:
    family, config = load_family("nbengine.models.families.gemma4:Gemma4"), decoder_config(HF)

    def ours(config: DecoderConfig, name: str) -> list[str]:
        return [found for found, _ in family.tensor_parts(config, name, (64, 64))]

    keys = "model.layers.3.self_attn.k_proj.weight"
    assert ours(config, keys) == []
    assert ours(config, keys.replace("3", "1", 1)) == ["model.layers.1.self_attn.k_proj.weight"]
    assert (
        ours(config, "model.audio_tower.layers.3.weight") == ours(config, "model.embed_vision.weight") == []
    )
    both = decoder_config({**HF, "num_kv_shared_layers": 0, "attention_k_eq_v": True})
    assert ours(both, keys) == [keys, keys.replace("k_proj", "v_proj")]
    assert ours(both, keys.replace("3", "2")) == [keys.replace("3", "2")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**GEMMA_4_EXPERTS, "top_k_experts": 7}, r"\(7\) must be at most the number of experts \(6\)"),
        ({**GEMMA_4_EXPERTS, "moe_intermediate_size": None}, "moe_intermediate_size must be"),
        ({"use_bidirectional_attention": "all"}, "decoders are causal"),
        ({"layer_types": [FULL]}, "layer_types must be a list of 6 times 'full_attention' or"),
        ({"layer_types": [FULL] * 5 + ["other"]}, "layer_types must be a list of 6 times"),
        ({"num_kv_shared_layers": 5}, r"num_kv_shared_layers \(5\) leaves no layer of each type"),
        ({"num_kv_shared_layers": 6}, r"num_kv_shared_layers \(6\) leaves no layer"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config must have the same entries"),
        ({"per_layer_config": {str(n): {"head_dim": n} for n in (1, 3, 5)}}, "must have the same entries"),
        ({"per_layer_config": {str(n): {"heads": 2} for n in (1, 3, 5)}}, "is not supported"),
        ({"per_layer_config": 7}, "per_layer_config must have the same entries .* got 7"),
        ({"rope_parameters": {FULL: 7}}, "rope_parameters must have an object for each type of layer"),
    ],
)
def test_what_is_wrong_or_not_supported_is_told_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        decoder_config({**HF, **settings})


def test_it_does_not_classify_and_has_no_stages() -> None:
    labels = decoder_config({**HF, "architectures": ["Gemma4ForSequenceClassification"]})
    options: Any = {"dtype": torch.float32, "device": torch.device("meta")}
    with pytest.raises(ModelLoadError, match="a classification head is not supported"):
        load_family(labels.family).build(labels, **options)
    with pytest.raises(InvalidArgumentError, match="pipeline_parallel_size must be 1 for this model"):
        check_parallel(HF, ParallelConfig(pipeline_parallel_size=2))
    check_parallel(HF, ParallelConfig(tensor_parallel_size=4))
    plain = {**HF, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    check_parallel(plain, ParallelConfig(pipeline_parallel_size=2))


@pytest.mark.parametrize(("name", "takes"), [("gemma4", False), ("gemma4 of few heads", True)])
def test_embeddings_are_no_prompt_where_layers_need_the_ids(
    name: str, takes: bool, tmp_path: Path, random_model: Any
) -> None:
    random_model(CASES[name].kind, **CASES[name].settings).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    prompt: Any = {"prompt_embeds": torch.ones(5, SIZES["hidden_size"])}
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(str(tmp_path), multiprocess=False, dtype="float32", num_gpu_blocks_override=40) as llm:
        if takes:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 2
        else:
            with pytest.raises(RequestError, match="prompt_embeds cannot be given to this model"):
                llm.generate([prompt], params, use_tqdm=False)
