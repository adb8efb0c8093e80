"""Windows, chunks, soft caps and sinks: the reference against a softmax written out, kernels against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu import attention_functions
from nbengine.kernels.cpu import backend as cpu_backend
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.cpu.layout import CHUNK, DECODE_PART, PREFILL_PART, Work
from nbengine.kernels.cpu.plan import decode_work, prefill_work
from nbengine.kernels.torch.backend import TorchKernels
from tests.support.thorough import amount

INT8 = torch.int8
LENS = [(1, 1), (1, 16), (1, 33), (1, 300), (4, 4), (7, 100), (53, 61), (50, 259)]
RULES: dict[str, dict[str, int]] = {
    "all": {},
    "window of itself": {"window": 1},
    "window below a block": {"window": 5},
    "window of a block": {"window": 16},
    "window of several blocks": {"window": 50},
    "window of several parts": {"window": 140},
    "window of 2050": {"window": 2050},
    "window beyond all": {"window": 10_000},
    "chunk of itself": {"chunk": 1},
    "chunk below a block": {"chunk": 6},
    "chunk of several blocks": {"chunk": 48},
    "chunk of several parts": {"chunk": 200},
    "chunk beyond all": {"chunk": 10_000},
}


def sinks_of(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-3, 4, heads).to(dtype)


def options_for(shape, rule: str, *, cap: float | None = None, sinks: bool = False) -> AttentionOptions:
    return AttentionOptions(
        shape.head_dim**-0.5,
        soft_cap=cap,
        sinks=sinks_of(shape.num_heads) if sinks else None,
        **RULES[rule],
    )


def sees(options: AttentionOptions, query: int, key: int) -> bool:
    if key > query:
        return False
    if options.window is not None:
        return key > query - options.window
    return options.chunk is None or key // options.chunk == query // options.chunk


def written_out(batch, lens) -> torch.Tensor:
    """Attention of every query and head by itself, key by key, over the dense keys and values."""
    options, group = batch.options, batch.query.shape[1] // batch.key.shape[1]
    output = torch.empty(batch.query.shape, dtype=torch.float64)
    token = row = 0
    for query_len, seq_len in lens:
        keys, values = (part[token : token + seq_len].double() for part in (batch.key, batch.value))
        token += seq_len
        for position in range(seq_len - query_len, seq_len):
            for head in range(batch.query.shape[1]):
                scores = {}
                for at in range(seq_len):
                    if sees(options, position, at):
                        score = float(batch.query[row, head].double() @ keys[at, head // group])
                        score *= options.scale
                        if options.soft_cap is not None:
                            score = options.soft_cap * math.tanh(score / options.soft_cap)
                        scores[at] = math.exp(score)
                total = sum(scores.values())
                if options.sinks is not None:
                    total += math.exp(float(options.sinks[head]))
                parts = [values[at, head // group] * (weight / total) for at, weight in scores.items()]
                output[row, head] = torch.stack(parts).sum(0)
            row += 1
    return output


@pytest.fixture
def small(make_shape):
    return make_shape(6, 2, 32, 16)


@pytest.fixture(autouse=True)
def outputs_begin_as_nan(monkeypatch):
    """The memory that no kernel writes is NaN."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def filled(*args, make=make, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(torch, name, filled)


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_the_reference_is_the_softmax_written_out(forget_unseen, make_batch, make_shape, rule, cap, sinks):
    lens = [(1, 1), (1, 37), (5, 5), (4, 57)]
    shape = make_shape(4, 2, 8, 8)
    batch = make_batch(TorchKernels(), shape, lens, torch.float64)
    batch.query *= 3
    batch.options = options_for(shape, rule, cap=cap, sinks=sinks)
    forget_unseen(batch)
    torch.testing.assert_close(batch.expected(), written_out(batch, lens), rtol=1e-9, atol=1e-12)


KINDS = {
    "torch": (TorchKernels, torch.float32, None),
    "float32": (lambda: CpuKernels(torch.float32), torch.float32, None),
    "bfloat16": (lambda: CpuKernels(torch.bfloat16), torch.bfloat16, None),
    "float16": (lambda: CpuKernels(torch.float16), torch.float16, None),
    "int8": (lambda: CpuKernels(INT8), torch.float32, INT8),
}


EXTRAS: dict[str, dict[str, float | bool]] = {"rule": {}, "rule, cap and sinks": {"cap": 3.0, "sinks": True}}
SPANS = {rule: ["window", "chunk"].index(next(iter(span))) + 1 if span else 0 for rule, span in RULES.items()}
"""Rules with the same number share their compiled functions."""


