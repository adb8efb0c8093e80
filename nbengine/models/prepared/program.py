"""The steps of a decoder, up to some number of tokens, as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.cpu.layout import DECODE_PART, AttentionArguments
from nbengine.kernels.cpu.program import Operations, Program, places_of
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.cpu.write_kv import WriteArguments
from nbengine.models.further_steps import MOST_FURTHER_STEPS, FurtherSteps
from nbengine.models.layers.basic import RMSNorm
from nbengine.models.layers.decoder_layer import DecoderLayer
from nbengine.models.layers.dense_and_experts import DenseAndExperts
from nbengine.models.layers.latent_attention import LatentAttention
from nbengine.models.layers.layer_inputs import InputLayer
from nbengine.models.layers.mlp import DecoderMLP
from nbengine.models.layers.moe import SparseMoeBlock
from nbengine.models.layers.weights import Weight
from nbengine.models.prepared.attention import (
    attentions_of,
    groups_of,
    query_parts_of,
    sizes_of,
)
from nbengine.models.prepared.buffers import StepBuffers, StepSize
from nbengine.models.prepared.experts import ExpertBuffers
from nbengine.models.prepared.latent import LatentBuffers
from nbengine.models.prepared.layer_inputs import InputBuffers
from nbengine.models.prepared.next_steps import NextSteps
from nbengine.models.prepared.operations import LayerAttention, StepOperations, is_gated_at_once
from nbengine.models.prepared.products import record_bytes
from nbengine.models.prepared.recurrent import PreparedMixer, RecurrentBuffers, RecurrentGroup
from nbengine.models.step_output import StepOutput

if TYPE_CHECKING:
    from nbengine.models.prepared.model import PreparedModel

MOST_LOGITS = 64
"""Rows of logits that a prepared step computes: with more, the calls around the product take little of the time,
and the logits much memory."""
_ITEMS, _TOKENS = 1, 2
"""The places of the number of items and of tokens among an operation's arguments."""
_ATTEND_AT, _WRITE_AT = places_of(AttentionArguments), places_of(WriteArguments)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outcome of a step of some number of tokens, where the next one overwrites it."""

    output: StepOutput
    ids: memoryview
    """The place of each row's largest logit, negative where some logit is not finite."""
    is_padded: bool
    """The rows of logits are longer than the vocabulary, since the ranks do not divide it."""


