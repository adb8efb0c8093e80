"""The decoder as its prepared steps see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nbengine.distributed.communicator import Communicator
from nbengine.distributed.layout import RankLayout
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.layers.decoder_layer import DecoderLayer
from nbengine.models.layers.layer_inputs import LayerInputs
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.norms import Norm
from nbengine.models.layers.parallel_layers import ParallelLMHead, VocabParallelEmbedding
from nbengine.models.layers.query_factors import QueryFactors
from nbengine.models.layers.rotary import RotaryEmbedding


class PreparedModel(Protocol):
    """One rank's part of a decoder; see `nbengine.models.families.decoder.DecoderForCausalLM`."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def hidden_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def layout(self) -> RankLayout: ...
    @property
    def tp(self) -> Communicator: ...
    @property
    def layers(self) -> Sequence[DecoderLayer]: ...
    @property
    def layer_groups(self) -> Sequence[int]: ...
    @property
    def rotaries(self) -> Sequence[RotaryEmbedding]: ...
    @property
    def embedding_scale(self) -> float: ...
    @property
    def query_factors(self) -> QueryFactors | None: ...
    @property
    def layer_inputs(self) -> LayerInputs | None: ...
    @property
    def embed_tokens(self) -> VocabParallelEmbedding | None: ...
    @property
    def norm(self) -> Norm | None: ...
    @property
    def lm_head(self) -> ParallelLMHead | None: ...
    @property
    def on_layers(self) -> Callable[[int], None]: ...
    @property
    def moe_blocks(self) -> Sequence[SparseMoeBlock]: ...
    def embed(self, input_ids: Tensor) -> Tensor: ...
