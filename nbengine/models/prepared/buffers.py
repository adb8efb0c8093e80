"""The memory in which the operations of a prepared step leave numbers for each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.kernels.cpu.decode_plan import WORK_BYTES
from nbengine.kernels.cpu.dense_parts import most_laid_out_bytes
from nbengine.kernels.cpu.largest import PARTS
from nbengine.kernels.cpu.records import RecordLayout
from nbengine.kernels.quantized import SPAN


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of steps: tokens, items of attention for requests of one token, and rows of logits."""

    tokens: int
    items: int
    logits: int

    def grown_for(self, other: StepSize) -> StepSize:
        """Return the powers of two that hold both, so that memory grows only a few times."""
        pairs = ((self.tokens, other.tokens), (self.items, other.items), (self.logits, other.logits))
        return StepSize(*(1 << (max(1, *pair) - 1).bit_length() for pair in pairs))


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The numbers of a token between the projections of attention: `qkv` before queries and keys are normalised and
    turned, `queries` and keys normalised, where those lie elsewhere, and turned (`rotated`), and the results
    (`attended`); and the items that attend to a request's part of the cache, one for each of `kv_heads`. Of several
    layers they are the most that one makes."""

    qkv: int
    queries: int
    rotated: int
    attended: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The tensors, [tokens, ...], in float32 where nothing else is said."""

    query_parts: int
    """2 where queries lie beside gates, else 1."""
    x: Tensor
    """The residual stream."""
    normed: Tensor
    qkv: Tensor
    """Queries, each head with its gate behind it where there are two parts, keys and values."""
    queries: Tensor
    """Queries and keys side by side, where they are not so in `qkv`."""
    rotated: Tensor
    attended: Tensor
    """[tokens, the most numbers of a layer]; each layer's own are `attended_by`."""
    out: Tensor
    """The output of a block."""
    gate_up: Tensor
    gated: Tensor
    records: Tensor
    """The rounded rows of a product's input; see `nbengine.kernels.cpu.products`."""
    gated_records: Tensor
    head_records: Tensor
    """[rows of logits, ...]: those of the output projection's input."""
    layout: RecordLayout
    """The layout of the others."""
    laid_out: Tensor
    """Bytes for the input of a product with dense weights, as it lays it out; see `nbengine.kernels.cpu.dense_parts`."""
    own: Tensor
    """[attention groups, 3, tokens] int64: token ids, positions, slots."""
    work: Tensor
    """The work lists of attention, one for each group; see `nbengine.kernels.cpu.decode_plan`."""
    partials: Tensor
    arrivals: Tensor
    own_logits: Tensor
    """The logits of this rank's part of the vocabulary; `logits` itself for a rank without others."""
    logits: Tensor
    """The logits of all ranks; behind the vocabulary there may be padding."""
    peaks: Tensor
    ids: Tensor
    """The place of each row's largest logit, int64."""
    values: Tensor
    """The largest logits."""

    def attended_by(self, count: int) -> Tensor:
        """Return the memory of `count` results a token, contiguous."""
        return self.attended.flatten()[: len(self.attended) * count].view(-1, count)

    @classmethod
    def make(
        cls,
        size: StepSize,
        attention: AttentionSizes,
        *,
        groups: int,
        query_parts: int,
        mixed: int,
        hidden: int,
        inner: int,
        own_vocab_size: int,
        tp_size: int,
        is_gated_at_once: bool,
        has_dense: bool,
        partial_bytes: int,
        layout: RecordLayout,
        head_record_bytes: int,
    ) -> StepBuffers:
        """Allocate them.

        There are `groups` of layers with plans of attention of their own. A query has `query_parts` times the features
        of a key; recurrent blocks make `mixed` features before their last projection. `hidden`, `inner` and `own_vocab_size` are the features of the residual stream, of feed-forward blocks and
        of the logits, the latter two of each of `tp_size` ranks. Blocks that are gated at once leave no numbers before the gate. Products with
        dense weights need memory, if the model `has_dense`. A partial result of attention
        takes `partial_bytes`. `layout` is that of the rounded rows of layers; one before the output
        projection takes `head_record_bytes`.
        """
        tokens, kv_heads = size.tokens, attention.kv_heads
        widest = max(hidden, attention.attended, mixed)

        def records(columns: int) -> Tensor:
            return torch.empty(tokens, columns // SPAN * layout.bytes, dtype=torch.uint8)

        before_gate = 0 if is_gated_at_once else inner
        logits = torch.empty(size.logits, own_vocab_size * tp_size, dtype=torch.float32)
        own_logits = logits
        if tp_size > 1:
            own_logits = torch.empty(size.logits, own_vocab_size, dtype=torch.float32)
        return cls(
            x=torch.empty(tokens, hidden, dtype=torch.float32),
            normed=torch.empty(tokens, hidden, dtype=torch.float32),
            query_parts=query_parts,
            qkv=torch.empty(tokens, attention.qkv, dtype=torch.float32),
            queries=torch.empty(tokens, attention.queries, dtype=torch.float32),
            rotated=torch.empty(tokens, attention.rotated, dtype=torch.float32),
            attended=torch.empty(tokens, attention.attended, dtype=torch.float32),
            out=torch.empty(tokens, hidden, dtype=torch.float32),
            gate_up=torch.empty(tokens, 2 * before_gate, dtype=torch.float32),
            gated=torch.empty(tokens, before_gate, dtype=torch.float32),
            records=records(widest),
            gated_records=records(inner),
            head_records=torch.empty(size.logits, head_record_bytes, dtype=torch.uint8),
            layout=layout,
            laid_out=torch.empty(
                most_laid_out_bytes(tokens, max(widest, inner)) if has_dense else 0, dtype=torch.uint8
            ),
            own=torch.empty(groups, 3, tokens, dtype=torch.int64),
            work=torch.empty(groups, size.items * WORK_BYTES, dtype=torch.uint8),
            partials=torch.empty(size.items * kv_heads * partial_bytes, dtype=torch.uint8),
            arrivals=torch.zeros(tokens * kv_heads, dtype=torch.int64),
            own_logits=own_logits,
            logits=logits,
            peaks=torch.empty(size.logits, PARTS, dtype=torch.float32),
            ids=torch.empty(size.logits, dtype=torch.int64),
            values=torch.empty(size.logits, dtype=torch.float32),
        )
