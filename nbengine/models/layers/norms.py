"""The norms that a decoder's configuration asks for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.row_kernels import select_rms_norm
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.layers.basic import LayerNorm, RMSNorm
from nbengine.models.layers.weights import Place, Slots, WeightSlot


class PlainNorm:
    """Layer normalisation over the last dimension, without weight or bias, in float32."""

    __slots__ = ("eps", "shape")

    def __init__(self, size: int, eps: float) -> None:
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, eps=self.eps).to(x.dtype)

    def slots(self, prefix: str) -> Slots:  # noqa: ARG002 - there are no weights
        """Yield nothing."""
        yield from ()


Norm = RMSNorm | LayerNorm | PlainNorm


def make_norm(config: DecoderConfig, size: int, place: Place) -> Norm:
    """Make a norm of the configuration's kind."""
    match config.norm_kind:
        case "layer":
            return LayerNorm(size, config.rms_norm_eps, place)
        case "layer_plain":
            return PlainNorm(size, config.rms_norm_eps)
        case kind:
            return RMSNorm(size, config.rms_norm_eps, place, adds_one=kind == "rms_one")


class WholeHeadsNorm:
    """Root mean square normalisation over all heads of a projection, of which this rank has some (OLMo 2).

    The ranks add up the squares of their heads; of `shared` ranks with the same heads each gives a part.
    """

    __slots__ = ("_all_reduce", "_compiled", "_full_size", "_shared", "_start", "eps", "weight")

    def __init__(
        self,
        size: int,
        full_size: int,
        start: int,
        eps: float,
        *,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        self.weight = place.vector(size)
        self.eps = eps
        self._full_size, self._start = full_size, start
        self._shared = size * parallel.layout.tp_size // full_size
        self._all_reduce = parallel.tp.all_reduce if parallel.layout.tp_size > 1 else None
        self._compiled = None
        if place.is_wide and self._all_reduce is None:
            self._compiled = select_rms_norm(self.weight, eps, place.hidden_dtype)

    @property
    def is_compiled(self) -> bool:
        """Return whether it is a function of rows: one rank has all heads, and the numbers are float32."""
        return self._compiled is not None

    def __call__(self, heads: Tensor) -> Tensor:
        """Normalise heads [T, heads, head_dim] of one token together."""
        x = heads.flatten(1)
        if self._compiled is not None:
            return self._compiled(x).view(heads.shape)
        if self._all_reduce is None:
            return F.rms_norm(x, (self._full_size,), self.weight, self.eps).view(heads.shape)
        wide = x.float()
        squares = self._all_reduce(wide.square().sum(-1, keepdim=True) / self._shared)
        scale = torch.rsqrt(squares / self._full_size + self.eps)
        return (wide * scale * self.weight).to(x.dtype).view(heads.shape)

    def slots(self, prefix: str) -> Slots:
        """Yield this rank's part of the weight under the checkpoint's name."""
        yield f"{prefix}.weight", WeightSlot(self.weight, (self._full_size,), 0, self._start)