def cases() -> list[tuple[str, str, str]]:
    """Every kind with every rule, and both with all extras: of two sets of extras a kind and a span have one."""
    return [
        (kind, rule, extras)
        for number, kind in enumerate(KINDS)
        for rule, span in SPANS.items()
        for place, extras in enumerate(EXTRAS)
        if amount((number + span + place) % len(EXTRAS) == 0, thorough=True)
    ]


@pytest.mark.parametrize(("kind", "rule", "extras"), cases())
def test_attention_equals_the_reference_and_reads_nothing_that_is_out_of_sight(
    forget_unseen, make_batch, small, assert_close, kind, rule, extras
):
    make_kernels, dtype, cache_dtype = KINDS[kind]
    batch = make_batch(make_kernels(), small, LENS, dtype, cache_dtype=cache_dtype)
    batch.options = options_for(small, rule, **EXTRAS[extras])
    forget_unseen(batch)
    assert_close(batch.run(), batch.expected(), weights=batch.weights)


@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 192, 256])
def test_heads_of_every_size_have_all_options(forget_unseen, make_batch, make_shape, assert_close, head_dim):
    shape = make_shape(4, 2, head_dim, 16)
    batch = make_batch(CpuKernels(torch.float32), shape, [(1, 150), (20, 90)])
    batch.options = options_for(shape, "window of several blocks", cap=5.0, sinks=True)
    forget_unseen(batch)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("block_size", [1, 8, 64])
@pytest.mark.parametrize("rule", ["window below a block", "window of several blocks", "chunk below a block"])
def test_a_window_may_begin_anywhere_in_blocks_of_any_size(
    forget_unseen, make_batch, make_shape, assert_close, rule, block_size
):
    shape = make_shape(3, 1, 40, block_size)
    # Each kind meets each size, and windows and chunks.
    number = (1, 8, 64).index(block_size) + SPANS[rule]
    for kind in amount([("float32", "int8")[number % 2]], thorough=["float32", "int8"]):
        make_kernels, _, cache_dtype = KINDS[kind]
        batch = make_batch(make_kernels(), shape, LENS, cache_dtype=cache_dtype)
        batch.options = options_for(shape, rule)
        forget_unseen(batch)
        assert_close(batch.run(), batch.expected())


requests = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 500)))


