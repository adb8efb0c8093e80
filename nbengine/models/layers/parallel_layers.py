"""The building blocks of a decoder whose heads, inner features and vocabulary are divided among ranks.

Shoeybi et al., 2019, Megatron-LM: the first projection of a pair is divided by its outputs, the second one by
its inputs, so that one sum over the ranks follows each pair. For a rank without others every block is the
undivided one and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.layout import RankLayout
from nbengine.models.layers.basic import Linear, MergedLinear, Rows
from nbengine.models.layers.weights import PackedWeight, Place, Slots, WeightSlot
from nbengine.models.sharding import DecoderShard


class MergedColumnParallelLinear(MergedLinear):
    """Several projections of one input, of each of which this rank computes its share of the output
    features."""

    __slots__ = ()

    def __init__(
        self,
        in_features: int,
        projections: Sequence[tuple[str, int]],
        *,
        layout: RankLayout,
        bias: bool,
        place: Place,
    ) -> None:
        """Allocate this rank's rows; `projections` are names and undivided output features, which tp_size
        divides."""
        parts = [
            Rows(name, size // layout.tp_size, size, layout.tp_rank * (size // layout.tp_size))
            for name, size in projections
        ]
        super().__init__(in_features, parts, bias=bias, place=place)


class QKVParallelLinear(MergedLinear):
    """The query, key and value projections for this rank's heads."""

    __slots__ = ()

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        *,
        total_num_heads: int,
        total_num_kv_heads: int,
        shard: DecoderShard,
        layout: RankLayout,
        bias: bool,
        place: Place,
        query_parts: int = 1,
        has_keys: bool = True,
    ) -> None:
        """Allocate this rank's rows; `shard` is its part of a decoder with `total_num_heads` and
        `total_num_kv_heads`. A query head has `query_parts` times the rows of a key head. A layer may have queries
        alone."""
        kv = (shard.num_kv_heads * head_dim, total_num_kv_heads * head_dim, shard.first_kv_head * head_dim)
        rows = shard.num_heads * head_dim * query_parts
        parts = [
            Rows("q_proj", rows, total_num_heads * head_dim * query_parts, layout.tp_rank * rows),
            *([Rows("k_proj", *kv), Rows("v_proj", *kv)] if has_keys else []),
        ]
        super().__init__(hidden_size, parts, bias=bias, place=place)


class RowParallelLinear(Linear):
    """A projection of which this rank has its share of the input features; the ranks' products are summed.

    Only the first rank has the bias, so that the sum has it once.
    """

    __slots__ = ("_all_reduce", "_full_shape", "_start")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parallel: ParallelState,
        bias: bool,
        place: Place,
    ) -> None:
        """Allocate this rank's columns; `in_features` are undivided, and tp_size divides them."""
        layout = parallel.layout
        own = in_features // layout.tp_size
        self._full_shape = (out_features, in_features)
        self._start = layout.tp_rank * own
        self.weight = place.matrix(out_features, own, place.format(own, self._start))
        self.bias = place.vector(out_features) if bias and layout.tp_rank == 0 else None
        self._all_reduce = parallel.tp.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        return self._all_reduce(self.weight.linear(x, self.bias))

    def slots(self, prefix: str) -> Slots:
        """Yield the weight's columns of this rank, and the bias where it is held, under the checkpoint's
        names."""
        yield f"{prefix}.weight", self.weight.slot(self._full_shape, 1, self._start)
        if self.bias is not None:
            yield f"{prefix}.bias", WeightSlot.whole(self.bias)


def row_parallel_linear(
    in_features: int,
    out_features: int,
    *,
    parallel: ParallelState,
    bias: bool,
    place: Place,
) -> Linear:
    """Make a `RowParallelLinear`, or the plain product where there is nothing to sum over."""
    if parallel.layout.tp_size == 1:
        return Linear(in_features, out_features, bias=bias, place=place)
    return RowParallelLinear(in_features, out_features, parallel=parallel, bias=bias, place=place)


class VocabParallelEmbedding:
    """An embedding: a row of `weight` a token. Rank r of n has the rows r * c to r * c + c, with c =
    vocab_size / n, rounded up.

    The rows that the last ranks have beyond the vocabulary are padding, which is never read.
    """

    __slots__ = ("_all_reduce", "_num_rows", "_start", "vocab_size", "weight")

    def __init__(self, vocab_size: int, hidden_size: int, *, parallel: ParallelState, place: Place) -> None:
        layout = parallel.layout
        padded_rows = -(-vocab_size // layout.tp_size)
        place = place.of_vocabulary()
        self.weight = place.matrix(padded_rows, hidden_size, place.format(hidden_size))
        self.vocab_size = vocab_size
        self._start = min(layout.tp_rank * padded_rows, vocab_size)
        self._num_rows = min(padded_rows, vocab_size - self._start)
        self._all_reduce = parallel.tp.all_reduce if layout.tp_size > 1 else None

    @property
    def own(self) -> range:
        """Return the tokens whose rows this rank has."""
        return range(self._start, self._start + self._num_rows)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of input_ids [T], in new memory."""
        if self._all_reduce is None:
            return self.weight.take(input_ids)
        rows = input_ids - self._start
        is_elsewhere = (rows < 0) | (rows >= self._num_rows)
        own = self.weight.take(rows.masked_fill_(is_elsewhere, 0))
        return self._all_reduce(own.masked_fill_(is_elsewhere[:, None], 0))

    def slots(self, prefix: str) -> Slots:
        """Yield this rank's rows under the checkpoint's name."""
        if self._num_rows:
            full_shape = (self.vocab_size, self.weight.shape[1])
            yield f"{prefix}.weight", self.weight.slot(full_shape, 0, self._start, range(self._num_rows))


class ParallelLMHead:
    """The product with the rows of an embedding, its own or the tied ones; all ranks' logits are put
    together."""

    __slots__ = ("_all_gather", "_is_padded", "rows")

    def __init__(self, rows: VocabParallelEmbedding, parallel: ParallelState) -> None:
        self.rows = rows
        self._is_padded = rows.vocab_size % parallel.layout.tp_size > 0
        self._all_gather = parallel.tp.all_gather if parallel.layout.tp_size > 1 else None

    def warm_up(self) -> None:
        """Compile the product with a quantised weight, so that no step waits for it."""
        weight = self.rows.weight
        if isinstance(weight, PackedWeight):
            weight.products.warm_up(weight.form, weight.activation_bits)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, vocab_size], contiguous, of hidden states [N, hidden]."""
        logits = self.rows.weight.linear(hidden, None)
        if self._all_gather is None:
            return logits
        gathered = self._all_gather(logits)
        return gathered[:, : self.rows.vocab_size].contiguous() if self._is_padded else gathered
