"""The attention function that classes of transformers call in each layer: it writes keys and values into the paged
KV cache and reads them with our kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from nbengine.errors import ModelLoadError, NBEngineError
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.models.layers.attention import Attention

if TYPE_CHECKING:
    from nbengine.distributed.communicator import ParallelState
    from nbengine.kernels.attention_metadata import AttentionMetadata

NAME = "nbengine"
"""The name of the attention function among those of transformers. No function that makes masks has this name, so
that transformers makes none."""
_HANDLER = "nbengine_attention"
WITHOUT_EFFECT = frozenset(
    (
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "training",
        "use_cache",
    )
)
"""Arguments of attention functions that change nothing here: the batch's metadata say where requests begin."""

Handler = Callable[..., Tensor]


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend in the layer of `module`, as transformers asks: query [1, heads, T, head_dim], key and value [1,
    KV heads, T, ...]; return [1, T, heads, value_dim].

    Raises:
        NBEngineError: the module is not one of a model that nbengine runs.
    """
    handler: Handler | None = getattr(module, _HANDLER, None)
    if handler is None:
        raise NBEngineError(
            f"{type(module).__name__} calls nbengine's attention outside of a layer of its model"
        )
    return handler(module, query, key, value, attention_mask, **options), None


def handle(module: nn.Module, handler: Handler | None) -> None:
    """Have calls from `module` go to `handler`; None: to nothing."""
    if handler is not None:
        # Not by the module's own __setattr__, which would make a submodule of a handler that is one.
        vars(module)[_HANDLER] = handler
    else:
        vars(module).pop(_HANDLER, None)


class StepState:
    """The caches and metadata that the layers of a model use in the step that runs."""

    def __init__(self) -> None:
        self.kv_caches: list[Tensor] = []
        self.metadata: list[AttentionMetadata] = []
        """One for each of the stage's layers."""
        self.on_layer: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a layer's attention: the heads of this rank, and which keys its queries see."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    chunk: int | None


class WholeHeads:
    """The attention of a layer that has all heads on every rank: each rank computes those whose keys it keeps, and all
    get the outcome of all."""

    def __init__(self, shape: LayerShape, parallel: ParallelState) -> None:
        layout, self._tp = parallel.layout, parallel.tp
        self.shape = replace(
            shape,
            num_heads=shape.num_heads // layout.tp_size,
            num_kv_heads=shape.num_kv_heads // layout.tp_size,
        )
        """The attention with which this rank computes."""
        self._rank = layout.tp_rank

    def own(self, x: Tensor, count: int, dim: int) -> Tensor:
        """Return this rank's `count` heads of all, along the dimension `dim`."""
        return x.narrow(dim, self._rank * count, count)

    def gathered(self, out: Tensor) -> Tensor:
        """Return all ranks' outcome [T, heads, value_dim], given the own heads'."""
        rows = out.flatten(1).contiguous()
        return self._tp.all_gather(rows).view(len(out), -1, out.shape[2])


class LayerAttention:
    """The attention of one layer; `place` is its number within the stage."""

    def __init__(
        self, shape: LayerShape, place: int, step: StepState, whole: WholeHeads | None = None
    ) -> None:
        self._whole = whole
        self._shape = shape if whole is None else whole.shape
        self._place = place
        self._step = step
        self._attention: Attention | None = None
        self._asked: tuple[object, ...] = ()
        self._pads_values = shape.value_dim < shape.head_dim

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """See `attention_function`."""
        del module, attention_mask
        whole = self._whole
        if whole is not None:
            query = whole.own(query, self._shape.num_heads, 1)
            key, value = (whole.own(x, self._shape.num_kv_heads, 1) for x in (key, value))
            s_aux = None if s_aux is None else whole.own(s_aux, self._shape.num_heads, 0)
        asked = scaling, softcap, s_aux is None
        if self._attention is None:
            self._attention, self._asked = self._make(scaling, softcap, s_aux), asked
        elif asked != self._asked:
            raise NBEngineError(f"layer {self._place} asks for other attention than in the step before")
        step, shape = self._step, self._shape
        if self._pads_values:
            value = F.pad(value, (0, shape.head_dim - shape.value_dim))
        out = self._attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            step.kv_caches[self._place],
            step.metadata[self._place],
        )
        step.on_layer()
        if self._pads_values:
            out = out[..., : shape.value_dim]
        return (out if whole is None else whole.gathered(out))[None]

    def _make(self, scaling: float | None, softcap: float | None, s_aux: Tensor | None) -> Attention:
        shape = self._shape
        scale = shape.head_dim**-0.5 if scaling is None else float(scaling)
        options = AttentionOptions(
            scale, window=shape.window, chunk=shape.chunk, soft_cap=softcap or None, sinks=s_aux
        )
        return Attention(shape.num_heads, shape.num_kv_heads, shape.head_dim, options)


class Probe:
    """A handler that notes what the layers of a model on the device "meta" ask for."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.layers: dict[int, tuple[nn.Module, LayerShape]] = {}
        """By the layers' numbers: the module that calls, and what it computes with."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> Tensor:
        """See `attention_function`.

        Raises:
            ModelLoadError: the layer asks for what our kernels do not do.
        """
        del scaling, softcap, s_aux
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise self._refused("attention outside of numbered layers")
        if index in self.layers:
            raise self._refused(f"more than one attention in layer {index}")
        if attention_mask is not None:
            raise self._refused("an attention mask of its own")
        if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
            raise self._refused("attention to later tokens")
        unknown = [name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT]
        if unknown:
            raise self._refused(f"attention with {', '.join(sorted(unknown))}")
        num_tokens, head_dim = query.shape[2:]
        if key.shape[2] != num_tokens or key.shape[3] != head_dim or value.shape[3] > head_dim:
            raise self._refused(
                f"queries {list(query.shape)} for keys {list(key.shape)} and values {list(value.shape)} in layer {index}"
            )
        shape = LayerShape(
            query.shape[1], key.shape[1], head_dim, value.shape[3], sliding_window or None, None
        )
        self.layers[index] = module, shape
        return query.new_empty(1, num_tokens, shape.num_heads, shape.value_dim)

    def _refused(self, feature: str) -> ModelLoadError:
        return ModelLoadError(f"{self._architecture} cannot run through transformers: it has {feature}")


def register() -> None:
    """Enter the attention function into transformers' list."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_function)
