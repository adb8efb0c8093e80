"""Paged attention on the CPU, decode and prefill alike.

Layout: the keys of a block are stored [head_dim, block_size], its values [block_size, head_dim], so that
the lanes of a score vector are consecutive tokens and those of an output vector consecutive channels. Latents are
stored once, [block_size, head_dim], for both: the scores of their tokens are computed one at a time.

A *work item* is a run of query tokens of one request against a range of its cache, for one KV head; its rows
are the (token, query head) pairs, so that every key and value is read once for all heads of the group. Items
are drawn from a shared counter by however many threads run the kernel. A task whose cache is cut into several
ranges leaves a partial result for each; the thread that finishes last joins them in order. The softmax is the
online one of FlashAttention (Dao et al., 2022), the partial results are those of Flash-Decoding (Dao et al., 2023).

A row's result has the same bits in every batch, cut in any way: the order of its sums depends on the model's shape and
the processor alone. A score is the same chain of multiply-adds, of numbers or of pairs, in tiles of any size. The
softmax of each chunk of `DECODE_PART` cached tokens stands by itself, with its own maximum, and is joined to those
before it; the chunks of each `PREFILL_PART`, counted from the cache's beginning, make one state, which is joined to those before it.
An item of decode is such a chunk, one of prefill such a part, and both take the same steps. Chunks that a row does not
see change no bit of it.
"""

from __future__ import annotations

from llvmlite import ir

from nbengine.kernels.cpu.attention_products import (
    define_accumulate,
    define_pack,
    define_score,
    define_score_of_latents,
)
from nbengine.kernels.cpu.attention_rule import capped, first_seen_by, sinks_of
from nbengine.kernels.cpu.attention_state import (
    LOWEST,
    State,
    define_begin,
    define_finish,
    define_join,
    define_park,
    joined_sum,
    joined_to,
)
from nbengine.kernels.cpu.codegen import Code, Int, Vector, define
from nbengine.kernels.cpu.layout import CHUNK, FLOAT, PLAIN, AttentionArguments, AttentionShape, Work
from nbengine.kernels.cpu.pairs import narrowed
from nbengine.kernels.cpu.scales import define_scale_weights

MASKED = -2e30
"""The score of a token that must not be seen: below `nbengine.kernels.cpu.attention_state.LOWEST`, so that its weight is 0 whatever the
maximum."""


