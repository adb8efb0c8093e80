"""The registry: which family computes the models of which architecture. A family's module is imported when a model
needs it, and imports no torch before it builds one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.encoder_config import EncoderConfig, any_encoder_config, is_encoder
from nbengine.models.configs.hf_config import FAMILIES_KEY, MODEL_IMPL_KEY
from nbengine.models.configs.transformers_config import missing_feature, transformers_config
from nbengine.models.configs.unsupported import why_unsupported
from nbengine.models.family import Family

_FAMILIES = "nbengine.models.families"
_CAUSAL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"

DECODERS: Mapping[str, str] = {
    "LlamaForCausalLM": f"{_FAMILIES}.llama:Llama",
    "MistralForCausalLM": f"{_FAMILIES}.llama:Mistral",
    "Mistral3ForConditionalGeneration": f"{_FAMILIES}.llama:Mistral",
    "MinistralForCausalLM": f"{_FAMILIES}.llama:Ministral",
    "Ministral3ForCausalLM": f"{_FAMILIES}.llama:Ministral3",
    "Llama4ForCausalLM": f"{_FAMILIES}.llama4:Llama4",
    "Llama4ForConditionalGeneration": f"{_FAMILIES}.llama4:Llama4",
    "Qwen2ForCausalLM": f"{_FAMILIES}.qwen:Qwen2",
    "Qwen2VLForConditionalGeneration": f"{_FAMILIES}.qwen:Qwen2",
    "Qwen2_5_VLForConditionalGeneration": f"{_FAMILIES}.qwen:Qwen2",
    "Qwen3ForCausalLM": f"{_FAMILIES}.qwen:Qwen3",
    "Qwen3VLForConditionalGeneration": f"{_FAMILIES}.qwen:Qwen3",
    "MixtralForCausalLM": f"{_FAMILIES}.mixtral:Mixtral",
    "Qwen2MoeForCausalLM": f"{_FAMILIES}.qwen:Qwen2Moe",
    "Qwen3MoeForCausalLM": f"{_FAMILIES}.qwen:Qwen3Moe",
    "Qwen3VLMoeForConditionalGeneration": f"{_FAMILIES}.qwen:Qwen3VLMoe",
    "Qwen3NextForCausalLM": f"{_FAMILIES}.qwen_hybrid:Qwen3Next",
    "Qwen3_5ForCausalLM": f"{_FAMILIES}.qwen_hybrid:Qwen35",
    "Qwen3_5ForConditionalGeneration": f"{_FAMILIES}.qwen_hybrid:Qwen35",
    "Qwen3_5MoeForCausalLM": f"{_FAMILIES}.qwen_hybrid:Qwen35Moe",
    "Qwen3_5MoeForConditionalGeneration": f"{_FAMILIES}.qwen_hybrid:Qwen35Moe",
    "GemmaForCausalLM": f"{_FAMILIES}.gemma:Gemma",
    "Gemma2ForCausalLM": f"{_FAMILIES}.gemma:Gemma2",
    "Gemma3ForCausalLM": f"{_FAMILIES}.gemma:Gemma3",
    "Gemma3ForConditionalGeneration": f"{_FAMILIES}.gemma:Gemma3",
    "Gemma4ForCausalLM": f"{_FAMILIES}.gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": f"{_FAMILIES}.gemma4:Gemma4",
    "Phi3ForCausalLM": f"{_FAMILIES}.phi:Phi3",
    "OlmoForCausalLM": f"{_FAMILIES}.olmo:Olmo",
    "Olmo2ForCausalLM": f"{_FAMILIES}.olmo:Olmo2",
    "Olmo3ForCausalLM": f"{_FAMILIES}.olmo:Olmo3",
    "OlmoeForCausalLM": f"{_FAMILIES}.olmo:Olmoe",
    "GraniteForCausalLM": f"{_FAMILIES}.granite:Granite",
    "GraniteMoeForCausalLM": f"{_FAMILIES}.granite:GraniteMoe",
    "GraniteMoeHybridForCausalLM": f"{_FAMILIES}.granite_hybrid:GraniteMoeHybrid",
    "BambaForCausalLM": f"{_FAMILIES}.mamba:Bamba",
    "Mamba2ForCausalLM": f"{_FAMILIES}.mamba:Mamba2",
    "Lfm2ForCausalLM": f"{_FAMILIES}.lfm2:Lfm2",
    "Lfm2MoeForCausalLM": f"{_FAMILIES}.lfm2:Lfm2Moe",
    "NemotronHForCausalLM": f"{_FAMILIES}.nemotron:NemotronH",
    "SmolLM3ForCausalLM": f"{_FAMILIES}.smollm3:SmolLM3",
    "Exaone4ForCausalLM": f"{_FAMILIES}.exaone:Exaone4",
    "Ernie4_5ForCausalLM": f"{_FAMILIES}.ernie:Ernie45",
    "SeedOssForCausalLM": f"{_FAMILIES}.seed:SeedOss",
    "GptOssForCausalLM": f"{_FAMILIES}.gpt_oss:GptOss",
    "GlmForCausalLM": f"{_FAMILIES}.glm:Glm",
    "Glm4ForCausalLM": f"{_FAMILIES}.glm:Glm4",
    "Glm4MoeForCausalLM": f"{_FAMILIES}.glm:Glm4Moe",
    "DeepseekV2ForCausalLM": f"{_FAMILIES}.deepseek:DeepseekV2",
    "DeepseekV3ForCausalLM": f"{_FAMILIES}.deepseek:DeepseekV3",
    "Glm4MoeLiteForCausalLM": f"{_FAMILIES}.deepseek:Glm4MoeLite",
}
"""The family of each class of decoders; a class with a classification head has that of the decoder."""
TRANSFORMERS = f"{_FAMILIES}.transformers_backend:TransformersFamily"
"""The family of decoders that have none of their own, where transformers has a class for them."""


def reference_of(hf: Mapping[str, Any]) -> str | None:
    """Return the family, as "module:Class", of the decoder that a Hugging Face configuration describes: unless
    `model_impl` says otherwise, the one for its architecture, else the transformers backend. None: there is
    none."""
    implementation = hf.get(MODEL_IMPL_KEY, "auto")
    if implementation == "transformers":
        return TRANSFORMERS
    registered = hf.get(FAMILIES_KEY) or {}
    for name in map(str, hf.get("architectures") or ()):
        base = name.removesuffix(_CLASSIFIER) + _CAUSAL if name.endswith(_CLASSIFIER) else name
        found = registered.get(name) or registered.get(base) or DECODERS.get(base)
        if found is not None:
            return str(found)
    return TRANSFORMERS if implementation == "auto" and missing_feature(hf) is None else None


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of the decoder that a Hugging Face configuration describes.

    Raises:
        ModelLoadError: there is none; the message says what is missing, and what would run.
    """
    reference = reference_of(hf)
    if reference is None:
        implementation, feature = hf.get(MODEL_IMPL_KEY, "auto"), missing_feature(hf)
        otherwise = f"through transformers it cannot run: it has {feature}"
        if feature is None:
            otherwise = "model_impl='auto' tries its class of transformers"
        elif implementation == "nbengine":
            otherwise = ""
        raise ModelLoadError("; ".join(filter(None, (why_unsupported(hf, DECODERS), otherwise))))
    return load_family(reference)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Map a Hugging Face configuration to the decoder's.

    Raises:
        ModelLoadError: the architecture or one of its variants is not supported, or a value is missing or
            wrong.
    """
    config = family_of(hf).config(hf)
    reference = reference_of(hf)
    assert reference is not None
    return replace(config, family=reference)


@cache
def load_family(reference: str) -> Family:
    """Import the family `"module:Class"`.

    Raises:
        ModelLoadError: the class cannot be imported, or cannot be made without arguments.
    """
    module, _, name = reference.partition(":")
    try:
        made: Family = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise ModelLoadError(
            f"cannot import the model family {reference!r}: {error}; it must be importable in the engine's processes "
            "(PYTHONPATH, or an installed package)"
        ) from error
    return made


def is_registered(hf: Mapping[str, Any]) -> bool:
    """Return whether a configuration's family is one that somebody has registered."""
    reference = reference_of(hf)
    return reference is not None and reference not in (*DECODERS.values(), TRANSFORMERS)


def has_experts(hf: Mapping[str, Any]) -> bool:
    """Return whether the engine cores of a model compute its experts together; those of models that somebody has
    registered do not, and nothing is imported to find out."""
    reference = reference_of(hf)
    return reference in DECODERS.values() and load_family(str(reference)).shares_experts(hf)


def implementation_of(hf: Mapping[str, Any]) -> str:
    """Name the class whose layers run, with the library that has it; empty where they are nbengine's own, or those
    of a registered family."""
    if is_encoder(hf):
        encoder = any_encoder_config(hf)
        if isinstance(encoder, EncoderConfig):
            return ""
        name = encoder.architecture
    elif reference_of(hf) == TRANSFORMERS:
        name = transformers_config(hf).architecture
    else:
        return ""
    return f"{name} of transformers {metadata.version('transformers')}"
