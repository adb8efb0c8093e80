"""Mixtral: Mistral with experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nbengine.models.configs.hf_config import positive
from nbengine.models.configs.moe_config import MoEConfig, num_experts_of
from nbengine.models.family import DecoderFamily, layers_alike, window_of

_NAME = re.compile(r"(?P<layer>.*)\.block_sparse_moe\.(?P<rest>gate|experts\.\d+\.w[123])\.(?P<kind>\w+)")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Mixtral(DecoderFamily):
    """Mixtral 8x7B and 8x22B."""

    title = "Mixtral"
    has_experts = True
    turns_parts = False
    defaults: Mapping[str, Any] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        moe = MoEConfig(
            num_experts=num_experts_of(hf, 8),
            experts_per_token=positive(hf, "num_experts_per_tok", 2),
            intermediate_size=positive(hf, "intermediate_size"),
            renormalize=True,
        )
        return {"moe": moe, "layers": layers_alike(hf, window_of(hf))}

    def our_name(self, name: str) -> str:
        """Files on the hub call a layer's experts block_sparse_moe, and their projections w1, w3 and w2."""
        found = _NAME.fullmatch(name)
        if found is None:
            return name
        *expert, last = found["rest"].split(".")
        return ".".join((found["layer"], "mlp", *expert, _PROJECTIONS.get(last, last), found["kind"]))