def _define_softmax(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define softmax(scores, count, visible, maximum, total, decay): turn a row of scores (base 2) of one chunk into
    weights, which are narrower where they are multiplied in pairs.

    Of `count` scores the first `visible` count. The weights are those of the chunk by itself. The function updates the
    row's running maximum and total in place and stores at `decay` the factor for the earlier sums, and behind those of
    the tile the factor for the chunk's. For a kernel that is not plain there are two more arguments: the number of first
    scores that do not count, and the address of `AttentionArguments`.
    """
    lanes, features = shape.lanes, shape.features

    def body(
        code: Code,
        scores: Int,
        count: Int,
        visible: Int,
        maximum: Int,
        total: Int,
        decay: Int,
        hidden: Int | None = None,
        arguments: Int | None = None,
    ) -> None:
        highest = code.accumulator(code.constant(LOWEST, lanes))
        with code.loop(0, count, lanes) as position:
            place = scores + position * FLOAT
            score = code.load(place, lanes)
            if features.has_soft_cap and arguments is not None:
                score = capped(code, arguments, score)
            score = code.mask_from(score, position, visible, MASKED)
            if features.span is not None and hidden is not None:
                score = code.mask_before(score, position, hidden, MASKED)
            code.store(score, place)
            highest.set(score.at_least(highest.get()))
        peak = highest.get().reduce(Vector.at_least)
        weights = code.accumulator(code.constant(0.0, lanes))
        with code.loop(0, count, lanes) as position:
            place = scores + position * FLOAT
            weight = code.exp2(code.load(place, lanes) - peak.splat(lanes))
            if shape.has_pairs:
                code.store_lanes(narrowed(weight), scores + position * shape.factor.size)
            else:
                code.store(weight, place)
            weights.set(weights.get() + weight)
        joined = joined_to(code, code.load(maximum), peak)
        code.store(joined.peak, maximum)
        code.store(joined.shrink, decay)
        code.store(joined.growth, decay + shape.tile * FLOAT)
        code.store(
            joined_sum(joined.shrink, code.load(total), joined.growth, weights.get().reduce(Vector.__add__)),
            total,
        )

    return define(module, f"{name}_softmax", 6 if features == PLAIN else 8, body)


def _define_visit(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define visit(state, keys, values, table, stride, visible, start, end, rows): attend to tokens start <=
    t < end.

    `table` holds the request's block numbers, `stride` is the bytes from block to block, `visible` the number
    of tokens up to the first query token. For a kernel that is not plain there is one more argument, the address of
    `AttentionArguments`.
    """
    tile, features = shape.tile, shape.features
    score = (define_score_of_latents if shape.rank else define_score)(module, shape, name)
    softmax = _define_softmax(module, shape, name)
    scale_weights = define_scale_weights(module, shape, name) if shape.scales_at is not None else None
    accumulate = define_accumulate(module, shape, name)
    pack = define_pack(module, shape, name) if shape.packs else None

    def body(
        code: Code,
        base: Int,
        keys: Int,
        values: Int,
        table: Int,
        stride: Int,
        visible: Int,
        start: Int,
        end: Int,
        rows: Int,
        arguments: Int | None = None,
    ) -> None:
        state = State(shape, base)

        def seen_by(row: Int) -> Int:
            return visible + row.at_most(rows - 1) // shape.group

        def first_of(row: Int) -> Int:
            assert arguments is not None
            return first_seen_by(code, shape, arguments, seen_by(row))

        def attend(first: Int, row: Int) -> None:
            stop = (first + CHUNK).at_most(end).at_most(seen_by(row + (tile - 1)))
            start_of_values = start_of_keys = first
            if features.span is not None:
                # Keys are read in whole vectors, which lie within a block; of values, those that are seen.
                start_of_values = first.at_least(first_of(row))
                start_of_keys = start_of_values // shape.lanes * shape.lanes
            first_weight = start_of_values // shape.step * shape.step
            with code.when(stop.compare(">", start_of_values)):
                count = stop - start_of_keys
                tile_of_query, scores = state.query(row), state.scores(0)
                chunk_keys, chunk_values = keys, values
                if shape.packs:
                    chunk_keys, chunk_values = (
                        state.keys(start_of_keys - first),
                        state.values(first_weight - first),
                    )
                cached = chunk_keys, values, table, stride, start_of_keys, stop
                code.call(score, scores, tile_of_query, *cached)
                with code.loop(0, code.integer(tile)) as r:
                    weights, seen = state.scores(r), seen_by(row + r).at_most(stop)
                    maximum, total, decay = state.maximum(row + r), state.total(row + r), state.decay(r)
                    limits = [] if features.span is None else [first_of(row + r)]
                    more = []
                    if arguments is not None:
                        more = [limits[0] - start_of_keys if limits else code.integer(0), arguments]
                    code.call(softmax, weights, count, seen - start_of_keys, maximum, total, decay, *more)
                    if scale_weights is not None:
                        args = weights, values, table, stride, start_of_keys, stop, seen, *limits
                        code.call(scale_weights, *args)
                weights = scores + (first_weight - start_of_keys) * shape.factor.size
                cached = weights, table, chunk_values, stride, start_of_values, stop
                code.call(accumulate, state.sums(row), state.decay(0), *cached)

        with code.loop(start, end, CHUNK) as first:
            if pack is not None:
                start_of_all = first if features.span is None else first.at_least(first_of(code.integer(0)))
                stop_of_all = (first + CHUNK).at_most(end).at_most(seen_by(rows - 1))
                code.call(pack, base, keys, values, table, stride, first, start_of_all, stop_of_all)
            with code.loop(0, rows, tile) as row:
                attend(first, row)

    return define(module, f"{name}_visit", 9 if features == PLAIN else 10, body)


def define_attention(module: ir.Module, name: str, shape: AttentionShape) -> None:
    """Define `name`(address of `AttentionArguments`), to be run by any number of threads at once."""
    begin = define_begin(module, shape, name)
    visit = _define_visit(module, shape, name)
    finish = define_finish(module, shape, name)
    park = define_park(module, shape, name)
    join = define_join(module, shape, name)

    def body(code: Code, arguments: Int) -> None:
        def argument(field: str) -> Int:
            return code.load_int(arguments + getattr(AttentionArguments, field).offset)

        def work(column: Work) -> Int:
            return code.load_int(item + column * 4, 4)

        state, kv_heads = code.stack(State.nbytes(shape)), argument("kv_heads")
        counter = arguments + AttentionArguments.counter.offset
        with code.tickets(counter, argument("items")) as ticket:
            head, item = ticket % kv_heads, argument("work") + ticket // kv_heads * (len(Work) * 4)
            tokens, parts = work(Work.TOKENS), work(Work.PARTS)
            rows, first_head = tokens * shape.group, head * shape.group
            query_stride = argument("query_stride")
            output_stride = kv_heads * (shape.group * shape.output_head_bytes)
            query = argument("query") + work(Work.FIRST_TOKEN) * query_stride
            query = query + first_head * shape.row_head_bytes
            output = argument("output") + work(Work.FIRST_TOKEN) * output_stride
            output = output + first_head * shape.output_head_bytes
            kept_heads, kept_head = (code.integer(1), code.integer(0)) if shape.rank else (kv_heads, head)
            scale = arguments + AttentionArguments.scale.offset
            sinks = [sinks_of(code, shape, arguments, head)] if shape.features.has_sinks else []
            code.call(begin, state, query, query_stride, tokens, scale)
            code.call(
                visit,
                state,
                argument("key_cache") + kept_head * shape.block_bytes,
                argument("value_cache") + kept_head * shape.block_bytes,
                argument("block_table") + work(Work.REQUEST) * argument("block_table_stride"),
                kept_heads * shape.block_bytes,
                work(Work.VISIBLE),
                work(Work.KV_START),
                work(Work.KV_END),
                rows,
                *([] if shape.features == PLAIN else [arguments]),
            )
            with code.when(parts.compare("==", 1)):
                code.call(finish, state, output, output_stride, tokens, *sinks)
            with code.when(parts.compare(">", 1)):
                first = work(Work.PARTIAL) * kv_heads + head * parts
                partials = argument("partials") + first * shape.partial_bytes
                code.call(park, state, partials + work(Work.PART) * shape.partial_bytes, rows)
                arrivals = argument("arrivals") + (work(Work.TASK) * kv_heads + head) * 8
                arrived = code.fetch_add(arrivals, 1)
                with code.when(arrived.compare("==", parts - 1)):
                    code.store_int(code.integer(0), arrivals)
                    first_part = work(Work.KV_START) // shape.part - work(Work.PART)
                    code.call(join, state, partials, first_part, parts, rows)
                    code.call(finish, state, output, output_stride, tokens, *sinks)

    define(module, name, 1, body, exported=True)
