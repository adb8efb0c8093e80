"""The sizes of an encoder that runs through its transformers class, read from config.json. Free of torch and of
transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.configs.hf_config import positive
from nbengine.models.configs.transformers_config import architectures_of_transformers

_MASKED, _CLASSIFIER, _BARE = "ForMaskedLM", "ForSequenceClassification", "Model"
_POOLINGS = {"cls": "cls", "bos": "cls", "mean": "mean"}
"""Our names of the poolings before a classification head, by those of config.json."""
_FEATURES = {
    "is_decoder": "attention to earlier tokens only",
    "is_encoder_decoder": "a decoder beside the encoder",
    "add_cross_attention": "cross-attention",
    "quantization_config": "quantised weights",
}
"""Entries of config.json that, where they are set, ask for what an encoder here does not do."""


@dataclass(frozen=True)
class TransformersEncoderConfig:
    """The sizes of an encoder that runs through the class `architecture` of transformers, as every part of the engine
    asks for them; see `nbengine.models.configs.encoder_config.EncoderConfig`.

    `hf` is all of config.json, of which the class makes its layers; `stated` is the class that it names.
    """

    architecture: str
    stated: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_positions: int
    position_offset: int
    type_vocab_size: int
    num_labels: int
    hf: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def hf_json(self) -> str:
        """Return `hf` as text: the key under which findings about a class are kept."""
        return json.dumps(dict(self.hf), sort_keys=True)

    @staticmethod
    def hf_of(hf_json: str) -> Mapping[str, Any]:
        """Return what `hf_json` has been made of."""
        found: Mapping[str, Any] = json.loads(hf_json)
        return found

    @property
    def max_model_len(self) -> int:
        """Return the longest prompt, in tokens, for which the model was made."""
        return self.num_positions - self.position_offset


def is_transformers_encoder(hf: Mapping[str, Any]) -> bool:
    """Return whether transformers has a class of encoders for a configuration: one of those that can be trained to
    fill in masked tokens."""
    return _stated(hf) is not None


def transformers_encoder_config(
    hf: Mapping[str, Any], num_labels: int, *, has_offset: bool
) -> TransformersEncoderConfig:
    """Map a Hugging Face configuration to that of an encoder that runs through transformers. With `has_offset` the
    first position is the one behind the padding token's id.

    Raises:
        ModelLoadError: the model needs what the backend does not do, or a value is missing or wrong.
    """
    stated = _stated(hf)
    if stated is None:
        raise ModelLoadError(f"architectures {hf.get('architectures')!r} are not encoders")
    for key, words in _FEATURES.items():
        if hf.get(key):
            raise ModelLoadError(f"{stated} cannot run through transformers: it has {words} ({key})")
    padding = hf.get("pad_token_id", 1) if has_offset else -1
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < -1 + has_offset:
        raise ModelLoadError(f"config.json: pad_token_id must be a token id, got {padding!r}")
    if num_labels:
        head_pooling_of(hf)
    usual = {**{usual: hf[own] for own, usual in _OTHER_NAMES.items() if own in hf}, **hf}
    found = TransformersEncoderConfig(
        architecture=stated.removesuffix(_MASKED) + _BARE if stated.endswith(_MASKED) else stated,
        stated=stated,
        vocab_size=positive(usual, "vocab_size"),
        hidden_size=positive(usual, "hidden_size"),
        num_layers=positive(usual, "num_hidden_layers"),
        num_positions=positive(usual, "max_position_embeddings"),
        position_offset=padding + 1,
        # Where a file says nothing, the class has as many segments as BERT, or none.
        type_vocab_size=1 if usual.get("type_vocab_size") == 0 else positive(usual, "type_vocab_size", 2),
        num_labels=num_labels,
        hf=hf,
    )
    if found.max_model_len < 1:
        raise ModelLoadError(
            f"max_position_embeddings ({found.num_positions}) must be greater than pad_token_id + 1 ({padding + 1})"
        )
    return found


_OTHER_NAMES = {"dim": "hidden_size", "n_layers": "num_hidden_layers"}
"""The names of sizes in the configurations of some classes (DistilBERT's)."""


def head_pooling_of(hf: Mapping[str, Any]) -> str:
    """Return the pooling before an encoder's classification head.

    Raises:
        ModelLoadError: config.json names one that is not ours.
    """
    stated = hf.get("classifier_pooling", "cls")
    if stated not in _POOLINGS:
        allowed = ", ".join(map(repr, _POOLINGS))
        raise ModelLoadError(f"config.json: classifier_pooling must be one of {allowed}, got {stated!r}")
    return _POOLINGS[stated]


def _stated(hf: Mapping[str, Any]) -> str | None:
    for name in map(str, hf.get("architectures") or ()):
        for ending in (_MASKED, _CLASSIFIER, _BARE):
            base = name.removesuffix(ending)
            if base != name and base + _MASKED in (architectures_of_transformers() or ()):
                return name
    return None
