"""The families of models: what they say of a configuration and of a checkpoint, and how they build a model. Nothing
here imports torch before it builds one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart, plain_parts
from nbengine.models.configs.decoder_config import ACTIVATIONS, DecoderConfig, LayerConfig
from nbengine.models.configs.hf_config import max_model_len_of, num_labels_of, number, positive, stated_rope
from nbengine.models.configs.quantization_config import stored_quantization
from nbengine.models.configs.rope_config import DEFAULT_THETA, TURNS_PART, rope_of, rotary_dim_of

if TYPE_CHECKING:
    from nbengine.models.causal_model import CausalModel, DecoderOptions

_OF_OTHERS = ("num_key_value_heads", "head_dim")
"""The sizes that follow from others where a configuration says null."""


class Family(Protocol):
    """A kind of decoders, as the registry knows it; see `DecoderFamily`."""

    title: str

    def shares_experts(self, hf: Mapping[str, Any]) -> bool:
        """Return whether a model has experts, which engine cores compute together; nothing else of its configuration
        is checked."""

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """Return the model that a Hugging Face configuration describes.

        Raises:
            ModelLoadError: a value is missing or wrong, or a variant is not supported.
        """

    def build(self, config: DecoderConfig, **options: Unpack[DecoderOptions]) -> CausalModel:
        """Make a rank's part of a model, its weights not loaded yet; on the device "meta" it takes no memory."""

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """Yield the model's names of what a tensor of a safetensors file holds, each with its place in it; nothing
        for a tensor that the model does not use."""


class DecoderFamily:
    """A family whose models are variants of the decoder that `DecoderConfig` describes.

    A family says in `defaults` what transformers assumes where config.json says nothing, and in `variant` what
    distinguishes its decoder from Llama's. One that needs layers of its own overrides `build`.
    """

    title = "Llama-like decoders"
    """The models of the family in a few words, for lists of what runs."""
    has_experts = False
    """True if the models have experts."""
    defaults: Mapping[str, Any] = {}
    """The entries that are assumed where config.json has none."""
    unused: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a checkpoint may have and that a text model does not use."""
    turns_parts = True
    """False if the class of transformers turns whole heads, whatever `partial_rotary_factor` says."""

    def shares_experts(self, hf: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """See `Family.shares_experts`."""
        return self.has_experts

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`."""
        usual = {key: value for key, value in self.defaults.items() if key not in _OF_OTHERS or key not in hf}
        known = {**usual, **{key: value for key, value in hf.items() if value is not None}}
        hidden_size, num_heads = positive(known, "hidden_size"), positive(known, "num_attention_heads")
        head_dim = positive(known, "head_dim", hidden_size // num_heads)
        stated = stated_rope(known)
        rope = rope_of(known, stated, DEFAULT_THETA)
        has_part = self.turns_parts or known.get(TURNS_PART, False)
        settings: dict[str, Any] = {
            "vocab_size": positive(known, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": positive(known, "intermediate_size"),
            "num_layers": positive(known, "num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": positive(known, "num_key_value_heads", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": number(known, "rms_norm_eps", 1e-6),
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "rotary_dim": rotary_dim_of(known, stated, head_dim) if has_part else 0,
            "max_position_embeddings": max_model_len_of(known),
            "tie_word_embeddings": bool(known.get("tie_word_embeddings", False)),
            "hidden_act": str(known.get("hidden_act", "silu")),
            "num_labels": num_labels_of(hf),
            "quantization": stored_quantization(hf),
        }
        settings |= self.variant(known)
        moe = settings.get("moe")
        if moe is not None and moe.gated:
            act = settings["hidden_act"]
            settings["moe"] = replace(moe, hidden_act=ACTIVATIONS.get(act, act))
        return DecoderConfig(**settings)

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - Llama has nothing to say
        """Return the entries of `DecoderConfig` in which the family differs from Llama; `hf` has the defaults."""
        return {}

    def build(self, config: DecoderConfig, **options: Unpack[DecoderOptions]) -> CausalModel:
        """See `Family.build`."""
        from nbengine.models.families.decoder import DecoderForCausalLM
        from nbengine.models.families.decoder_classifier import DecoderForSequenceClassification

        kind = DecoderForSequenceClassification if config.num_labels else DecoderForCausalLM
        return kind(config, **options)

    def tensor_parts(
        self,
        config: DecoderConfig,  # noqa: ARG002 - some families need it
        name: str,
        shape: tuple[int, ...],
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        if not name.startswith(self.unused):
            yield from plain_parts(self.our_name(name), name, shape)

    def our_name(self, name: str) -> str:
        """Return the model's name of the tensor that a file calls `name`."""
        return name


def layers_of(
    hf: Mapping[str, Any], window: int | None, default: Mapping[int, bool] | None = None, **own: Any
) -> tuple[LayerConfig, ...]:
    """Return the layers of which `layer_types`, or else `default`, says which have a window.

    `default` maps a layer to whether it has one; None: all have it. `own` goes into the layers with a window.

    Raises:
        ModelLoadError: `layer_types` is wrong.
    """
    count = positive(hf, "num_hidden_layers")
    if window is None:
        return ()
    types = hf.get("layer_types")
    if types is None:
        has_window = [default is None or default[index] for index in range(count)]
    elif isinstance(types, list) and set(types) <= {"full_attention", "sliding_attention"}:
        has_window = [each == "sliding_attention" for each in types]
    else:
        raise ModelLoadError(
            f"config.json: layer_types must be a list of 'full_attention' and 'sliding_attention', got {quoted(types)}"
        )
    if not any(has_window):
        return ()
    return tuple(LayerConfig("window", window, **own) if each else LayerConfig() for each in has_window)


def layers_alike(hf: Mapping[str, Any], window: int | None) -> tuple[LayerConfig, ...]:
    """Return the layers of a model whose window, if it has one, is that of all layers, whatever `layer_types` says."""
    return layers_of({**hf, "layer_types": None}, window)


def window_of(hf: Mapping[str, Any], default: int | None = None) -> int | None:
    """Return the tokens that layers with a window see; None: no layer has one, or none that is shorter than the
    longest sequence."""
    if hf.get("sliding_window", default) is None:
        return None
    window = positive(hf, "sliding_window", default)
    return window if window < max_model_len_of(hf) else None
