"""The products of attention on the CPU: scores of some rows with keys, and sums of values with their weights.

Where the processor multiplies pairs of bfloat16, and the cache has them, queries and weights are rounded to them.
Decode pairs two channels of a key, or the values of two tokens, as it reads them; prefill does that once for all rows of
an item, and keeps the pairs on the stack. What is multiplied and added, and in what order, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain

from llvmlite import ir

from nbengine.kernels.cpu.attention_state import State, joined_sum
from nbengine.kernels.cpu.codegen import MAX_LANES, Code, Int, Vector, define
from nbengine.kernels.cpu.integers import load_words
from nbengine.kernels.cpu.layout import CHUNK, FLOAT, AttentionShape
from nbengine.kernels.cpu.pairs import PAIR, add_products, every_pair, interleave
from nbengine.kernels.cpu.scales import scale_at

_CACHE_LINE = 64


def define_score(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define score(scores, query, keys, values, table, stride, start, end), for a tile of rows:

    scores[r, t - start] = query[r] . key(t) for start <= t < end, in whole vectors of tokens. key(t) is
    column t % block_size of the block at keys + table[t // block_size] * stride. Where it pays, the function
    fetches the values of the same tokens and the next keys meanwhile: the processor cannot guess where the
    next block lies. Where an item packs them, `keys` is the place of the pairs from `start` on.
    """
    tile, block, size, lanes = shape.tile, shape.block_size, shape.element.size, shape.lanes
    key_step, group_bytes, unroll, chains = block * size, lanes * size, shape.unroll, shape.chains
    factor_size = shape.factor.size

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
            first_keys, channel_bytes, places = keys + here + token % block * size, key_step, shape.step
            if shape.packs:
                first_keys, channel_bytes, places = keys + (token - start) * shape.head_bytes, group_bytes, 1
            first_values = values + here + token % block * shape.head_bytes
            next_keys = keys + block_at(following) + following % block * size
            if shape.scales_at is not None and shape.fetches_ahead:
                code.prefetch(scale_at(shape, values + here, token))
                code.prefetch(scale_at(shape, keys + block_at(following), following))
            with code.loop(0, code.integer(shape.head_dim), unroll) as channel:
                if shape.fetches_ahead:
                    fetch(code, first_values, next_keys, channel)
                for i in range(0, unroll, shape.step):
                    numbers = [first_keys + (channel + (i + j)) * channel_bytes for j in range(places)]
                    multiply = _multiplier(code, shape, numbers, lanes)
                    for r in range(tile):
                        factor = query + channel * factor_size + r * shape.row_bytes + i * factor_size
                        cell = sums[i // shape.step % chains][r]
                        cell.set(multiply(factor, cell.get()))
            for r in range(tile):
                total = reduce(Vector.__add__, (row[r].get() for row in sums))
                if shape.scales_at is not None:
                    total = total * code.load(scale_at(shape, keys + here, token), lanes)
                code.store(total, scores + (token - start) * FLOAT + r * (CHUNK * FLOAT))

    return define(module, f"{name}_score", 8, body)


def define_score_of_latents(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define what `define_score` does where key(t) is row t % block_size of its block."""
    tile, block = shape.tile, shape.block_size
    whole = shape.head_dim // MAX_LANES * MAX_LANES

    def body(
        code: Code, scores: Int, query: Int, keys: Int, _: Int, table: Int, stride: Int, start: Int, end: Int
    ) -> None:
        sums = [code.accumulator(code.constant(0.0, MAX_LANES)) for _ in range(tile)]
        with code.loop(start, end) as token:
            for cell in sums:
                cell.set(code.constant(0.0, MAX_LANES))
            number = code.load_int(table + token // block * 4, 4)
            key = keys + number * stride + token % block * shape.head_bytes
            with code.loop(0, code.integer(whole), MAX_LANES) as channel:
                numbers = code.load(key + channel * shape.element.size, MAX_LANES, shape.element)
                for r, cell in enumerate(sums):
                    factor = code.load(query + channel * FLOAT + r * shape.row_bytes, MAX_LANES)
                    cell.set(factor.times_plus(numbers, cell.get()))
            for r, cell in enumerate(sums):
                total, row = cell.get().reduce(Vector.__add__), query + r * shape.row_bytes
                for column, lanes in shape.columns()[whole // MAX_LANES :]:
                    numbers = code.load(key + column * shape.element.size, lanes, shape.element)
                    product = numbers * code.load(row + column * FLOAT, lanes)
                    total = total + product.reduce(Vector.__add__)
                code.store(total, scores + (token - start) * FLOAT + r * (CHUNK * FLOAT))

    return define(module, f"{name}_score", 8, body)


def define_accumulate(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define accumulate(sums, decay, weights, table, values, stride, start, end), for a tile of rows:

    sums[r] = decay[r] * sums[r] + growth[r] * sum over start <= t < end of weights[r, t - start] * value(t), where
    value(t) is row t % block_size of the block at values + table[t // block_size] * stride, and growth is behind decay.
    Pairs of tokens begin with an even one, and so do the weights then: the weight of a token that is not between `start`
    and `end` is 0, and the value of the other token of its pair takes the place of its own. Where an item packs them, `values` is the place
    of the pairs from the first one on.
    """
    tile, block = shape.tile, shape.block_size
    size = shape.element.size * (PAIR if shape.packs else 1)
    step, columns = max(1, shape.accumulators // tile), shape.value_columns()
    parts = [columns[i : i + step] for i in range(0, len(columns), step)]

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
            cells = {
                (r, column): code.accumulator(code.constant(0.0, lanes))
                for r in range(tile)
                for column, lanes in part
            }
            begin = start // shape.step * shape.step
            with code.loop(begin, end, shape.step) as token:
                number = code.load_int(table + token // block * 4, 4)
                row = values + number * stride + token % block * shape.head_bytes
                rows = _pair_of_rows(shape, row, token, start, end) if shape.has_pairs else [row]
                if shape.packs:
                    rows = [values + (token - begin) * shape.head_bytes]
                weight = weights + (token - begin) * shape.factor.size
                products = {
                    c: _multiplier(code, shape, [row + c * size for row in rows], lanes) for c, lanes in part
                }
                for r in range(tile):
                    factor = weight + r * (CHUNK * FLOAT)
                    for column, multiply in products.items():
                        cell = cells[r, column]
                        cell.set(multiply(factor, cell.get()))
            for r in range(tile):
                shrink, growth = (code.load(decay + (r + behind) * FLOAT) for behind in (0, tile))
                for column, lanes in part:
                    place = sums + r * shape.sum_bytes + column * FLOAT
                    old, chunk = code.load(place, lanes), cells[r, column].get()
                    code.store(joined_sum(shrink.splat(lanes), old, growth.splat(lanes), chunk), place)

    return define(module, f"{name}_accumulate", 8, body)


def define_pack(module: ir.Module, shape: AttentionShape, name: str) -> ir.Function:
    """Define pack(state, keys, values, table, stride, first, start, end): put keys and values of the chunk that begins
    with token `first` into pairs, those of start <= t < end, in whole vectors and pairs of tokens."""
    block, size, lanes = shape.block_size, shape.element.size, shape.lanes

    def body(
        code: Code,
        base: Int,
        keys: Int,
        values: Int,
        table: Int,
        stride: Int,
        first: Int,
        start: Int,
        end: Int,
    ) -> None:
        state = State(shape, base)

        def block_at(token: Int) -> Int:
            return code.load_int(table + token // block * 4, 4) * stride

        with code.loop(start // lanes * lanes, end, lanes) as token:
            source, target = keys + block_at(token) + token % block * size, state.keys(token - first)
            with code.loop(0, code.integer(shape.head_dim), shape.unroll) as channel:
                for i in range(0, shape.unroll, PAIR):
                    places = [source + (channel + (i + j)) * (block * size) for j in range(PAIR)]
                    code.store_lanes(interleave(code, *places), target + (channel + i) * (lanes * size))
        with code.loop(start // PAIR * PAIR, end, PAIR) as token:
            row = values + block_at(token) + token % block * shape.head_bytes
            rows, target = _pair_of_rows(shape, row, token, start, end), state.values(token - first)
            for column, _ in shape.value_columns():
                pairs = interleave(code, *(row + column * size for row in rows))
                code.store_lanes(pairs, target + column * (PAIR * size))

    return define(module, f"{name}_pack", 8, body)


def _multiplier(
    code: Code, shape: AttentionShape, places: Sequence[Int], lanes: int
) -> Callable[[Int, Vector], Vector]:
    """Load numbers from a place, pairs of them from two, or pairs that lie together; return what adds to sums their
    products with a row's factors, which are at an address."""
    if shape.has_pairs:
        pairs = load_words(code, places[0]) if shape.packs else interleave(code, *places)
        return lambda factor, total: add_products(total, every_pair(code, factor), pairs)
    numbers = code.load(places[0], lanes, shape.element)
    return lambda factor, total: code.load(factor).splat(lanes).times_plus(numbers, total)


def _pair_of_rows(shape: AttentionShape, row: Int, token: Int, start: Int, end: Int) -> list[Int]:
    """Return the rows of an even token's value and of the next one's, which a row from `start` to `end` takes the place
    of."""
    following = row + shape.head_bytes
    return [
        row.if_else(token.compare(">=", start), following),
        following.if_else((token + 1).compare("<", end), row),
    ]
