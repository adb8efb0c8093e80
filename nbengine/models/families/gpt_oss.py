"""gpt-oss: experts with a clamped gate, and attention sinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.hf_config import number, positive
from nbengine.models.configs.moe_config import ClampedGate, MoEConfig
from nbengine.models.family import DecoderFamily, layers_of, window_of

_EXPERTS = ".mlp.experts."
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The projections that a tensor of the files has, whose rows lie in turn."""


class GptOss(DecoderFamily):
    """gpt-oss-20b and gpt-oss-120b."""

    title = "gpt-oss"
    has_experts = True
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`."""
        # Stated scaling takes the place of the one that is assumed.
        stated = hf.get("rope_parameters") or hf.get("rope_scaling") or self.defaults["rope_parameters"]
        found = super().config({**hf, "rope_parameters": stated})
        if found.num_labels:
            raise ModelLoadError(
                "gpt-oss with a classification head is not supported; GptOssForCausalLM runs"
            )
        return found

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf["attention_bias"])
        windows = {index: index % 2 == 0 for index in range(positive(hf, "num_hidden_layers"))}
        experts = "num_experts" if hf.get("num_local_experts") is None else "num_local_experts"
        moe = MoEConfig(
            num_experts=positive(hf, experts, 128),
            experts_per_token=positive(hf, "num_experts_per_tok", 4),
            intermediate_size=positive(hf, "intermediate_size"),
            renormalize=True,
            bias=True,
            clamped=ClampedGate(number(hf, "swiglu_alpha", 1.702), number(hf, "swiglu_limit", 7.0)),
        )
        return {
            "moe": moe,
            "attention_bias": bias,
            "attention_out_bias": bias,
            "attention_sinks": True,
            "layers": layers_of(hf, window_of(hf), windows),
        }

    def our_name(self, name: str) -> str:
        """Files call the router so; GGUF files have a weight in place of sinks."""
        return name.replace(".mlp.router.", ".mlp.gate.", 1).replace(".sinks.weight", ".sinks", 1)

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`; matrices that are not in MXFP4 have the inputs' features first."""
        layer, _, rest = name.partition(_EXPERTS)
        base, is_bias, is_packed = (
            rest.removesuffix("_bias"),
            rest.endswith("_bias"),
            rest.endswith("_blocks"),
        )
        projections = _PROJECTIONS.get(base.removesuffix("_blocks"))
        if projections is None or len(shape) != (2 if is_bias else 3):
            yield from super().tensor_parts(config, name, shape)
            return
        is_transposed = not (is_bias or is_packed)
        experts, rows, *columns = (shape[0], shape[2], shape[1]) if is_transposed else shape
        step, kind = len(projections), "bias" if is_bias else "weight"
        for expert in range(experts):
            for first, projection in enumerate(projections):
                part = TensorPart(name, (rows // step, *columns), expert, first, is_transposed, step)
                yield f"{layer}{_EXPERTS}{expert}.{projection}.{kind}", part