@settings(max_examples=amount(15, thorough=1200), deadline=None)
@given(
    lens=st.lists(requests, min_size=1, max_size=5),
    rule=st.one_of(
        st.just({}),
        st.builds(lambda n: {"window": n}, st.one_of(st.integers(1, 70), st.integers(100, 700))),
        st.builds(lambda n: {"chunk": n}, st.one_of(st.integers(1, 70), st.integers(100, 700))),
    ),
    cap=st.sampled_from([None, 0.5, 30.0]),
    has_sinks=st.booleans(),
    is_compiled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_batch_under_any_options_equals_the_reference(
    forget_unseen, make_batch, make_shape, assert_close, lens, rule, cap, has_sinks, is_compiled, seed
):
    lens.sort(key=lambda pair: pair[0] > 1)
    kernels = CpuKernels(torch.float32) if is_compiled else TorchKernels()
    batch = make_batch(kernels, make_shape(6, 2, 32, 16), lens, seed=seed)
    sinks = sinks_of(6) if has_sinks else None
    batch.options = AttentionOptions(0.3, soft_cap=cap, sinks=sinks, **rule)
    forget_unseen(batch)
    assert_close(batch.run(), batch.expected())


CUTS = [(0, 100), (100, 101), (127, 128), (128, 129), (101, 330), (330, 410), (409, 410)]
LONG_CUTS = [(PREFILL_PART - 1, PREFILL_PART), (PREFILL_PART, PREFILL_PART + 1), (2000, 2100), (2299, 2300)]


CUT_RULES = [
    ("all", CUTS),
    ("window of several parts", CUTS),
    ("chunk of several parts", CUTS),
    ("all", LONG_CUTS),
    ("window of 2050", LONG_CUTS),
]
HEADS = {"full tiles": (6, 2, 32), "part of a tile": (1, 1, 40), "several tiles": (11, 1, 24)}
"""Heads in groups that fill a tile, that leave some of it, and that need several."""


def cuts_of_heads() -> list[tuple[str, str, list[tuple[int, int]], str]]:
    """Every kind with every rule and its cuts, and both with all heads."""
    return [
        (kind, rule, cuts, heads)
        for number, kind in enumerate(("float32", "bfloat16", "int8"))
        for place, (rule, cuts) in enumerate(CUT_RULES)
        for which, heads in enumerate(HEADS)
        if amount((number + place + which) % len(HEADS) == 0, thorough=True)
    ]


@pytest.mark.parametrize(("kind", "rule", "cuts", "heads"), cuts_of_heads())
def test_results_depend_neither_on_threads_nor_on_company_nor_on_chunks(
    make_batch, make_shape, torch_threads, kind, rule, cuts, heads
):
    """A prompt's tokens, all at once, in pieces and one by one beside others, on one thread and on several."""
    make_kernels, dtype, cache_dtype = KINDS[kind]
    length = cuts[-1][1]
    shape = make_shape(*HEADS[heads], 16)
    options = options_for(shape, rule, cap=20.0, sinks=True)
    whole = make_batch(make_kernels(), shape, [(length, length)], dtype, cache_dtype=cache_dtype)
    whole.options = options
    outputs = []
    for threads in (1, 3):
        torch_threads(threads)
        outputs.append(whole.run())
    assert torch.equal(*outputs)
    for start, stop in cuts:
        lens = sorted([(1, 90), (stop - start, stop), (7, 50)])
        together = make_batch(make_kernels(), shape, lens, dtype, cache_dtype=cache_dtype)
        together.options = options
        place = lens.index((stop - start, stop))
        rows = slice(*together.metadata.query_start_loc[place : place + 2].tolist())
        blocks = together.metadata.block_table[place, : -(-stop // 16)].long()
        own = whole.metadata.block_table[0, : len(blocks)].long()
        together.kv_cache[:, blocks] = whole.kv_cache[:, own]
        together.query[rows] = whole.query[start:stop]
        assert torch.equal(together.run()[rows], outputs[0][start:stop])


@pytest.mark.parametrize("window", [9, 10])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, INT8], ids=str)
def test_a_broken_token_spoils_nothing_once_it_is_out_of_the_window(
    make_batch, small, assert_close, cache_dtype, window
):
    batch = make_batch(CpuKernels(cache_dtype, torch.float32), small, [(1, 100)], cache_dtype=cache_dtype)
    batch.options = AttentionOptions(0.2, window=window)
    expected, first = batch.expected(), 100 - window
    broken = torch.full((1, 2, 32), float("nan"))
    for position in (first - 1, first - 2, first - 7):
        batch.metadata.kernels.write_kv(
            broken, broken, batch.kv_cache, batch.all_slots[position : position + 1]
        )
        assert_close(batch.run(), expected, weights=batch.weights)
    batch.metadata.kernels.write_kv(broken, broken, batch.kv_cache, batch.all_slots[first : first + 1])
    assert batch.run().isnan().all()


def test_a_broken_token_of_an_int8_cache_spoils_only_queries_that_see_it(make_batch, small, assert_close):
    batch = make_batch(CpuKernels(INT8), small, [(6, 100)], cache_dtype=INT8)
    batch.options = AttentionOptions(0.2, window=10)
    expected = batch.expected()
    broken = torch.full((1, 2, 32), float("nan"))
    batch.metadata.kernels.write_kv(broken, broken, batch.kv_cache, batch.all_slots[87:88])
    output = batch.run()
    assert output[:3].isnan().all()
    assert_close(output[3:], expected[3:])


def test_a_sink_of_minus_infinity_takes_no_weight_and_a_large_one_takes_all(make_batch, small, assert_close):
    batch = make_batch(CpuKernels(torch.float32), small, [(1, 200), (9, 50)])
    plain = batch.expected()
    batch.options = replace(batch.options, sinks=torch.full((6,), -torch.inf))
    assert_close(batch.run(), plain)
    batch.options = replace(batch.options, sinks=torch.full((6,), 1e4))
    assert (batch.run() == 0).all()


def test_sinks_of_the_models_type_are_read_as_what_they_are(make_batch, small, assert_close):
    batch = make_batch(CpuKernels(torch.bfloat16), small, LENS, torch.bfloat16)
    batch.options = AttentionOptions(0.2, sinks=sinks_of(6, torch.bfloat16))
    assert_close(batch.run(), batch.expected(), weights=batch.weights)


def test_layers_of_a_step_share_the_plan_of_their_rule(make_batch, small, assert_close, monkeypatch):
    layers = [
        AttentionOptions(0.2),
        AttentionOptions(0.2, window=20),
        AttentionOptions(0.3, window=20),
        AttentionOptions(0.2, window=30),
        AttentionOptions(0.3),
        AttentionOptions(0.2, chunk=20),
    ]
    # A kernel that is compiled here has a trial, which has plans, too.
    batch = make_batch(CpuKernels(torch.float32), small, LENS)
    for batch.options in layers:
        batch.run()
    made = []
    work = cpu_backend.decode_work
    monkeypatch.setattr(cpu_backend, "decode_work", lambda *args: made.append(args) or work(*args))
    batch = make_batch(CpuKernels(torch.float32), small, LENS)
    for _ in range(2):
        for batch.options in layers:
            assert_close(batch.run(), batch.expected())
    assert len(made) == 4


def test_warm_up_leaves_nothing_to_compile_for_a_layers_options(
    make_batch, make_shape, assert_close, monkeypatch
):
    kernels, shape = CpuKernels(torch.float32), make_shape(10, 2, 24, 4)
    options = options_for(shape, "window of several blocks", sinks=True)
    kernels.warm_up(10, 2, 24, 4, options)

    def refuse(*args: object) -> None:
        raise AssertionError("compiled during a step")

    batch = make_batch(kernels, shape, [(1, 90), (3, 3)])
    batch.options = options
    monkeypatch.setattr(attention_functions, "compile_tried", refuse)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("rule", RULES)
def test_work_covers_every_query_and_every_token_in_sight_once(make_batch, small, rule):
    lens = [(1, 700), (1, 3), (1, 129), (40, 333), (40, 5000), (97, 97)]
    metadata = make_batch(CpuKernels(torch.float32), small, lens).metadata
    options = options_for(small, rule)
    cases = (
        (decode_work(metadata, options), 1, DECODE_PART),
        (prefill_work(metadata, 16, options), 16, PREFILL_PART),
    )
    for work, limit, part in cases:
        seen: dict[int, list[int]] = {}
        for row in work.rows.tolist():
            request, first, tokens = row[Work.REQUEST], row[Work.FIRST_TOKEN], row[Work.TOKENS]
            start = int(metadata.query_start_loc[request])
            context = lens[request][1] - lens[request][0]
            assert 1 <= tokens <= limit
            assert row[Work.VISIBLE] == context + (first - start) + 1
            assert row[Work.KV_START] % CHUNK == 0
            assert row[Work.KV_START] // part == (row[Work.KV_END] - 1) // part
            assert row[Work.KV_END] > options.first_seen(row[Work.VISIBLE] - 1)
            for token in range(first, first + tokens):
                position = context + (token - start)
                begin = max(row[Work.KV_START], options.first_seen(position))
                seen.setdefault(token, []).extend(range(begin, min(row[Work.KV_END], position + 1)))
        for token, covered in seen.items():
            request = int(np.searchsorted(metadata.query_start_loc.numpy(), token, side="right")) - 1
            position = lens[request][1] - (int(metadata.query_start_loc[request + 1]) - token)
            assert covered == list(range(options.first_seen(position), position + 1))
        places = work.rows[:, Work.PARTIAL] + work.rows[:, Work.PART]
        assert sorted(places.tolist()) == list(range(work.partials))
        assert set(work.rows[:, Work.TASK].tolist()) == set(range(work.tasks))


def test_a_window_at_a_long_context_is_no_more_work_than_the_window(make_batch, small):
    metadata = make_batch(CpuKernels(torch.float32), small, [(1, 16_000), (30, 16_030)]).metadata
    options = AttentionOptions(1.0, window=512)
    for work, slack in ((decode_work(metadata, options), 0), (prefill_work(metadata, 16, options), 15)):
        read = work.rows[:, Work.KV_END] - work.rows[:, Work.KV_START]
        assert np.bincount(work.rows[:, Work.TASK], weights=read).max() < 512 + slack + CHUNK


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("window", {"window": 0}),
        ("chunk", {"chunk": -4}),
        ("window, chunk", {"window": 4, "chunk": 4}),
        ("soft_cap", {"soft_cap": 0.0}),
        ("soft_cap", {"soft_cap": math.inf}),
        ("scale", {"scale": math.nan}),
        ("sinks", {"sinks": torch.zeros(2, 2)}),
        ("sinks", {"sinks": torch.zeros(2, dtype=torch.int64)}),
    ],
)
def test_options_that_make_no_sense_are_refused(name, values):
    with pytest.raises(InvalidArgumentError, match=f"^{name} must be"):
        AttentionOptions(**{"scale": 1.0, **values})


@pytest.mark.parametrize("make_kernels", [lambda: CpuKernels(torch.float32)], ids=["cpu"])
def test_sinks_of_another_number_of_heads_are_refused(make_batch, small, make_kernels):
    batch = make_batch(make_kernels(), small, [(1, 4)])
    batch.options = AttentionOptions(1.0, sinks=torch.zeros(5))
    with pytest.raises(InvalidArgumentError, match=r"sinks must be \[6\]"):
        batch.run()
