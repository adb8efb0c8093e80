"""The parameters of the native BERT-style encoder, and the mapping from Hugging Face configurations to them.
Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nbengine.errors import ModelLoadError
from nbengine.models.configs.hf_config import MODEL_IMPL_KEY, num_labels_of, number, positive
from nbengine.models.configs.transformers_encoder_config import (
    TransformersEncoderConfig,
    head_pooling_of,
    is_transformers_encoder,
    transformers_encoder_config,
)

_MAX_LAYERS = 4096
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
BERT_ARCHITECTURES = ("BertModel", "BertForSequenceClassification")
ROBERTA_ARCHITECTURES = (
    "RobertaModel",
    "RobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
)
ARCHITECTURES = (*BERT_ARCHITECTURES, *ROBERTA_ARCHITECTURES)
_WITH_OFFSET = (
    "Roberta",
    "XLMRoberta",
    "XLMRobertaXL",
    "RobertaPreLayerNorm",
    "Camembert",
    "Data2VecText",
    "Esm",
    "Xmod",
)
"""The kinds of encoders whose first position is the one behind the padding token's id."""
AnyEncoderConfig: TypeAlias = "EncoderConfig | TransformersEncoderConfig"
_CLASSIFIER = "ForSequenceClassification"
_ENDINGS = ("Model", "ForMaskedLM", _CLASSIFIER)


@dataclass(frozen=True)
class EncoderConfig:
    """The shape and variants of a BERT-style encoder.

    `position_offset` is the row of the position embeddings that a prompt's first token gets: 0 in BERT, the
    padding token's id plus one in RoBERTa. `num_labels` is 0 without a classification head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    num_positions: int
    position_offset: int
    type_vocab_size: int
    hidden_act: str
    is_roberta: bool
    num_labels: int = 0

    def __post_init__(self) -> None:
        if self.num_layers > _MAX_LAYERS:
            raise ModelLoadError(f"num_hidden_layers is {self.num_layers}, more than {_MAX_LAYERS}")
        if self.hidden_size % self.num_heads:
            raise ModelLoadError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads ({self.num_heads})"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ModelLoadError(
                f"hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        if self.max_model_len < 1:
            raise ModelLoadError(
                f"max_position_embeddings ({self.num_positions}) must be greater than pad_token_id + 1 "
                f"({self.position_offset})"
            )

    @property
    def head_dim(self) -> int:
        """Return the size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def max_model_len(self) -> int:
        """Return the longest prompt, in tokens, for which there are position embeddings."""
        return self.num_positions - self.position_offset


def is_encoder(hf: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face configuration is of an encoder that runs, here or through transformers."""
    if is_own_encoder(hf):
        return True
    return hf.get(MODEL_IMPL_KEY, "auto") != "nbengine" and is_transformers_encoder(hf)


def is_own_encoder(hf: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face configuration is of a BERT-style encoder that runs with nbengine's layers."""
    if hf.get(MODEL_IMPL_KEY, "auto") == "transformers":
        return False
    return any(name in ARCHITECTURES for name in hf.get("architectures") or ())


def head_pooling(hf: Mapping[str, Any]) -> str:
    """Return the pooling before the classification head of a model."""
    if not is_encoder(hf):
        return "last"
    return "cls" if is_own_encoder(hf) else head_pooling_of(hf)


def any_encoder_config(hf: Mapping[str, Any]) -> AnyEncoderConfig:
    """Map a Hugging Face configuration to that of the encoder that runs; raises as `encoder_config` does."""
    if is_own_encoder(hf):
        return encoder_config(hf)
    names = map(str, hf.get("architectures") or ())
    has_offset = any(name == kind + ending for name in names for kind in _WITH_OFFSET for ending in _ENDINGS)
    return transformers_encoder_config(hf, num_labels_of(hf), has_offset=has_offset)


def encoder_config(hf: Mapping[str, Any]) -> EncoderConfig:
    """Map a Hugging Face configuration to the native encoder's.

    Raises:
        ModelLoadError: the architecture or one of its variants is not supported, or a value is missing or
            wrong.
    """
    name = next((name for name in hf.get("architectures") or () if name in ARCHITECTURES), None)
    if name is None:
        raise ModelLoadError(f"architectures {hf.get('architectures')!r} are not encoders")
    kind = hf.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelLoadError(f"position_embedding_type {kind!r} is not supported; supported: absolute")
    if hf.get("is_decoder") or hf.get("add_cross_attention"):
        raise ModelLoadError("encoders with causal or cross attention (is_decoder) are not supported")
    is_roberta = name in ROBERTA_ARCHITECTURES
    return EncoderConfig(
        vocab_size=positive(hf, "vocab_size"),
        hidden_size=positive(hf, "hidden_size"),
        intermediate_size=positive(hf, "intermediate_size"),
        num_layers=positive(hf, "num_hidden_layers"),
        num_heads=positive(hf, "num_attention_heads"),
        layer_norm_eps=number(hf, "layer_norm_eps", 1e-12),
        num_positions=positive(hf, "max_position_embeddings"),
        position_offset=_padding_id(hf) + 1 if is_roberta else 0,
        type_vocab_size=positive(hf, "type_vocab_size", 2),
        hidden_act=str(hf.get("hidden_act", "gelu")),
        is_roberta=is_roberta,
        num_labels=num_labels_of(hf),
    )


def _padding_id(hf: Mapping[str, Any]) -> int:
    padding = hf.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise ModelLoadError(f"config.json: pad_token_id must be a token id, got {padding!r}")
    return padding
