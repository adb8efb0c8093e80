"""The operations of a decoder's layers, with the addresses of their operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.distributed.communicator import RankOperations
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.attention_functions import AttentionFunctions
from nbengine.kernels.cpu.backend import set_options, sinks_for
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.decode_plan import DecodePlanArguments, compile_decode_plan
from nbengine.kernels.cpu.layout import AttentionArguments, Span
from nbengine.kernels.cpu.products import compile_gated
from nbengine.kernels.cpu.recurrent_layout import RecurrentArguments
from nbengine.kernels.cpu.row_functions import compile_rows
from nbengine.kernels.cpu.vectors import UNGATED
from nbengine.kernels.cpu.write_kv import TOKENS_PER_ITEM, WriteArguments
from nbengine.models.layers.basic import MergedLinear, RMSNorm
from nbengine.models.layers.decoder_attention import DecoderAttention
from nbengine.models.layers.dense_and_experts import DenseAndExperts
from nbengine.models.layers.latent_attention import LatentAttention
from nbengine.models.layers.mlp import DecoderMLP
from nbengine.models.layers.moe import SharedExpert, SparseMoeBlock
from nbengine.models.layers.norms import WholeHeadsNorm
from nbengine.models.layers.weights import DenseWeight, PackedWeight, Weight
from nbengine.models.prepared.buffers import StepBuffers
from nbengine.models.prepared.experts import ExpertBuffers, ExpertOperations
from nbengine.models.prepared.latent import LatentBuffers, absorb, latent_rows, release
from nbengine.models.prepared.layer_inputs import InputBuffers, InputOperations
from nbengine.models.prepared.products import gated_arguments, layout_of, row_bytes
from nbengine.models.prepared.recurrent import PreparedMixer, RecurrentBuffers, mixing
from nbengine.models.prepared.rows import Operation, row_operation


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer: its heads, functions and options, the group of layers with which it shares a plan, the
    table of its rotary embedding (None: it has none), the name of the function of rows that turns heads, and the
    factors of queries by positions (None: there are none)."""

    heads: int
    kv_heads: int
    head_dim: int
    functions: AttentionFunctions
    options: AttentionOptions
    group: int
    angles: Tensor | None
    turn: str
    factors: Tensor | None


