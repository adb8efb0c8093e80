"""Decoders that run through their class of transformers: its layers, with our attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.errors import ModelLoadError, NBEngineError
from nbengine.kv_cache.specs import make_groups
from nbengine.models.configs.transformers_config import TransformersConfig, transformers_config
from nbengine.models.families.transformers_attention import LayerAttention, StepState, WholeHeads, handle
from nbengine.models.families.transformers_class import Tried, check_rope, make_class, try_out
from nbengine.models.families.transformers_division import Stage, divide_projections
from nbengine.models.families.transformers_names import place_weights, tensor_names
from nbengine.models.further_steps import FurtherSteps
from nbengine.models.layers.dense import use_dense_products
from nbengine.models.layers.memory import WeightMemory
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats, WeightSlot
from nbengine.models.sharding import DecoderShard
from nbengine.models.step_output import StepOutput

if TYPE_CHECKING:
    from nbengine.kernels.attention_metadata import AttentionMetadata
    from nbengine.kernels.dispatch import Kernels
    from nbengine.models.causal_model import DecoderOptions
    from nbengine.models.checkpoints.kept_weights import KeptWeights
    from nbengine.models.checkpoints.tensor_names import TensorPart


_PADDING = 0
"""The token of which the classes with classification heads believe that it fills up shorter sequences."""


class TransformersFamily:
    """Every decoder whose class of transformers takes an attention function (`nbengine.models.family.Family`)."""

    title = "other decoders, through transformers"

    def shares_experts(self, hf: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """See `nbengine.models.family.Family.shares_experts`: each engine core computes its own."""
        return False

    def config(self, hf: Mapping[str, Any]) -> TransformersConfig:
        """Return the model that a Hugging Face configuration describes; see `transformers_config`."""
        return transformers_config(hf)

    def build(self, config: TransformersConfig, **options: Unpack[DecoderOptions]) -> TransformersForCausalLM:
        """Make a rank's part of a model, its weights not loaded yet; on the device "meta" it takes no memory."""
        kind = TransformersForSequenceClassification if config.num_labels else TransformersForCausalLM
        return kind(config, **options)

    def tensor_parts(
        self, config: TransformersConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """Yield our names of what a file's tensor holds, each with its place in it."""
        return tensor_names(config).parts(name, shape)


class TransformersForCausalLM:
    """One rank's part of a model of transformers (`nbengine.models.causal_model.CausalModel`).

    A step runs the class's submodel that makes hidden states, on all tokens of the batch as one sequence with their
    positions. Logits come from the class's own `forward`, whose submodel then answers with the hidden states that it
    is given: so that what the class does to its logits, scaling and soft caps for instance, is done.

    Raises:
        ModelLoadError: the class does not take the configuration, or needs what we do not do.
        InvalidArgumentError: the class cannot be divided among that many ranks.
    """

    def __init__(
        self,
        config: TransformersConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
        parallel: ParallelState = SINGLE,
        packed: PackedFormats = ALL_DENSE,
        memory: WeightMemory | None = None,
    ) -> None:
        if packed.formats:
            raise ModelLoadError(
                "quantised weights do not run through transformers; leave `quantization` out"
            )
        self.config = config
        self.dtype = self.hidden_dtype = dtype
        self.device = device
        self.on_layers: Callable[[int], None] = lambda _count: None
        """See `CausalModel.on_layers`."""
        self.kept: KeptWeights | None = None
        self.layout = parallel.layout
        self.tp = parallel.tp
        self.shard = DecoderShard.of(config, parallel.layout)
        groups = make_groups(config.cache_rules())
        self.layer_groups = [groups.layer_groups[index] for index in self.shard.layers]
        """The cache group of each layer."""
        self._names = tensor_names(config)
        self._model = make_class(config.architecture, config.hf, dtype)
        check_rope(
            self._model, config.architecture, config.hf, max_positions or config.max_position_embeddings
        )
        self._divided = divide_projections(self._model, config, parallel)
        tried = try_out(self._model, config, parallel.layout.tp_size)
        is_whole = self._has_whole_heads(tried)
        self._step = StepState()
        self._step.on_layer = lambda: self.on_layers(1)
        for place, index in enumerate(self.shard.layers):
            path, shape = tried.layers[index]
            whole = WholeHeads(shape, parallel) if is_whole else None
            handle(self._model.get_submodule(path), LayerAttention(shape, place, self._step, whole))
        self._output = tried.output
        self._trunk = self._model.get_submodule(tried.trunk)
        self._forward_trunk = self._trunk.forward
        self._given: Any = None
        vars(self._trunk)["forward"] = self._run_trunk
        self._stage = Stage(self._model, self._trunk, config, parallel)
        self._weights = place_weights(self._model, self._names.tied, device, memory, tried.stacks)
        use_dense_products(self._model)

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `CausalModel.embed`."""
        if not self.layout.is_first_stage:
            raise NBEngineError(f"{self.layout}: tokens are embedded on the first pipeline stage only")
        found: Tensor = self._model.get_input_embeddings()(input_ids)
        return found

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of `step`, without logits."""
        return self.step(input_ids, positions, kv_caches, attn, inputs_embeds).hidden

    __call__ = forward

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
        further: FurtherSteps | None = None,  # noqa: ARG002 (none is taken)
    ) -> StepOutput:
        """See `CausalModel.step`."""
        step, stage = self._step, self._stage
        step.kv_caches, step.metadata = kv_caches, self._metadata_of_layers(attn)
        stage.received = None if inputs_embeds is None else inputs_embeds[None]
        outcome = self._trunk(
            input_ids=input_ids[None] if inputs_embeds is None else None,
            inputs_embeds=stage.received,
            position_ids=positions[None],
            use_cache=False,
        )
        stage.received = None
        if self.layout.is_last_stage:
            return StepOutput(outcome.last_hidden_state[0])
        sent, stage.sent = stage.sent, None
        if sent is None:
            raise NBEngineError(f"{self.layout}: the last layer of the stage has not run")
        return StepOutput(sent[0])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel.compute_logits`."""
        if not self.has_logits:
            raise NBEngineError(f"{self.layout}: the model has no output projection here")
        return self._logits(hidden[None], inputs_embeds=hidden[None])[0]

    def _logits(self, states: Tensor, **named: Tensor) -> Tensor:
        """Return what the class's `forward` makes of the hidden states [sequences, tokens, hidden]."""
        self._given = self._output(last_hidden_state=states)
        try:
            logits: Tensor = self._model(use_cache=False, **named).logits
        finally:
            self._given = None
        return logits

    @property
    def has_logits(self) -> bool:
        """Return whether there is an output projection here."""
        return self.layout.is_last_stage and not self.config.num_labels

    @property
    def lm_head(self) -> object | None:
        """Return the output projection, None on other stages than the last."""
        return self._model.get_output_embeddings() if self.has_logits else None

    @property
    def moe_blocks(self) -> list[SparseMoeBlock]:
        """Return no blocks: every engine core has all experts of a class of transformers."""
        return []

    @property
    def product_instructions(self) -> str | None:
        """Return None: no weight is quantised."""
        return None

    @property
    def pads_single_rows(self) -> bool:
        """Return True: what a class multiplies by itself, as experts, torch sums in another order for one row."""
        return True

    @property
    def is_recordable(self) -> bool:
        """Return False: nobody knows what a class waits for."""
        return False

    @property
    def goes_on(self) -> bool:
        """Return False: a class computes one step at a time."""
        return False

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Return the tied weights: `TransformersFamily.tensor_parts` leaves out what else the model does not use."""
        return frozenset(self._names.tied)

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """See `CausalModel.tied_weights`."""
        return self._names.tied

    @property
    def weights_bytes(self) -> int:
        """Return the memory of the weights in bytes."""
        return sum(weight.nbytes for weight in self._weights.values())

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `CausalModel.weight_slots`."""
        slots: dict[str, WeightSlot] = {}
        for name, weight in self._weights.items():
            slots.update(self._names.slots(name, weight, self._divided.get(name)))
        return slots

    def parameters(self) -> Iterator[Tensor]:
        """Yield every weight once."""
        return iter(self._weights.values())

    def dummy_forward(self) -> None:
        """Do nothing: the experts are not divided among engine cores."""

    def warm_up(self, kernels: Kernels, kv_caches: list[Tensor], max_tokens: int) -> None:
        """Do nothing: there is nothing to compile but the kernels."""

    def forget_addresses(self) -> None:
        """Do nothing: a step looks the weights up."""

    def redivided(self, layout: RankLayout) -> None:
        """Take note of this worker's new place."""
        self.layout = layout

    def _metadata_of_layers(self, attn: Any) -> list[AttentionMetadata]:
        """Return for each layer the metadata of its cache group; a model with one group has them as they are."""
        groups = getattr(attn, "groups", None)
        if groups is None:
            return [attn] * len(self.layer_groups)
        return [groups[group] for group in self.layer_groups]

    def _run_trunk(self, *arguments: Any, **named: Any) -> Any:
        if self._given is not None:
            return self._given
        return self._forward_trunk(*arguments, **named)

    def _has_whole_heads(self, tried: Tried) -> bool:
        """Compare what the class computes with what the configuration has told everyone else; return whether its plan
        leaves every one of several ranks with all heads."""
        config, shape = self.config, tried.layers[0][1]
        computed = (shape.num_heads, shape.num_kv_heads, shape.head_dim, tried.width)
        stated = (self.shard.num_heads, self.shard.num_kv_heads, config.head_dim, config.hidden_size)
        whole = (config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size)
        if computed not in (stated, whole):
            names = "attention heads, key-value heads, numbers in a head and in a hidden state"
            raise ModelLoadError(
                f"{config.architecture} of transformers computes with {computed} {names} on {self.layout}, and config.json "
                f"says {stated}: state num_key_value_heads, head_dim or hidden_size with hf_overrides"
            )
        return computed != stated


class TransformersForSequenceClassification(TransformersForCausalLM):
    """A decoder of transformers with a classification head on the last token in place of its output projection; every
    rank of the last stage has all of the head."""

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, num_labels] of the prompts whose last tokens' hidden states are [N, hidden].

        Raises:
            NBEngineError: this is not the last stage.
        """
        if not self.layout.is_last_stage:
            raise NBEngineError(f"{self.layout}: prompts are classified on the last pipeline stage only")
        states = hidden.to(self.dtype)[:, None]
        # The classes look for the last token that is no padding: here each is the only one of its sequence.
        settings = vars(self._model.config)
        settings["pad_token_id"] = _PADDING
        try:
            return self._logits(
                states, input_ids=torch.full(states.shape[:2], _PADDING + 1, device=self.device)
            )
        finally:
            settings["pad_token_id"] = None
