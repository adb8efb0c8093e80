"""Paged attention on the CPU, decode and prefill alike.

Layout: the keys of a block are stored [head_dim, block_size], its values [block_size, head_dim], so that
the lanes of a score vector are consecutive tokens and those of an output vector consecutive channels.

A *work item* is a run of query tokens of one request against a range of its cache, for one KV head; its rows
are the (token, query head) pairs, so that every key and value is read once for all heads of the group. Items
are drawn from a shared counter by however many threads run the kernel. A task whose cache is cut into several
ranges leaves a partial result for each; the thread that finishes last merges them in order, so that the
result depends neither on the number of threads nor on the other requests of the batch. The softmax is the
online one of FlashAttention (Dao et al., 2022), the merge that of Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from functools import reduce
from itertools import chain
from math import gcd

from llvmlite import ir

from nbengine.kernels.cpu.attention_rule import capped, first_seen_by, sinks_of
from nbengine.kernels.cpu.attention_state import State, define_begin, define_finish, define_merge, define_park
from nbengine.kernels.cpu.codegen import Code, Int, Vector, define
from nbengine.kernels.cpu.layout import CHUNK, FLOAT, PLAIN, AttentionArguments, AttentionShape, Work
from nbengine.kernels.cpu.scales import define_scale_weights, scale_at

MASKED = -2e30
"""The score of a token that must not be seen: below `nbengine.kernels.cpu.attention_state.LOWEST`, so that its weight is 0 whatever the
maximum."""

_CACHE_LINE = 64
_UNROLL = 8
_MIN_CHAINS = 8  # independent sums that cover the latency of a multiply-add


def _define_score(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define score(scores, query, keys, values, table, stride, start, end), for a tile of rows:

    scores[r, t - start] = query[r] . key(t) for start <= t < end, in whole vectors of tokens. key(t) is
    column t % block_size of the block at keys + table[t // block_size] * stride. Where it pays, the function
    fetches the values of the same tokens and the next keys meanwhile: the processor cannot guess where the
    next block lies.
    """
    tile, block, size, lanes = shape.tile, shape.block_size, shape.element.size, shape.lanes
    key_step, group_bytes, unroll = block * size, lanes * size, gcd(shape.head_dim, _UNROLL)
    chains = 1
    while chains < unroll and tile * chains < min(_MIN_CHAINS, shape.accumulators):
        chains *= 2

    def fetch(code: Code, values: Int, next_keys: Int, channel: Int) -> None:
        for line in range(0, unroll * group_bytes, _CACHE_LINE):
            code.prefetch(values + channel * group_bytes + line)
        for line in range(0, unroll * key_step, max(key_step, _CACHE_LINE)):
            code.prefetch(next_keys + channel * key_step + line)

    def body(
        code: Code,
        scores: Int,
        query: Int,
        keys: Int,
        values: Int,
        table: Int,
        stride: Int,
        start: Int,
        end: Int,
    ) -> None:
        def block_at(token: Int) -> Int:
            return code.load_int(table + token // block * 4, 4) * stride

        sums = [[code.accumulator(code.constant(0.0, lanes)) for _ in range(tile)] for _ in range(chains)]
        with code.loop(start, end, lanes) as token:
            for cell in chain.from_iterable(sums):
                cell.set(code.constant(0.0, lanes))
            here, following = block_at(token), (token + lanes).at_most(end - 1)
            first_keys = keys + here + token % block * size
            first_values = values + here + token % block * shape.head_bytes
            next_keys = keys + block_at(following) + following % block * size
            if shape.scales_at is not None and shape.fetches_ahead:
                code.prefetch(scale_at(shape, values + here, token))
                code.prefetch(scale_at(shape, keys + block_at(following), following))
            with code.loop(0, code.integer(shape.head_dim), unroll) as channel:
                if shape.fetches_ahead:
                    fetch(code, first_values, next_keys, channel)
                for i in range(unroll):
                    key = code.load(first_keys + (channel + i) * key_step, lanes, shape.element)
                    for r in range(tile):
                        factor = code.load(query + channel * FLOAT + r * shape.row_bytes + i * FLOAT)
                        cell = sums[i % chains][r]
                        cell.set(factor.splat(lanes).times_plus(key, cell.get()))
            for r in range(tile):
                total = reduce(Vector.__add__, (row[r].get() for row in sums))
                if shape.scales_at is not None:
                    total = total * code.load(scale_at(shape, keys + here, token), lanes)
                code.store(total, scores + (token - start) * FLOAT + r * (CHUNK * FLOAT))

    return define(module, f"{name}_score", 8, body)


def _define_softmax(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define softmax(scores, count, visible, maximum, total, decay): turn a row of scores (base 2) into
    weights.

    Of `count` scores the first `visible` count. The function updates the row's running maximum and total in
    place and stores at `decay` the factor for the earlier sums. For a kernel that is not plain there are two more
    arguments: the number of first scores that do not count, and the address of `AttentionArguments`.
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
        before = code.load(maximum)
        highest = code.accumulator(before.splat(lanes))
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
        code.store(peak, maximum)
        weights = code.accumulator(code.constant(0.0, lanes))
        with code.loop(0, count, lanes) as position:
            place = scores + position * FLOAT
            weight = code.exp2(code.load(place, lanes) - peak.splat(lanes))
            code.store(weight, place)
            weights.set(weights.get() + weight)
        shrink = code.exp2(before - peak)
        code.store(shrink, decay)
        code.store(shrink.times_plus(code.load(total), weights.get().reduce(Vector.__add__)), total)

    return define(module, f"{name}_softmax", 6 if features == PLAIN else 8, body)


def _define_accumulate(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define accumulate(sums, decay, weights, table, values, stride, start, end), for a tile of rows:

    sums[r] = decay[r] * sums[r] + sum over start <= t < end of weights[r, t - start] * value(t), where
    value(t) is row t % block_size of the block at values + table[t // block_size] * stride.
    """
    tile, block, element = shape.tile, shape.block_size, shape.element
    step = max(1, shape.accumulators // tile)
    parts = [shape.columns()[i : i + step] for i in range(0, len(shape.columns()), step)]

    def body(
        code: Code,
        sums: Int,
        decay: Int,
        weights: Int,
        table: Int,
        values: Int,
        stride: Int,
        start: Int,
        end: Int,
    ) -> None:
        for part in parts:
            cells = {}
            for r in range(tile):
                shrink = code.load(decay + r * FLOAT)
                for column, lanes in part:
                    old = code.load(sums + r * shape.row_bytes + column * FLOAT, lanes)
                    cells[r, column] = code.accumulator(old * shrink.splat(lanes))
            with code.loop(start, end) as token:
                number = code.load_int(table + token // block * 4, 4)
                row = values + number * stride + token % block * shape.head_bytes
                weight = weights + (token - start) * FLOAT
                loaded = [(c, code.load(row + c * element.size, lanes, element)) for c, lanes in part]
                for r in range(tile):
                    factor = code.load(weight + r * (CHUNK * FLOAT))
                    for column, value in loaded:
                        cell = cells[r, column]
                        cell.set(factor.splat(value.lanes).times_plus(value, cell.get()))
            for (r, column), cell in cells.items():
                code.store(cell.get(), sums + r * shape.row_bytes + column * FLOAT)

    return define(module, f"{name}_accumulate", 8, body)


def _define_visit(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define visit(state, keys, values, table, stride, visible, start, end, rows): attend to tokens start <=
    t < end.

    `table` holds the request's block numbers, `stride` is the bytes from block to block, `visible` the number
    of tokens up to the first query token. For a kernel that is not plain there is one more argument, the address of
    `AttentionArguments`.
    """
    tile, features = shape.tile, shape.features
    score = _define_score(module, shape, name)
    softmax = _define_softmax(module, shape, name)
    scale_weights = define_scale_weights(module, shape, name) if shape.scales_at is not None else None
    accumulate = _define_accumulate(module, shape, name)

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

        with code.loop(start, end, CHUNK) as first, code.loop(0, rows, tile) as row:
            stop = (first + CHUNK).at_most(end).at_most(seen_by(row + (tile - 1)))
            start_of_values = start_of_keys = first
            if features.span is not None:
                # Keys are read in whole vectors, which lie within a block; of values, those that are seen.
                start_of_values = first.at_least(first_of(row))
                start_of_keys = start_of_values // shape.lanes * shape.lanes
            with code.when(stop.compare(">", start_of_values)):
                count = stop - start_of_keys
                tile_of_query, scores = state.query(row), state.scores(0)
                code.call(score, scores, tile_of_query, keys, values, table, stride, start_of_keys, stop)
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
                sums, decay = state.sums(row), state.decay(0)
                if features.span is not None:
                    scores = scores + (start_of_values - start_of_keys) * FLOAT
                code.call(accumulate, sums, decay, scores, table, values, stride, start_of_values, stop)

    return define(module, f"{name}_visit", 9 if features == PLAIN else 10, body)


def define_attention(module: ir.Module, name: str, shape: AttentionShape) -> None:
    """Define `name`(address of `AttentionArguments`), to be run by any number of threads at once."""
    begin = define_begin(module, shape, name)
    visit = _define_visit(module, shape, name)
    finish = define_finish(module, shape, name)
    park = define_park(module, shape, name)
    merge = define_merge(module, shape, name)

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
            rows, head_offset = tokens * shape.group, head * (shape.group * shape.row_head_bytes)
            query_stride = argument("query_stride")
            output_stride = kv_heads * (shape.group * shape.row_head_bytes)
            query = argument("query") + work(Work.FIRST_TOKEN) * query_stride + head_offset
            output = argument("output") + work(Work.FIRST_TOKEN) * output_stride + head_offset
            scale = arguments + AttentionArguments.scale.offset
            sinks = []
            if shape.features.has_sinks:
                sinks = [work(Work.PART), sinks_of(code, shape, arguments, head)]
            code.call(begin, state, query, query_stride, tokens, scale, *sinks)
            code.call(
                visit,
                state,
                argument("key_cache") + head * shape.block_bytes,
                argument("value_cache") + head * shape.block_bytes,
                argument("block_table") + work(Work.REQUEST) * argument("block_table_stride"),
                kv_heads * shape.block_bytes,
                work(Work.VISIBLE),
                work(Work.KV_START),
                work(Work.KV_END),
                rows,
                *([] if shape.features == PLAIN else [arguments]),
            )
            with code.when(parts.compare("==", 1)):
                code.call(finish, state, output, output_stride, tokens)
            with code.when(parts.compare(">", 1)):
                first = work(Work.PARTIAL) * kv_heads + head * parts
                partials = argument("partials") + first * shape.partial_bytes
                code.call(park, state, partials + work(Work.PART) * shape.partial_bytes, rows)
                arrivals = argument("arrivals") + (work(Work.TASK) * kv_heads + head) * 8
                arrived = code.fetch_add(arrivals, 1)
                with code.when(arrived.compare("==", parts - 1)):
                    code.store_int(code.integer(0), arrivals)
                    code.call(merge, state, partials, parts, rows)
                    code.call(finish, state, output, output_stride, tokens)

    define(module, name, 1, body, exported=True)