class StepOperations(InputOperations):
    """A list of operations that grows by layers, for up to as many tokens as the buffers hold.

    `add_plans` comes first, and `attends` is set before `add_attention`. `plans` are the places of those that plan
    for each group of layers, `decodes` and `prefills` are the places of those that attend, for requests of one
    token and for others, `writes` of those that write keys and values, `writers` are the layers that do so, by their
    numbers among those with attention, `states` are the places of those on recurrent states, and `layers` of the first
    ones of each layer.
    """

    def __init__(
        self,
        buffers: StepBuffers,
        attends: LayerAttention,
        ranks: RankOperations | None,
        experts: ExpertBuffers | None,
        recurrent: RecurrentBuffers | None,
        latent: LatentBuffers | None,
        inputs: InputBuffers | None,
        residual_scale: float,
    ) -> None:
        super().__init__(buffers, ranks, inputs)
        self.plans: list[int] = []
        self.writes: list[int] = []
        self.writers: list[int] = []
        self.decodes: list[int] = []
        self.prefills: list[int] = []
        self.states: list[int] = []
        self.layers: list[int] = []
        self._query_parts = buffers.query_parts
        self._recurrent = recurrent
        self.attends = attends
        """The attention of the layer that is being added."""
        self._latent = latent
        self._experts = None
        if experts is not None:
            self._experts = ExpertOperations(buffers, experts, self._num_threads)
            self._scores = experts.scores
            self._shared = experts.shared, experts.shared_scores
        self._residual_scale = None
        if residual_scale != 1:
            self._residual_scale = torch.full((buffers.out.shape[1],), residual_scale, dtype=torch.float32)

    def add_plans(self, groups: Sequence[tuple[Span | None, int]]) -> None:
        """Take in the step's batch, for each group of layers with what its rule is, and its number of KV heads."""
        for (span, kv_heads), own, work in zip(groups, self._buffers.own, self._buffers.work, strict=True):
            plan = DecodePlanArguments(
                items=1,
                capacity=own.shape[1],
                kv_heads=kv_heads,
                own=own.data_ptr(),
                work=work.data_ptr(),
            )
            self.plans.append(len(self.operations))
            self.operations.append(Operation(compile_decode_plan(span), plan))

    def add_attention(self, norm: RMSNorm | None, attention: DecoderAttention) -> None:
        """Begin a layer: make the output of the attention block of the residual stream."""
        buffers, own, angles = self._buffers, self.attends, self.attends.angles
        heads, kv_heads, size = own.heads, own.kv_heads, own.head_dim
        qkv, o_proj, keeps = attention.qkv_proj, attention.o_proj, not attention.reads_others
        self.layers.append(len(self.operations))
        self._add_norm_round(norm, weights_of(qkv))
        self._multiply_merged(qkv, buffers.qkv)
        source = buffers.qkv if self._query_parts == 1 else buffers.queries
        if attention.q_norm is not None:
            self._normalise_heads(attention.q_norm, attention.k_norm, source)
        rotated = source
        if angles is not None:
            turned, rotated = heads + kv_heads * keeps, buffers.rotated
            rotate = compile_rows(
                self.attends.turn,
                turned,
                Element.FLOAT32,
                size,
                picked=True,
                turned=angles.shape[-1] % size,
            )
            self.operations.append(row_operation(rotate, source, angles, rotated, picks=self._positions))
        if own.factors is not None:
            queries = rotated[:, : heads * size]
            grow = compile_rows("scale", heads * size, Element.FLOAT32, picked=True)
            factors = own.factors.view(-1, 1)
            self.operations.append(row_operation(grow, queries, factors, queries, picks=self._positions))
        if keeps:
            first_value = (heads * self._query_parts + kv_heads) * size
            values = buffers.qkv[:, first_value : first_value + kv_heads * size]
            if attention.value_norm is not None:
                self._normalise_each(attention.value_norm, kv_heads, values, values)
            self._add_write(rotated[:, heads * size :], values)
        attended = buffers.attended_by(heads * size)
        self._add_attend(rotated, attended)
        if self._query_parts > 1:
            gate = compile_rows("gate_every_other_head", heads, Element.FLOAT32, size)
            self.operations.append(row_operation(gate, buffers.qkv[:, size:], attended, attended))
        self._round_for([o_proj.weight], attended)
        self._multiply(o_proj, buffers.out, attended)
        self._sum_over_ranks(buffers.out)

    def add_latent(self, norm: RMSNorm | None, block: LatentAttention) -> None:
        """Begin a layer: make the output of the block of latent attention of the residual stream."""
        buffers, own, query = self._buffers, self._latent, block.query_latent
        assert own is not None
        self.layers.append(len(self.operations))
        down = weights_of(block.query_proj) if query is None else [query[0].weight]
        self._add_norm_round(norm, [*down, block.latent_proj.weight])
        self._multiply(block.latent_proj, own.projected, self._input)
        if query is not None:
            self._multiply(query[0], own.query_latent, self._input)
            self._normalise(query[1], own.query_latent, own.query_latent)
            self._input = own.query_latent
            self._round_for(weights_of(block.query_proj), own.query_latent)
        self._multiply_merged(block.query_proj, own.queries.flatten(1))
        self.operations.append(latent_rows(block, own, self._positions))
        self.operations.append(absorb(block, own))
        self._add_write(own.rows, None)
        self._add_attend(own.absorbed, own.found)
        self.operations.append(release(block, own, buffers.attended))
        self._round_for([block.o_proj.weight], buffers.attended)
        self._multiply(block.o_proj, buffers.out, buffers.attended)
        self._sum_over_ranks(buffers.out)

    def add_recurrent(self, norm: RMSNorm | None, mixer: PreparedMixer) -> None:
        """Begin a layer: make the output of the recurrent block of the residual stream."""
        assert self._recurrent is not None
        self.layers.append(len(self.operations))
        mixed = self._recurrent.mixed
        self._add_norm_round(norm, weights_of(mixer.in_proj))
        self._multiply_merged(mixer.in_proj, self._recurrent.projected)
        for each in mixing(mixer, self._recurrent):
            if isinstance(each.arguments, RecurrentArguments):
                self.states.append(len(self.operations))
            self.operations.append(each)
        self._round_for([mixer.out_proj.weight], mixed)
        self._multiply(mixer.out_proj, self._buffers.out, mixed)
        self._sum_over_ranks(self._buffers.out)

    def add_mlp(self, norm: RMSNorm | None, mlp: DecoderMLP) -> None:
        """Make the output of the feed-forward block of the residual stream."""
        self._add_norm_round(norm, weights_of(mlp.gate_up_proj))
        self._add_feed_forward(mlp, self._buffers.out)
        self._sum_over_ranks(self._buffers.out)

    def _add_feed_forward(self, mlp: DecoderMLP, out: Tensor) -> None:
        """Make the output of a block of the normalised rows, and of their records."""
        buffers, gate_up, size = self._buffers, mlp.gate_up_proj, mlp.size
        gated = buffers.gated[:, :size]
        if is_gated_at_once(mlp):
            self._add_gated(gate_up, mlp.activation)
        else:
            self._multiply_merged(gate_up, buffers.gate_up)
            gate = compile_rows(mlp.activation, size, Element.FLOAT32)
            other = buffers.gate_up[:, 0 if mlp.activation in UNGATED else size :]
            self.operations.append(row_operation(gate, buffers.gate_up, other, gated))
            self._round_for([mlp.down_proj.weight], gated, buffers.gated_records)
        self._multiply(mlp.down_proj, out, gated, buffers.gated_records)

    def add_experts(self, norm: RMSNorm | None, block: SparseMoeBlock) -> None:
        """Make the output of the block with experts of the residual stream."""
        assert self._experts is not None
        shared, buffers, weights = block.shared, self._buffers, [block.router.weight]
        if shared is not None:
            gate = [] if shared.gate is None else [shared.gate.weight]
            weights.extend([*weights_of(shared.mlp.gate_up_proj), *gate])
        self._add_norm_round(norm, weights, has_experts=True)
        self._add_scores(block)
        self.operations.extend(self._experts.of(block))
        if shared is not None:
            self._add_shared(shared)
        self._sum_over_ranks(buffers.out)

    def add_dense_and_experts(self, block: DenseAndExperts) -> None:
        """Make the output of a dense block and experts side by side of the residual stream."""
        assert self._experts is not None
        buffers, experts, (dense, _) = self._buffers, block.experts, self._shared
        x, normed, out = buffers.x, buffers.normed, buffers.out
        self._add_norm_round(block.norm, weights_of(block.mlp.gate_up_proj))
        self._add_feed_forward(block.mlp, dense)
        self._sum_over_ranks(dense)
        self._normalise(block.after, dense, dense)
        self._normalise(experts.router_norm, x, normed)
        self._round_for([experts.router.weight], normed)
        self._add_scores(experts)
        self._scale(self._scores, torch.tensor([experts.logit_factor], dtype=torch.float32))
        self._normalise(experts.norm, x, normed)
        self._round(normed, buffers.records, buffers.layout)
        self.operations.extend(self._experts.of(experts))
        self._sum_over_ranks(out)
        self._normalise(block.after_experts, out, out)
        self._add(out, dense, repeats=False)

    def _add_scores(self, block: SparseMoeBlock) -> None:
        """Make the scores of experts of the normalised rows, or of their records."""
        assert self._experts is not None
        buffers, weight = self._buffers, block.router.weight
        if isinstance(weight, PackedWeight):
            self._product(weight, self._scores, buffers.normed, buffers.records)
        self.operations.extend(self._experts.scores(block))

    def _add_shared(self, block: SharedExpert) -> None:
        """Add the output of the block that all tokens go through."""
        assert self._experts is not None
        buffers, (out, scores) = self._buffers, self._shared
        self._add_feed_forward(block.mlp, out)
        if block.gate is not None:
            assert isinstance(block.gate.weight, DenseWeight)
            self.operations.append(self._experts.score(block.gate.weight.tensor, scores))
            scale = compile_rows("sigmoid_scale", out.shape[1], Element.FLOAT32)
            self.operations.append(row_operation(scale, out, scores, out))
        self._add(buffers.out, out, repeats=False)

    def end_block(self, norm: RMSNorm | None) -> None:
        """Normalise and scale the output of a block, as far as the model does, before it is added to the residual
        stream."""
        out = self._buffers.out
        if norm is not None:
            self._normalise(norm, out, out)
        if self._residual_scale is not None:
            multiply = compile_rows("multiply", out.shape[1], Element.FLOAT32)
            self.operations.append(row_operation(multiply, out, self._residual_scale, out, repeats=True))

    def add_norm(self, norm: RMSNorm | None) -> None:
        """Add the last block's output to the residual stream, and normalise that, on the last stage."""
        self._add_pending()
        if norm is not None:
            self._normalise(norm, self._buffers.x, self._buffers.normed)

    def _normalise_heads(
        self, query: RMSNorm | WholeHeadsNorm, key: RMSNorm | WholeHeadsNorm | None, target: Tensor
    ) -> None:
        """Normalise queries, and keys if there are any; where queries lie beside their gates, bring them together in
        `target`."""
        own, parts = self.attends, self._query_parts
        source, size, first = self._buffers.qkv, own.head_dim, own.heads * own.head_dim
        if isinstance(query, WholeHeadsNorm):
            assert isinstance(key, WholeHeadsNorm)
            for norm, x in ((query, target[:, :first]), (key, target[:, first:])):
                function = compile_rows("rms_norm", len(norm.weight), Element.FLOAT32)
                self.operations.append(row_operation(function, x, norm.weight, x, repeats=True, eps=norm.eps))
            return
        name = "rms_norm_heads" if parts == 1 else "rms_norm_every_other_head"
        normalise = compile_rows(name, own.heads, Element.FLOAT32, size)
        self.operations.append(
            row_operation(normalise, source, query.weight, target, repeats=True, eps=query.eps)
        )
        if isinstance(key, RMSNorm):
            self._normalise_each(key, own.kv_heads, source[:, first * parts :], target[:, first:])

    def _add_write(self, keys: Tensor, values: Tensor | None) -> None:
        """Write keys and values, or latents, to their slots."""
        write = WriteArguments(
            kv_heads=self.attends.kv_heads,
            key=keys.data_ptr(),
            key_stride=row_bytes(keys),
            value=0 if values is None else values.data_ptr(),
            value_stride=0 if values is None else row_bytes(values),
            slots=self._buffers.own[self.attends.group, 2].data_ptr(),
        )
        self.writes.append(len(self.operations))
        self.writers.append(len(self.decodes))
        self.operations.append(Operation(self.attends.functions.write, write, TOKENS_PER_ITEM))

    def _add_attend(self, queries: Tensor, output: Tensor) -> None:
        buffers, own = self._buffers, self.attends
        for places, function in (
            (self.decodes, own.functions.decode),
            (self.prefills, own.functions.prefill),
        ):
            attend = AttentionArguments(
                kv_heads=own.kv_heads,
                query=queries.data_ptr(),
                query_stride=row_bytes(queries),
                output=output.data_ptr(),
                work=buffers.work[own.group].data_ptr(),
                partials=buffers.partials.data_ptr(),
                arrivals=buffers.arrivals.data_ptr(),
            )
            set_options(attend, own.options, sinks_for(own.options, own.heads))
            places.append(len(self.operations))
            self.operations.append(Operation(function, attend, has_tokens=False))

    def _add_gated(self, gate_up: MergedLinear, activation: str) -> None:
        buffers, (_, weight) = self._buffers, gate_up.runs[0]
        assert isinstance(weight, PackedWeight)
        rows = buffers.records, buffers.gated_records
        arguments = gated_arguments(weight, activation, self._num_threads, *rows)
        arguments.records = buffers.records.data_ptr()
        arguments.output = buffers.gated_records.data_ptr()
        self.operations.append(
            Operation(compile_gated(weight.form, layout_of(weight), activation), arguments)
        )


def is_gated_at_once(mlp: DecoderMLP) -> bool:
    """Return whether gate and other projection are one product with quantised weights, whose outcome is gated and rounded
    where it is made: so the weights that it meets next are quantised, too."""
    runs = mlp.gate_up_proj.runs
    weights = [weight for _, weight in runs] + [mlp.down_proj.weight]
    is_one = len(runs) == 1 and mlp.gate_up_proj.bias is None
    return is_one and all(isinstance(weight, PackedWeight) for weight in weights)


def weights_of(merged: MergedLinear) -> list[Weight]:
    """Return the weights of a product, one for each run of parts."""
    return [weight for _, weight in merged.runs]
