"""A decoder's layer: an attention and a feed-forward block around a residual stream."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.models.configs.decoder_config import DecoderConfig, LayerConfig
from nbengine.models.layers.basic import RMSNorm
from nbengine.models.layers.decoder_attention import DecoderAttention
from nbengine.models.layers.latent_attention import LatentAttention
from nbengine.models.layers.norms import Norm, make_norm
from nbengine.models.layers.recurrent import RecurrentMixer, make_recurrent_mixer
from nbengine.models.layers.rotary import RotaryEmbedding
from nbengine.models.layers.weights import Place, Slots

_ATTENTION, _RECURRENT = "self_attn", "linear_attn"


class FeedForward(Protocol):
    """A feed-forward block, or a block of experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the block's output [T, hidden]."""

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""


class ResidualStream:
    """The hidden states [T, hidden], in place, to which blocks add their outputs times `scale`.

    An output is added when the stream is read next, which a norm may do together with its own work.
    """

    __slots__ = ("_added", "_hidden", "_scale")

    def __init__(self, hidden: Tensor, scale: float) -> None:
        self._hidden = hidden
        self._scale = scale
        self._added: Tensor | None = None

    def add(self, out: Tensor) -> None:
        """Add a block's output [T, hidden]; the stream has been read since the last one."""
        assert self._added is None
        self._added = out

    def read(self, norm: Norm | None) -> Tensor:
        """Return the stream as a norm makes it; None: the stream itself, to be used before it is read again."""
        hidden, added = self._hidden, self._added
        self._added = None
        if added is not None:
            if isinstance(norm, RMSNorm):
                return norm.after_adding(hidden, added, self._scale)
            hidden.add_(added if self._scale == 1 else added * self._scale)
        return hidden if norm is None else norm(hidden)


class DecoderLayer:
    """An attention and a feed-forward block, each normalised before it, behind it, or both, as `config.norms`
    says, and added to the residual stream. A recurrent layer has a block with a state in place of attention; where
    `mlp` is None there is no feed-forward block."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        rotaries: list[RotaryEmbedding],
        mlp: FeedForward | None,
        place: Place,
        parallel: ParallelState,
    ):
        def norm(name: str | None) -> Norm | None:
            return None if name is None else make_norm(config, config.hidden_size, place)

        names = config.norms
        self._names = names
        self.before_attention = norm(names.before_attention)
        self.mixer: DecoderAttention | LatentAttention | RecurrentMixer
        self.is_recurrent = layer.attention == "recurrent"
        """True if the layer has a recurrent state in place of keys and values."""
        if self.is_recurrent:
            self.mixer = make_recurrent_mixer(config, place.inside(_RECURRENT), parallel)
        elif config.latent is not None:
            own = place.inside(_ATTENTION)
            self.mixer = LatentAttention(config, config.latent, rotaries[0], own, parallel)
        else:
            self.mixer = DecoderAttention(config, layer, rotaries, place.inside(_ATTENTION), parallel)
        self.after_attention = norm(names.after_attention)
        self.before_mlp = None if mlp is None else norm(names.before_mlp)
        self.mlp = mlp
        self.after_mlp = None if mlp is None else norm(names.after_mlp)

    @property
    def self_attn(self) -> DecoderAttention:
        """Return the attention block of a layer that keeps keys and values."""
        assert isinstance(self.mixer, DecoderAttention)
        return self.mixer

    @property
    def latent_attn(self) -> LatentAttention:
        """Return the attention block of a layer that keeps latents."""
        assert isinstance(self.mixer, LatentAttention)
        return self.mixer

    def __call__(self, stream: ResidualStream, angles: list[Tensor], cache: Any, metadata: Any) -> None:
        """Update the residual stream.

        `cache` is the layer's keys and values and `metadata` its group's `AttentionMetadata`; a recurrent layer has a
        `RecurrentState` and `RecurrentMetadata`.
        """
        out = self.mixer(stream.read(self.before_attention), angles, cache, metadata)
        stream.add(out if self.after_attention is None else self.after_attention(out))
        if self.mlp is not None:
            out = self.mlp(stream.read(self.before_mlp))
            stream.add(out if self.after_mlp is None else self.after_mlp(out))

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        names = self._names
        for name, norm in (
            (names.before_attention, self.before_attention),
            (names.after_attention, self.after_attention),
            (names.before_mlp, self.before_mlp),
            (names.after_mlp, self.after_mlp),
        ):
            if norm is not None:
                yield from norm.slots(f"{prefix}.{name}")
        yield from self.mixer.slots(f"{prefix}.{_RECURRENT if self.is_recurrent else _ATTENTION}")
        if self.mlp is not None:
            yield from self.mlp.slots(f"{prefix}.mlp")
