"""BERT-style encoders (BERT, RoBERTa, XLM-RoBERTa) over a flattened batch of whole prompts.

Devlin et al., 2018; Liu et al., 2019. There is no KV cache: a prompt is computed in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.models.configs.encoder_config import EncoderConfig
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.layers.basic import LayerNorm, Linear, MergedLinear, Rows
from nbengine.models.layers.encoder_attention import PromptGroup, bidirectional_attention
from nbengine.models.layers.memory import WeightMemory
from nbengine.models.layers.weights import Place, Slots, WeightSlot

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class BertEmbeddings:
    """The sum of word, position and segment embeddings, normalised."""

    def __init__(self, config: EncoderConfig, place: Place) -> None:
        hidden = config.hidden_size
        self.words = place.empty(config.vocab_size, hidden)
        self.positions = place.empty(config.num_positions, hidden)
        self.token_types = place.empty(config.type_vocab_size, hidden)
        self.norm = LayerNorm(hidden, config.layer_norm_eps, place)
        self._offset = config.position_offset

    def __call__(self, input_ids: Tensor, positions: Tensor, token_types: Tensor) -> Tensor:
        """Turn int64 [T] each into embeddings [T, hidden]."""
        x = F.embedding(input_ids, self.words)
        x += F.embedding(token_types, self.token_types)
        x += F.embedding(positions + self._offset, self.positions)
        return self.norm(x)

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield f"{prefix}.word_embeddings.weight", WeightSlot.whole(self.words)
        yield f"{prefix}.position_embeddings.weight", WeightSlot.whole(self.positions)
        yield f"{prefix}.token_type_embeddings.weight", WeightSlot.whole(self.token_types)
        yield from self.norm.slots(f"{prefix}.LayerNorm")


class BertLayer:
    """An attention and a feed-forward block; after each, the sum with its input is normalised."""

    def __init__(self, config: EncoderConfig, place: Place) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        parts = [Rows(name, hidden, hidden) for name in ("query", "key", "value")]
        self.qkv = MergedLinear(hidden, parts, bias=True, place=place)
        self.attention_out = Linear(hidden, hidden, bias=True, place=place)
        self.attention_norm = LayerNorm(hidden, eps, place)
        self.inner = Linear(hidden, inner, bias=True, place=place)
        self.out = Linear(inner, hidden, bias=True, place=place)
        self.out_norm = LayerNorm(hidden, eps, place)
        self._activation = _ACTIVATIONS[config.hidden_act]
        self._heads_shape = (-1, 3, config.num_heads, config.head_dim)

    def __call__(self, x: Tensor, groups: list[PromptGroup]) -> Tensor:
        """Turn the hidden states [T, hidden] before the layer into those after it."""
        attended = bidirectional_attention(self.qkv(x).view(self._heads_shape), groups)
        x = self.attention_norm(self.attention_out(attended).add_(x))
        return self.out_norm(self.out(self._activation(self.inner(x))).add_(x))

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from self.qkv.slots(f"{prefix}.attention.self")
        yield from self.attention_out.slots(f"{prefix}.attention.output.dense")
        yield from self.attention_norm.slots(f"{prefix}.attention.output.LayerNorm")
        yield from self.inner.slots(f"{prefix}.intermediate.dense")
        yield from self.out.slots(f"{prefix}.output.dense")
        yield from self.out_norm.slots(f"{prefix}.output.LayerNorm")


class BertModel(EncoderModel):
    """Embeddings, layers and, where `config.num_labels` is not 0, a classification head on the first token.

    It is to be run under `torch.inference_mode`. Weights are uninitialised until a loader has filled
    `weight_slots()`; on the device "meta" they take no memory.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: WeightMemory | None = None,
    ) -> None:
        self.config: EncoderConfig = config
        self.dtype = dtype
        self.device = device
        self.on_layers: Callable[[int], None] = lambda _count: None
        """See `DecoderForCausalLM.on_layers`."""
        place = Place(dtype, device, memory=memory)
        self.embeddings = BertEmbeddings(config, place)
        self.layers = [BertLayer(config, place) for _ in range(config.num_layers)]
        self.head: tuple[Linear, Linear] | None = None
        if config.num_labels:
            hidden = config.hidden_size
            self.head = (
                Linear(hidden, hidden, bias=True, place=place),
                Linear(hidden, config.num_labels, bias=True, place=place),
            )

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_types: Tensor, groups: list[PromptGroup]
    ) -> Tensor:
        """Return the hidden states [T, hidden] of a flat batch of whole prompts in ascending order of length.

        `input_ids`, `positions` (from 0 in each prompt) and `token_types` are int64 [T].
        """
        x = self.embeddings(input_ids, positions, token_types)
        for layer in self.layers:
            x = layer(x, groups)
            self.on_layers(1)
        return x

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, num_labels] of the prompts whose first tokens' hidden states are [N,
        hidden]."""
        if self.head is None:
            raise NBEngineError("the model has no classification head")
        dense, classifier = self.head
        return classifier(dense(hidden.to(self.dtype)).tanh())

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the places of the weights, under the names of Hugging Face checkpoints."""
        prefix = self._prefix
        slots = dict(self.embeddings.slots(f"{prefix}embeddings"))
        for index, layer in enumerate(self.layers):
            slots.update(layer.slots(f"{prefix}encoder.layer.{index}"))
        if self.head is not None:
            names = ("classifier.dense", "classifier.out_proj")
            if not self.config.is_roberta:
                names = (f"{prefix}pooler.dense", "classifier")
            for linear, name in zip(self.head, names, strict=True):
                slots.update(linear.slots(name))
        return slots

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Return the tensors that a checkpoint may have and that nothing here uses: the head of the
        pre-training."""
        if self.head is not None and not self.config.is_roberta:
            return frozenset()
        return frozenset(f"{self._prefix}pooler.dense.{part}" for part in ("weight", "bias"))

    def parameters(self) -> Iterator[Tensor]:
        """Yield every weight once; parts of a fused weight are views of one storage."""
        return (slot.tensor for slot in self.weight_slots().values())

    @property
    def _prefix(self) -> str:
        if self.head is None:
            return ""
        return "roberta." if self.config.is_roberta else "bert."