class StepProgram:
    """The operations of a decoder for steps of up to a size, on as many threads as torch has now."""

    def __init__(
        self, model: PreparedModel, size: StepSize, kernels: CpuKernels, kv_caches: Sequence[Any]
    ) -> None:
        self.size = size
        self.num_threads = torch.get_num_threads()
        first = attentions_of(model)[0]
        mixers = mixers_of(model)
        recurrent = RecurrentBuffers.make(mixers[0], size.tokens) if mixers else None
        self._groups, attends = groups_of(model, kernels, kv_caches)
        self._head = head_of(model)
        self._buffers = buffers = _buffers_of(
            model,
            size,
            len(self._groups),
            max(group.functions.decode_shape.partial_bytes for group in self._groups),
            0 if recurrent is None else recurrent.mixed.shape[1],
        )
        ranks = model.tp.operations()
        self._operations = operations = StepOperations(
            buffers,
            attends[0],
            ranks,
            ExpertBuffers.make(model.moe_blocks, size.tokens, buffers.layout),
            recurrent,
            LatentBuffers.make(first, size.tokens) if isinstance(first, LatentAttention) else None,
            None if model.layer_inputs is None else InputBuffers.make(model.layer_inputs, size.tokens),
            model.config.residual_scale,
        )
        operations.add_plans([(group.span, group.kv_heads) for group in self._groups])
        self.embeds = _add_all(model, operations, attends)
        self._hidden = buffers.x if model.norm is None else buffers.normed
        self._vocab_size = model.config.vocab_size
        if self._head is not None:
            operations.add_logits(self._head, model.config)
        if goes_on(model):
            operations.add_passages(MOST_FURTHER_STEPS, self._vocab_size)
        self._program = Program(
            [(each.function, each.arguments) for each in operations.operations],
            None if ranks is None else ranks.finish,
        )
        self._with_tokens = np.flatnonzero([each.has_tokens for each in operations.operations])
        per_item = np.array([each.tokens_per_item for each in operations.operations])
        self._sized = np.flatnonzero(per_item)
        self._per_item = per_item[self._sized]
        self._num_tokens = 0
        for group, place in zip(self._groups, operations.plans, strict=True):
            group.set_up(self._program, operations, place)
        self._recurrent = RecurrentGroup(mixers, operations.states, self._program) if mixers else None
        self._next: NextSteps | None = None
        if operations.passages:
            block_size = self._groups[0].functions.decode_shape.block_size
            self._next = NextSteps(self._program, operations, block_size)
        self._kv_caches: list[Any] = []
        self._runs: dict[tuple[bool, bool, bool], list[Operations]] = {}
        self._outputs: dict[int, _Outputs] = {}
        self._taken: tuple[AttentionMetadata, Tensor, Tensor] | None = None
        """The inputs whose places the operations have."""

    def fits(self, attn: AttentionMetadata) -> bool:
        """Return whether this program can run a step, on as many threads as torch has now."""
        size, tokens = self.size, attn.num_tokens
        return (
            tokens <= size.tokens
            and _num_items(attn) <= size.items
            and _num_logits(attn) <= size.logits
            and self.num_threads == torch.get_num_threads()
        )

    def set_hidden(self, x: Tensor) -> None:
        """Begin with hidden states x [T, hidden]."""
        self._buffers.x[: len(x)].copy_(x)

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Any],
        groups: Sequence[Any],
        on_layers: Callable[[int], None],
        further: FurtherSteps | None = None,
    ) -> StepOutput:
        """Return the outcome of a step, or of the last of those that have followed; `groups` has the metadata of each
        cache group, and `on_layers` hears of layers as in the eager path."""
        if kv_caches is not self._kv_caches:
            self._use(kv_caches)
        attn: AttentionMetadata = groups[self._groups[0].cache_group]
        if attn.num_tokens != self._num_tokens:
            self._set_tokens(attn.num_tokens)
        has_others = attn.num_decodes < attn.num_reqs
        self._take_in(attn, input_ids, positions, groups)
        if has_others:
            for group in self._groups:
                group.plan_prefill(groups[group.cache_group], self._program)
        has_logits = self._head is not None and not has_others and attn.num_tokens <= self.size.logits
        if self._recurrent is not None:
            self._recurrent.take_in(groups[-1])
        run = self._run_of(attn.num_decodes > 0, has_others, has_logits)
        steps = 1
        if further is not None and self._next is not None and has_logits:
            self._next.run(run[0], further, self._attended(groups), input_ids, positions)
            steps += further.taken
        else:
            for operations in run:
                self._program.run(operations)
                if has_others:
                    on_layers(1)
        if not has_others:
            on_layers(steps * len(self._operations.layers))
        return self._output(attn.num_tokens, has_logits)

    def _take_in(
        self, attn: AttentionMetadata, input_ids: Tensor, positions: Tensor, groups: Sequence[Any]
    ) -> None:
        """Tell the operations where a step's inputs lie. Those of the steps that there are most of come as the same
        objects, with other contents."""
        taken = self._taken
        if taken is not None and taken[0] is attn and taken[1] is input_ids and taken[2] is positions:
            return
        self._taken = attn, input_ids, positions
        if self._next is not None:
            self._next.forget()
        ids = input_ids.data_ptr() if self.embeds else 0
        for group in self._groups:
            group.take_in(groups[group.cache_group], ids, positions)

    def _attended(self, groups: Sequence[Any]) -> list[AttentionMetadata]:
        """Return the metadata of the cache groups that have blocks, each once."""
        return [groups[number] for number in sorted({group.cache_group for group in self._groups})]

    def _output(self, tokens: int, has_logits: bool) -> StepOutput:
        if not has_logits:
            return StepOutput(self._hidden[:tokens])
        made = self._outputs.get(tokens)
        if made is None:
            made = self._outputs[tokens] = self._outputs_of(tokens)
        output = made.output
        largest = output.largest if min(made.ids) >= 0 else None
        if made.is_padded:
            assert output.logits is not None
            return StepOutput(output.hidden, output.logits.contiguous(), largest)
        return output if largest is not None else StepOutput(output.hidden, output.logits)

    def _outputs_of(self, tokens: int) -> _Outputs:
        buffers = self._buffers
        logits, ids = buffers.logits[:tokens, : self._vocab_size], buffers.ids[:tokens]
        output = StepOutput(self._hidden[:tokens], logits, (ids, buffers.values[:tokens]))
        return _Outputs(output, ids.numpy().data, not logits.is_contiguous())

    def _run_of(self, has_decodes: bool, has_others: bool, has_logits: bool) -> list[Operations]:
        """Return the operations of a kind of step: all at once, or layer by layer where that takes long."""
        kind = has_decodes, has_others, has_logits
        if kind not in self._runs:
            made = self._operations
            left_out = {made.draw, *made.passages, *(() if has_decodes else made.decodes)}
            left_out.update(() if has_others else made.prefills)
            left_out.update(() if has_logits else made.logits)
            starts = [0, *made.layers[1:], len(made.operations)] if has_others else [0, len(made.operations)]
            self._runs[kind] = [
                self._program.some([place for place in range(start, stop) if place not in left_out])
                for start, stop in pairwise(starts)
            ]
        return self._runs[kind]

    def _set_tokens(self, count: int) -> None:
        words = self._program.arguments
        words[self._with_tokens, _TOKENS] = count
        words[self._sized, _ITEMS] = -(-count // self._per_item)
        self._num_tokens = count

    def _use(self, kv_caches: list[Any]) -> None:
        """Write the addresses of the caches into the operations; `PreparedSteps.forget` comes before they are
        freed."""
        self._kv_caches = kv_caches
        pages = [cache for cache in kv_caches if isinstance(cache, Tensor)]
        if self._recurrent is not None:
            self._recurrent.use([cache for cache in kv_caches if not isinstance(cache, Tensor)])
        keys: NDArray[np.int64] = np.array([cache.data_ptr() for cache in pages], np.int64)
        values = keys
        if len(pages[0]) > 1:
            values = keys + pages[0].stride(0) * pages[0].element_size()
        words, made = self._program.arguments, self._operations
        readers = range(len(pages))
        for places, layers, at in (
            (made.writes, made.writers, _WRITE_AT),
            (made.decodes, readers, _ATTEND_AT),
            (made.prefills, readers, _ATTEND_AT),
        ):
            words[places, at["key_cache"]] = keys[layers]
            words[places, at["value_cache"]] = values[layers]


def size_of(attn: AttentionMetadata) -> StepSize:
    """Return the size that a program needs for a step."""
    return StepSize(attn.num_tokens, _num_items(attn), _num_logits(attn))


def _num_items(attn: AttentionMetadata) -> int:
    return attn.num_decodes * -(-attn.max_seq_len // DECODE_PART)


def _num_logits(attn: AttentionMetadata) -> int:
    return attn.num_tokens if attn.num_decodes == attn.num_reqs and attn.num_tokens <= MOST_LOGITS else 0


def head_of(model: PreparedModel) -> Weight | None:
    """Return the output projection, if it is there and an operation's, and its outcome the logits."""
    weight = None if model.lm_head is None else model.lm_head.rows.weight
    return weight if weight is not None and weight.is_operand else None


def goes_on(model: PreparedModel) -> bool:
    """Return whether steps can follow each other in one run: from token ids to logits, all is done by operations, and
    none of them waits for another process."""
    embedding = model.embed_tokens
    is_whole = embedding is not None and embedding.weight.is_operand
    return is_whole and head_of(model) is not None and model.layout.tp_size == 1


def mixers_of(model: PreparedModel) -> list[PreparedMixer]:
    """Return the recurrent blocks of a stage that `PreparedSteps.covers`."""
    found = (layer.mixer for layer in model.layers)
    return [mixer for mixer in found if isinstance(mixer, PreparedMixer)]


def _buffers_of(
    model: PreparedModel, size: StepSize, groups: int, partial_bytes: int, mixed: int
) -> StepBuffers:
    attentions, mlps = attentions_of(model), [layer.mlp for layer in model.layers]
    first = attentions[0]
    head = head_of(model)
    shared = [mlp.shared.mlp for mlp in mlps if isinstance(mlp, SparseMoeBlock) and mlp.shared is not None]
    beside = [mlp.mlp for mlp in mlps if isinstance(mlp, DenseAndExperts)]
    blocks = [*(mlp for mlp in mlps if isinstance(mlp, DecoderMLP)), *shared, *beside]
    if isinstance(first, LatentAttention):
        mixed = first.latent.query_rank or 0
    return StepBuffers.make(
        size,
        sizes_of(attentions),
        groups=groups,
        query_parts=query_parts_of(first),
        mixed=mixed,
        hidden=model.config.hidden_size,
        inner=max((block.size for block in blocks), default=0),
        own_vocab_size=0 if head is None else head.shape[0],
        tp_size=model.tp.size,
        is_gated_at_once=all(map(is_gated_at_once, blocks)),
        has_dense=model.dtype.itemsize == 2,
        partial_bytes=partial_bytes,
        layout=RecordLayout(model.activation_bits),
        head_record_bytes=0 if head is None else record_bytes(head),
    )


def _add_all(
    model: PreparedModel,
    operations: StepOperations,
    attends: list[LayerAttention],
) -> bool:
    """Add everything up to the hidden states; return whether that begins with the embedding."""
    embedding = model.embed_tokens
    embeds = embedding is not None and embedding.weight.is_operand
    if embeds:
        assert embedding is not None
        operations.add_embedding(embedding, model.embedding_scale)
    if model.layer_inputs is not None:
        operations.add_inputs(model.layer_inputs)
    rest = iter(attends)
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, PreparedMixer):
            operations.add_recurrent(_norm(layer.before_attention), mixer)
        else:
            operations.attends = next(rest)
            if isinstance(mixer, LatentAttention):
                operations.add_latent(_norm(layer.before_attention), mixer)
            else:
                operations.add_attention(_norm(layer.before_attention), layer.self_attn)
        operations.end_block(_norm(layer.after_attention))
        if layer.mlp is not None:
            _add_feed_forward(operations, layer)
        if isinstance(layer, InputLayer):
            operations.end_layer(layer)
    operations.add_norm(_norm(model.norm))
    return embeds


def _add_feed_forward(operations: StepOperations, layer: DecoderLayer) -> None:
    mlp = layer.mlp
    if isinstance(mlp, DecoderMLP):
        operations.add_mlp(_norm(layer.before_mlp), mlp)
    elif isinstance(mlp, DenseAndExperts):
        operations.add_dense_and_experts(mlp)
    else:
        assert isinstance(mlp, SparseMoeBlock)
        operations.add_experts(_norm(layer.before_mlp), mlp)
    operations.end_block(_norm(layer.after_mlp))


def _norm(norm: object) -> RMSNorm | None:
    """Return a norm of a model that `PreparedSteps.covers`, if it is there."""
    assert norm is None or isinstance(norm, RMSNorm)
    return norm
