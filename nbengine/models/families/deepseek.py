"""DeepSeek-V2 and -V3, and the models of others that have their layers: latent attention, and experts in groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.hf_config import number, positive, stated_rope
from nbengine.models.configs.latent_config import LatentConfig, latent_of
from nbengine.models.configs.moe_config import GroupedRouting, MoEConfig
from nbengine.models.configs.rope_config import mscale_of
from nbengine.models.family import DecoderFamily

_SCORES = ("softmax", "sigmoid")
_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


class DeepseekV2(DecoderFamily):
    """DeepSeek-V2, its Lite models, and those for code."""

    title = "DeepSeek-V2"
    has_experts = True
    query_rank = 1536
    """The numbers of a query latent where config.json has no entry; null there means that queries have none."""
    defaults: Mapping[str, Any] = {
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
    }

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`."""
        return super().config({"q_lora_rank": self.query_rank, **hf})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        if hf.get("mlp_bias"):
            raise ModelLoadError("config.json: mlp_bias is not supported for models with latent attention")
        latent = latent_of(hf)
        return {
            "num_kv_heads": 1,
            "head_dim": latent.width,
            "rotary_dim": latent.rope_dim,
            "rotary_interleaved": bool(hf.get("rope_interleave", True)),
            "attention_scale": _scale_of(hf, latent),
            "latent": latent,
            "moe": self.experts(hf),
        }

    def experts(self, hf: Mapping[str, Any]) -> MoEConfig:
        """Return the experts of a configuration that has the defaults."""
        inner, method = positive(hf, "moe_intermediate_size"), _one_of(hf, "topk_method", _METHODS)
        has_groups = method != "greedy"
        return MoEConfig(
            num_experts=positive(hf, "n_routed_experts"),
            experts_per_token=positive(hf, "num_experts_per_tok"),
            intermediate_size=inner,
            renormalize=self.renormalizes(hf),
            shared_intermediate_size=inner * int(hf["n_shared_experts"]),
            dense_layers=self.dense_layers(hf),
            shared_gate=False,
            routing=GroupedRouting(
                score=_one_of(hf, "scoring_func", _SCORES),
                groups=positive(hf, "n_group", 1) if has_groups else 1,
                chosen_groups=positive(hf, "topk_group", 1) if has_groups else 1,
                has_correction=method == "noaux_tc",
                scale=number(hf, "routed_scaling_factor"),
            ),
        )

    def renormalizes(self, hf: Mapping[str, Any]) -> bool:
        """Return whether the weights of a token's experts are divided by their sum."""
        # DeepSeek's code divides and then leaves out the scale; transformers never divides; no checkpoint asks for it.
        if hf["norm_topk_prob"]:
            raise ModelLoadError("config.json: norm_topk_prob must be false for DeepSeek-V2")
        return False

    def dense_layers(self, hf: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the layers without experts."""
        first, every = int(hf["first_k_dense_replace"]), positive(hf, "moe_layer_freq", 1)
        layers = range(positive(hf, "num_hidden_layers"))
        return tuple(layer for layer in layers if layer < first or layer % every)

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`; layers behind the last one predict further tokens, and are not used."""
        before, _, rest = name.partition("model.layers.")
        layer = rest.partition(".")[0]
        if before or not layer.isdigit() or int(layer) < config.num_layers:
            yield from super().tensor_parts(config, name, shape)

    def our_name(self, name: str) -> str:
        """Files speak of several shared experts, which are one block; GGUF has the correction as a bias."""
        ours = name.replace(".mlp.shared_experts.", ".mlp.shared_expert.", 1)
        return ours.replace(".e_score_correction.bias", ".e_score_correction_bias")


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3, -R1 and those like them: Kimi K2, Moonlight."""

    title = "DeepSeek-V3, -R1, Kimi K2"
    defaults: Mapping[str, Any] = {
        **DeepseekV2.defaults,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    }

    def renormalizes(self, hf: Mapping[str, Any]) -> bool:
        """See `DeepseekV2.renormalizes`."""
        return bool(hf["norm_topk_prob"])


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash."""

    title = "GLM-4.7 Flash"
    query_rank = 768
    defaults: Mapping[str, Any] = {
        **DeepseekV3.defaults,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    }

    def dense_layers(self, hf: Mapping[str, Any]) -> tuple[int, ...]:
        """See `DeepseekV2.dense_layers`."""
        types = hf.get("mlp_layer_types")
        if types is None:
            return (0,)
        if not isinstance(types, list) or not set(types) <= {"dense", "sparse"}:
            raise ModelLoadError(
                f"config.json: mlp_layer_types must be a list of 'dense' and 'sparse', got {quoted(types)}"
            )
        return tuple(layer for layer, kind in enumerate(types) if kind == "dense")


def _scale_of(hf: Mapping[str, Any], latent: LatentConfig) -> float:
    """Return the factor of scores; YaRN may have one of its own beside that of cosines and sines."""
    stated, scale = stated_rope(hf), float(latent.head_dim**-0.5)
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "default" or not stated.get("mscale_all_dim"):
        return scale
    return scale * mscale_of(number(stated, "factor"), number(stated, "mscale_all_dim")) ** 2


def _one_of(hf: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> Any:
    if hf[key] not in allowed:
        raise ModelLoadError(f"config.json: {key} must be one of {', '.join(allowed)}, got {quoted(hf[key])}")
    return hf[key]
