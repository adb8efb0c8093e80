"""A decoder's steps, prepared as one list of operations.

From token ids to logits a step of one token a request is one call: what Python and torch would do around each of
its operations takes several times as long as the operations of a small model. The numbers are those of the eager
path, bit for bit, since the operations are the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.quantized import LANES, SPAN
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.further_steps import FurtherSteps
from nbengine.models.layers.decoder_attention import DecoderAttention
from nbengine.models.layers.decoder_layer import DecoderLayer
from nbengine.models.layers.dense_and_experts import DenseAndExperts
from nbengine.models.layers.gated_convolution import GatedConvolution
from nbengine.models.layers.gated_delta_net import GatedDeltaNet
from nbengine.models.layers.latent_attention import LatentAttention
from nbengine.models.layers.layer_inputs import InputLayer
from nbengine.models.layers.mamba2 import Mamba2Mixer
from nbengine.models.layers.mlp import DecoderMLP
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.norms import WholeHeadsNorm
from nbengine.models.layers.weights import Weight
from nbengine.models.step_output import StepOutput

if TYPE_CHECKING:
    from nbengine.kernels.cpu.backend import CpuKernels
    from nbengine.models.prepared.model import PreparedModel
    from nbengine.models.prepared.program import StepProgram

GATED = ("silu", "gelu_tanh", "relu2")
"""The activations of feed-forward blocks that the operations know."""

USUAL_TOKENS, USUAL_ITEMS, USUAL_LOGITS = 512, 256, 8
"""The size of steps that are prepared at the start; larger ones are prepared when they come."""


class PreparedSteps:
    """The prepared steps of a decoder that `covers` is true of."""

    def __init__(self, model: PreparedModel) -> None:
        self._model = model
        self._first = next(place for place, layer in enumerate(model.layers) if not layer.is_recurrent)
        """The place of the first layer with attention."""
        self._cache_group = model.layer_groups[self._first]
        self._program: StepProgram | None = None

    @staticmethod
    def covers(model: PreparedModel) -> bool:
        """Return whether steps of a model can be prepared: on a CPU, with every matrix of a layer quantised or of 16
        bits, those of experts quantised and alike, and by ranks that share memory. All ranks of a stage give the same
        answer, since they exchange the same numbers then."""
        if model.device.type != "cpu" or model.hidden_dtype is not torch.float32:
            return False
        if not model.layers or not _is_plain(model.config):
            return False
        if all(layer.is_recurrent for layer in model.layers) or not _are_inputs_covered(model):
            return False
        if not all(_is_covered(layer, model.config.hidden_size) for layer in model.layers):
            return False
        return model.layout.tp_size == 1 or model.tp.operations() is not None

    @property
    def goes_on(self) -> bool:
        """Return whether steps can follow each other at once."""
        from nbengine.models.prepared.program import goes_on

        return goes_on(self._model)

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Any],
        attn: AttentionMetadata | StepMetadata,
        inputs_embeds: Tensor | None,
        further: FurtherSteps | None = None,
    ) -> StepOutput | None:
        """Return what `DecoderForCausalLM.step` makes of a batch, in tensors that the next step overwrites; None:
        the attention is not that of this device, or embeddings are given where the step looks them up."""
        groups = attn.groups if isinstance(attn, StepMetadata) else (attn,)
        first: AttentionMetadata = groups[self._cache_group]
        if first.kernels.name != "cpu":
            return None
        program = self._program_for(first, kv_caches)
        if program.embeds and inputs_embeds is not None:
            return None
        if not program.embeds:
            program.set_hidden(self._model.embed(input_ids) if inputs_embeds is None else inputs_embeds)
        return program.run(input_ids, positions, kv_caches, groups, self._model.on_layers, further)

    def warm_up(self, kernels: CpuKernels, kv_caches: list[Any], max_tokens: int) -> None:
        """Prepare steps of up to `max_tokens`, or of usual size, so that the first ones do not wait for it."""
        from nbengine.models.prepared.buffers import StepSize
        from nbengine.models.prepared.program import StepProgram

        size = StepSize(min(max_tokens, USUAL_TOKENS), USUAL_ITEMS, USUAL_LOGITS)
        self._program = StepProgram(self._model, size.grown_for(size), kernels, kv_caches)

    def forget(self) -> None:
        """Forget what was prepared: the weights are about to lie elsewhere."""
        self._program = None

    def _program_for(self, attn: AttentionMetadata, kv_caches: list[Any]) -> StepProgram:
        program = self._program
        if program is not None and program.fits(attn):
            return program
        # Models on other devices do without llvmlite.
        from nbengine.models.prepared.program import StepProgram, size_of

        size = size_of(attn)
        kernels: CpuKernels = attn.kernels  # type: ignore[assignment]
        grown = size if program is None else program.size
        # The old one's memory is given back first.
        self._program = program = None
        self._program = StepProgram(self._model, grown.grown_for(size), kernels, kv_caches)
        return self._program


def _is_plain(config: DecoderConfig) -> bool:
    """Return whether there is nothing around the blocks, nor in their norms and rotary embedding, that the
    operations do not do."""
    return config.clip_qkv is None and not config.turned_norm and config.norm_kind in ("rms", "rms_one")


def _are_inputs_covered(model: PreparedModel) -> bool:
    """Return whether there are operations for what layers take of tokens beside the residual stream, if they do."""
    inputs, embedding = model.layer_inputs, model.embed_tokens
    if inputs is None:
        return not model.config.layer_inputs
    if embedding is None or not embedding.weight.is_operand:
        return False
    return _Needs([inputs.size], [inputs.embedding.weight, inputs.projection.weight]).are_met()


def _is_covered(layer: DecoderLayer, hidden_size: int) -> bool:
    mixer, mlp = layer.mixer, layer.mlp
    # A family may have layers of its own.
    if type(layer) not in (DecoderLayer, InputLayer):
        return False
    needs = _Needs([hidden_size], [])
    if isinstance(layer, InputLayer) and layer.gate is not None:
        if layer.activation not in GATED:
            return False
        needs.sizes.append(layer.gate.weight.shape[0])
        needs.weights.extend([layer.gate.weight, layer.out.weight])
    if type(mixer) is DecoderAttention:
        if not _is_attention_covered(mixer, needs):
            return False
    elif type(mixer) is LatentAttention:
        if not mixer.is_compiled:
            return False
        latent, query = mixer.latent, mixer.query_latent
        turned = latent.rope_dim if mixer.rotary.is_interleaved else latent.rope_dim // 2
        needs.sizes.extend([latent.rank, turned, latent.query_rank or 0])
        needs.weights.extend(
            [mixer.latent_proj.weight, mixer.o_proj.weight, *(weight for _, weight in mixer.query_proj.runs)]
        )
        needs.weights.extend([] if query is None else [query[0].weight])
    elif type(mixer) is GatedDeltaNet:
        if mixer.is_reordered:
            return False
        needs.sizes.extend([mixer.rule.value_dim, mixer.inner])
        needs.weights.extend([mixer.out_proj.weight, *(weight for _, weight in mixer.in_proj.runs)])
    elif type(mixer) is Mamba2Mixer:
        if mixer.norm.is_shared:
            return False
        needs.sizes.extend([mixer.inner, mixer.inner // mixer.groups])
        needs.weights.extend([mixer.out_proj.weight, *(weight for _, weight in mixer.in_proj.runs)])
    elif type(mixer) is GatedConvolution:
        needs.sizes.append(mixer.channels)
        needs.weights.extend([mixer.out_proj.weight, *(weight for _, weight in mixer.in_proj.runs)])
    else:
        return False
    if mlp is None:
        return needs.are_met()
    if type(mlp) is DenseAndExperts:
        if not _is_dense_covered(mlp.mlp, needs) or not _are_covered(mlp.experts, needs):
            return False
    elif type(mlp) is DecoderMLP:
        if not _is_dense_covered(mlp, needs):
            return False
    elif not isinstance(mlp, SparseMoeBlock) or layer.before_mlp is None or not _are_covered(mlp, needs):
        return False
    return needs.are_met()


def _is_dense_covered(mlp: DecoderMLP, needs: _Needs) -> bool:
    needs.sizes.append(mlp.size)
    needs.weights.extend([mlp.down_proj.weight, *(weight for _, weight in mlp.gate_up_proj.runs)])
    return mlp.activation in GATED


@dataclass(frozen=True, slots=True)
class _Needs:
    """The sizes that vectors must divide, and the weights for which there must be operations."""

    sizes: list[int]
    weights: list[Weight]

    def are_met(self) -> bool:
        return all(weight.is_operand for weight in self.weights) and not any(
            size % LANES for size in self.sizes
        )


def _is_attention_covered(attention: DecoderAttention, needs: _Needs) -> bool:
    sinks = attention.attention.options.sinks
    if sinks is not None and not (sinks.dtype is torch.float32 and sinks.is_contiguous()):
        return False
    norms = [norm for norm in (attention.q_norm, attention.k_norm) if isinstance(norm, WholeHeadsNorm)]
    if norms and (attention.is_gated or not all(norm.is_compiled for norm in norms)):
        return False
    # The norms of heads bring queries together where gates lie between them.
    if attention.is_gated and attention.q_norm is None:
        return False
    size = attention.attention.head_dim
    turned = 0 if attention.rotary is None else attention.rotary.size
    needs.sizes.extend([turned // 2, size // 2 if turned == size else size - turned])
    needs.weights.extend([attention.o_proj.weight, *(weight for _, weight in attention.qkv_proj.runs)])
    return True


def _are_covered(block: SparseMoeBlock, needs: _Needs) -> bool:
    if block.shared is not None:
        mlp = block.shared.mlp
        if len(mlp.gate_up_proj.runs) != 1:
            return False
        needs.sizes.extend([mlp.size, block.hidden_size])
        needs.weights.extend([mlp.down_proj.weight, *(weight for _, weight in mlp.gate_up_proj.runs)])
    return (
        block.routing is not None
        and not block.moe.weighs_inputs
        and (block.moe.clamped is not None or block.moe.hidden_act in GATED)
        and block.is_alone
        and block.are_alike()
        and len(block.experts.shard.inner) % SPAN == 0
    )
