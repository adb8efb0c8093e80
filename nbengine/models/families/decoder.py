"""A lean Llama-style decoder over a flattened batch of tokens, parametrised by `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.errors import NBEngineError
from nbengine.kernels.dispatch import select_expert_kernels
from nbengine.kernels.row_kernels import select_soft_cap
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.kv_cache.specs import make_groups
from nbengine.models.configs.decoder_config import ACTIVATIONS, DecoderConfig
from nbengine.models.further_steps import FurtherSteps
from nbengine.models.layers.attention import warm_up_attention
from nbengine.models.layers.decoder_attention import DecoderAttention
from nbengine.models.layers.decoder_layer import DecoderLayer, FeedForward, ResidualStream
from nbengine.models.layers.dense_and_experts import DenseAndExperts
from nbengine.models.layers.gated_delta_net import RecurrentState
from nbengine.models.layers.latent_attention import LatentAttention
from nbengine.models.layers.layer_inputs import LayerInputs
from nbengine.models.layers.memory import WeightMemory
from nbengine.models.layers.mlp import DecoderMLP
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.norms import Norm, make_norm
from nbengine.models.layers.parallel_layers import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from nbengine.models.layers.query_factors import QueryFactors
from nbengine.models.layers.recurrent import warm_up_recurrent
from nbengine.models.layers.rotary import RotaryEmbedding
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats, Place, WeightSlot
from nbengine.models.prepared.steps import PreparedSteps
from nbengine.models.sharding import DecoderShard
from nbengine.models.step_output import StepOutput

if TYPE_CHECKING:
    from nbengine.kernels.attention_metadata import AttentionMetadata
    from nbengine.kernels.cpu.backend import CpuKernels
    from nbengine.kernels.dispatch import Kernels, RecurrentKernels
    from nbengine.models.checkpoints.kept_weights import KeptWeights

_EMBEDDING = "model.embed_tokens"
_LM_HEAD = "lm_head"


class DecoderForCausalLM:
    """One rank's part of embedding, layers, final norm and output projection, to be run under
    `torch.inference_mode`.

    The first pipeline stage has the embedding, the last one the norm and the projection, and each its own
    layers; the stages' runners bring hidden states from one to the next. Among the ranks of a stage, which
    run `forward` together, every layer is divided, and their hidden states are the same.

    Weights are uninitialised until a loader has filled `weight_slots()`. On the device "meta" they take no
    memory, which is how a loader learns the shapes before it allocates anything.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
        parallel: ParallelState = SINGLE,
        packed: PackedFormats = ALL_DENSE,
        memory: WeightMemory | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.on_layers: Callable[[int], None] = lambda _count: None
        """Called with the number of layers that `forward` has come on by, at once, so that those who watch
        over steps can count their layers."""
        self.kept: KeptWeights | None = None
        """The file on disk that has the weights, or will have them, if there is one."""
        self.layout = parallel.layout
        self.tp = parallel.tp
        """The group of the ranks among which each layer is divided."""
        self.shard = DecoderShard.of(config, parallel.layout)
        groups = make_groups(config.cache_rules())
        self.layer_groups = [groups.layer_groups[index] for index in self.shard.layers]
        """The cache group of each layer."""
        positions = min(max_positions or config.usual_positions, config.max_position_embeddings)
        self._packed = packed
        place = Place(dtype, device, packed, memory=memory)
        self.hidden_dtype = place.hidden_dtype
        """The type of hidden states and logits."""
        self.rotaries = [
            RotaryEmbedding(
                rope,
                rope.size or config.rotary_dim or config.head_dim,
                max_positions=positions,
                dtype=self.hidden_dtype,
                device=device,
                is_exact=place.is_exact,
                is_interleaved=config.rotary_interleaved,
            )
            for rope in config.ropes
        ]
        self.layer_inputs: LayerInputs | None = None
        """The numbers of tokens that layers take beside the stream, in families whose layers do."""
        self.query_factors: QueryFactors | None = None
        if config.query_growth is not None:
            self.query_factors = QueryFactors(config.query_growth, positions, device)
        # Embeddings are multiplied by a number of their own type (Gemma).
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.hidden_dtype))
        """The number with which embeddings are multiplied."""
        self.layers = [
            self._layer(place.inside(f"model.layers.{index}"), index, parallel) for index in self.shard.layers
        ]
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.norm: Norm | None = None
        self._prepared = PreparedSteps(self) if PreparedSteps.covers(self) else None
        self.lm_head: ParallelLMHead | None = None
        self._soft_cap: Callable[[Tensor], Tensor] | None = None
        if parallel.layout.is_first_stage:
            self.embed_tokens = self._vocabulary_rows(_EMBEDDING, place, parallel)
        if parallel.layout.is_last_stage:
            self.norm = make_norm(config, config.hidden_size, place)
            if not config.num_labels:
                tied = self.embed_tokens if config.tie_word_embeddings else None
                name = _EMBEDDING if config.tie_word_embeddings else _LM_HEAD
                cap = config.logits_soft_cap
                if cap is not None and place.is_wide:
                    self._soft_cap = select_soft_cap(device, self.hidden_dtype, config.vocab_size, cap)
                self.lm_head = ParallelLMHead(tied or self._vocabulary_rows(name, place, parallel), parallel)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of input_ids [T], in new memory.

        Raises:
            NBEngineError: this is not the first stage.
        """
        if self.embed_tokens is None:
            raise NBEngineError(f"{self.layout}: tokens are embedded on the first pipeline stage only")
        x = self.embed_tokens(input_ids).to(self.hidden_dtype)
        return x if self.embedding_scale == 1 else x.mul_(self.embedding_scale)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata | StepMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of `step`, without logits."""
        return self.step(input_ids, positions, kv_caches, attn, inputs_embeds).hidden

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata | StepMetadata,
        inputs_embeds: Tensor | None = None,
        further: FurtherSteps | None = None,
    ) -> StepOutput:
        """Return the hidden states [T, hidden] of input_ids [T] at positions [T], both int64: on the last
        stage those after the final norm, before it the residual stream, which the next stage takes as
        `inputs_embeds`; where the step is prepared, the logits, too. The next step may overwrite them.

        `kv_caches` has one tensor for each of `layers`, which gets the new keys and values at the `slot_mapping` of
        its group in `attn`; layers of different groups may share one.
        `nbengine.kernels.kv_cache.cache_shape` says its shape, with `shard.num_kv_heads` and `config.cache_parts`. `inputs_embeds` [T, hidden],
        which is overwritten, takes the place of `input_ids`. Where steps have followed, the outcome is that of the last
        of them, and the inputs are its own.
        """
        if self._prepared is not None:
            prepared = self._prepared.run(input_ids, positions, kv_caches, attn, inputs_embeds, further)
            if prepared is not None:
                return prepared
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        stream = ResidualStream(x, self.config.residual_scale)
        angles = self._of_tokens(input_ids, x, positions)
        for layer, kv_cache, own in zip(self.layers, kv_caches, self._metadata_of_layers(attn), strict=True):
            layer(stream, angles, kv_cache, own)
            self.on_layers(1)
        return StepOutput(stream.read(self.norm))

    __call__ = forward

    def _of_tokens(self, input_ids: Tensor, x: Tensor, positions: Tensor) -> list[Tensor]:  # noqa: ARG002
        """Return what layers need of tokens beside the residual stream x [T, hidden]: angles by positions, and factors
        of queries; families whose layers need more override it."""
        angles = [rotary.at(positions) for rotary in self.rotaries]
        if self.query_factors is not None:
            angles.append(self.query_factors.at(positions))
        return angles

    def new_states(self, num_slots: int) -> list[RecurrentState]:
        """Return the memory of `num_slots` states for each recurrent layer of this worker, in the layers' order."""
        mixers = (layer.mixer for layer in self.layers)
        keeping = (DecoderAttention, LatentAttention)
        return [mixer.new_state(num_slots) for mixer in mixers if not isinstance(mixer, keeping)]

    @torch.inference_mode()
    def warm_up_recurrent(self, kernels: RecurrentKernels) -> None:
        """Compile what this worker's recurrent layers need, which are of one kind, so that no step waits for it."""
        for layer in self.layers:
            if not isinstance(layer.mixer, DecoderAttention | LatentAttention):
                warm_up_recurrent(layer.mixer, kernels, self.device)
                return

    def _metadata_of_layers(self, attn: AttentionMetadata | StepMetadata) -> list[Any]:
        """Return for each layer the metadata of its cache group."""
        if isinstance(attn, StepMetadata):
            return [attn.groups[group] for group in self.layer_groups]
        return [attn] * len(self.layers)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, vocab_size] of the hidden states [N, hidden] that `forward` gave; the same on
        all ranks.

        Raises:
            NBEngineError: there is no output projection: this is not the last stage, or the model classifies.
        """
        if self.lm_head is None:
            raise NBEngineError(f"{self.layout}: the model has no output projection here")
        logits = self.lm_head(hidden)
        if self.config.logits_divisor != 1:
            logits.div_(self.config.logits_divisor)
        if self._soft_cap is not None:
            return self._soft_cap(logits)
        cap = self.config.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def forget_addresses(self) -> None:
        """Take note that the weights are about to lie elsewhere in memory."""
        if self._prepared is not None:
            self._prepared.forget()

    def redivided(self, layout: RankLayout) -> None:
        """Take note that the experts are divided in another way, and that this worker has another place now."""
        self.layout = layout
        self._prepared = PreparedSteps(self) if PreparedSteps.covers(self) else None

    def dummy_forward(self) -> None:
        """Take part in the experts' computation for other engine cores' tokens without own tokens; their
        workers of this stage run `forward` or this. Nothing is exchanged between stages."""
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.hidden_dtype, device=self.device)
        for block in self.moe_blocks:
            block(nothing)

    def warm_up(self, kernels: Kernels, kv_caches: list[Tensor], max_tokens: int) -> None:
        """Compile and prepare what steps of up to `max_tokens` with these caches need, so that none waits for
        it."""
        for form in {slot.form for slot in self.weight_slots().values()} - {None}:
            if form is not None and self._packed.products is not None:
                self._packed.products.warm_up(form, self.activation_bits)
        if self.lm_head is not None:
            self.lm_head.warm_up()
        for block in self.moe_blocks[:1]:
            block.warm_up()
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, DecoderAttention)]
        for mixer in mixers:
            mixer.warm_up()
        attentions = [mixer.attention for mixer in mixers]
        # Recurrent layers have states in place of keys and values.
        pages = (cache for cache in kv_caches if isinstance(cache, Tensor))
        if attentions:
            warm_up_attention(attentions, kernels, next(pages).shape[3])
        elif self.config.latent is not None:
            self.layers[0].latent_attn.warm_up(kernels, kv_caches[0].shape[3])
        if self._prepared is not None and kernels.name == "cpu":
            self._prepared.warm_up(cast("CpuKernels", kernels), kv_caches, max_tokens)

    @property
    def has_logits(self) -> bool:
        """Return whether there is an output projection here: on the last stage of a model that generates."""
        return self.lm_head is not None

    @property
    def activation_bits(self) -> int:
        """Return the bits to which the input of products with layers' quantised weights is rounded."""
        return self._packed.activation_bits

    @property
    def product_instructions(self) -> str | None:
        """Return the name of the instructions that multiply with quantised weights; None: there are none."""
        products = self._packed.products
        return products.instructions if self._packed.formats and products is not None else None

    @property
    def moe_blocks(self) -> list[SparseMoeBlock]:
        """List the blocks of this stage's layers that have experts."""
        blocks = (layer.mlp for layer in self.layers)
        found = (block.experts if isinstance(block, DenseAndExperts) else block for block in blocks)
        return [block for block in found if isinstance(block, SparseMoeBlock)]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the places of the weights, under the names of Hugging Face checkpoints; tied weights appear
        once."""
        slots: dict[str, WeightSlot] = {}
        if self.embed_tokens is not None:
            slots.update(self.embed_tokens.slots(_EMBEDDING))
        for index, layer in zip(self.shard.layers, self.layers, strict=True):
            slots.update(layer.slots(f"model.layers.{index}"))
        if self.norm is not None:
            slots.update(self.norm.slots("model.norm"))
        if self.lm_head is not None:
            slots.update(self.lm_head.rows.slots(_EMBEDDING if self.config.tie_word_embeddings else _LM_HEAD))
        return slots

    @property
    def pads_single_rows(self) -> bool:
        """Return False: a row's products depend on nothing but the row (`nbengine.kernels.dense_kernels`)."""
        return False

    @property
    def is_recordable(self) -> bool:
        """See `CausalModel.is_recordable`: layers with a recurrent state find it elsewhere in each step, and experts
        that are no stack are counted on the host."""
        mixers = (layer.mixer for layer in self.layers)
        return (
            self.product_instructions is None
            and all(isinstance(mixer, DecoderAttention | LatentAttention) for mixer in mixers)
            and all(block.is_recordable for block in self.moe_blocks)
        )

    @property
    def goes_on(self) -> bool:
        """See `CausalModel.goes_on`."""
        return self._prepared is not None and self._prepared.goes_on

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Return the tensors that a checkpoint may have and that nothing here uses."""
        has_own = not (self.config.tie_word_embeddings or self.config.num_labels)
        return frozenset() if has_own else frozenset((f"{_LM_HEAD}.weight",))

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """See `CausalModel.tied_weights`."""
        is_tied = self.config.tie_word_embeddings and not self.config.num_labels
        return {f"{_LM_HEAD}.weight": f"{_EMBEDDING}.weight"} if is_tied else {}

    def parameters(self) -> Iterator[Tensor]:
        """Yield every weight once; parts of a fused weight are views of one storage."""
        return (slot.tensor for slot in self.weight_slots().values())

    @property
    def weights_bytes(self) -> int:
        """Return the memory of the weights in bytes."""
        return sum(weight.nbytes for weight in self.parameters())

    def feed_forward(self, index: int, place: Place, parallel: ParallelState) -> FeedForward:
        """Make the feed-forward block, or the experts, of the layer with this number, whose weights lie at
        `place`; families with blocks of their own override it."""
        config = self.config.of_layer(index)
        moe = config.moe
        if moe is not None and moe.has_experts(index):
            kernels = select_expert_kernels(self.device, self.dtype)
            if moe.beside_dense:
                return DenseAndExperts(config, moe, kernels, place=place, parallel=parallel)
            return SparseMoeBlock(moe, config.hidden_size, kernels, place=place, parallel=parallel)
        return DecoderMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            place=place,
            parallel=parallel,
            activation=ACTIVATIONS[config.hidden_act],
        )

    def _layer(self, place: Place, index: int, parallel: ParallelState) -> DecoderLayer:
        config = self.config.of_layer(index)
        own = config.layer(index)
        has_mlp = own.has_mlp and (config.intermediate_size or config.moe is not None)
        mlp = self.feed_forward(index, place.inside("mlp"), parallel) if has_mlp else None
        return DecoderLayer(config, own, self.rotaries, mlp, place, parallel)

    def _vocabulary_rows(self, name: str, place: Place, parallel: ParallelState) -> VocabParallelEmbedding:
        sizes = (self.config.vocab_size, self.config.hidden_size)
        return VocabParallelEmbedding(*sizes, parallel=parallel, place=place.inside(name))
