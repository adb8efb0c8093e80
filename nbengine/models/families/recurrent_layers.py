"""The layers of a family that has recurrent ones, as config.json states them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.configs.decoder_config import LayerConfig

_ACTIVATIONS = ("silu", "swish")
"""The names of the activation behind the convolution of a layer with a gated delta rule or a state space."""


def layers_with_state(
    types: Any,
    recurrent: Collection[str],
    attention: Collection[str],
    *,
    state_bytes: int,
    rope: int | None = 0,
) -> tuple[LayerConfig, ...]:
    """Return the layers that `layer_types` describes with the names of recurrent layers, which keep
    `state_bytes` of a request, and of those with attention, whose rotary embedding is `rope`.

    Raises:
        ModelLoadError: it is no list of these names.
    """
    if not isinstance(types, list) or not set(map(str, types)) <= {*recurrent, *attention}:
        names = " and ".join(map(repr, sorted({*recurrent, *attention})))
        raise ModelLoadError(f"config.json: layer_types must be a list of {names}, got {quoted(types)}")
    with_state, others = LayerConfig("recurrent", state_bytes, rope=None), LayerConfig(rope=rope)
    return tuple(with_state if kind in recurrent else others for kind in types)


def check_activation(hf: Mapping[str, Any], layers: Iterable[LayerConfig], key: str = "hidden_act") -> None:
    """Refuse what the convolution of a recurrent layer is not followed by.

    Raises:
        ModelLoadError: there is such a layer, and the activation at `key` is another than silu.
    """
    stated = hf.get(key) or _ACTIVATIONS[0]
    if stated not in _ACTIVATIONS and any(layer.attention == "recurrent" for layer in layers):
        raise ModelLoadError(
            f"config.json: {key} must be {' or '.join(map(repr, _ACTIVATIONS))} in a model with recurrent layers, got "
            f"{quoted(stated)}"
        )


def switch(hf: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Return the truth value at `key`, `default` where it is missing or null."""
    value = hf.get(key)
    return default if value is None else bool(value)
