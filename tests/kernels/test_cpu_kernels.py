"""The compiled CPU kernels do not depend on company or threads, and are right on other processors, too."""

from __future__ import annotations

import threading

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.kernels import reference
from nbengine.kernels.cpu import attention_functions
from nbengine.kernels.cpu import backend as cpu_backend
from nbengine.kernels.cpu import elements as cpu_elements
from nbengine.kernels.cpu import jit as cpu_jit
from nbengine.kernels.cpu import trials as cpu_trials
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.cpu.layout import DECODE_PART, PREFILL_PART, Work
from nbengine.kernels.cpu.plan import decode_work, prefill_work
from tests.support.thorough import amount

MIXED = [(1, 700), (1, 3), (1, 129), (40, 333), (5, 5)]

requests = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 300)))


@pytest.fixture
def small(make_shape):
    return make_shape(6, 2, 32, 16)


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(max_examples=amount(12, thorough=800), deadline=None)
@given(lens=st.lists(requests, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_batch_equals_the_reference(make_batch, make_shape, assert_close, lens, seed):
    lens.sort(key=lambda pair: pair[0] > 1)
    batch = make_batch(CpuKernels(torch.float32), make_shape(6, 2, 32, 16), lens, seed=seed)
    assert_close(batch.run(), batch.expected())


def test_result_does_not_depend_on_the_number_of_threads(make_batch, small, torch_threads):
    outputs = []
    for threads in (1, 2, 3, 7):
        torch_threads(threads)
        outputs.append(make_batch(CpuKernels(torch.bfloat16), small, MIXED, torch.bfloat16).run())
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_request_gets_the_same_result_alone_and_in_company(make_batch, small):
    together = make_batch(CpuKernels(torch.float32), small, MIXED)
    alone = make_batch(CpuKernels(torch.float32), small, MIXED[:1])
    first_blocks = alone.metadata.block_table[0, :-1].long()
    source = together.metadata.block_table[0, : len(first_blocks)].long()
    alone.kv_cache[:, first_blocks] = together.kv_cache[:, source]
    alone.query[:] = together.query[:1]
    assert torch.equal(alone.run(), together.run()[:1])


def test_prefill_on_a_context_of_several_parts_is_merged(make_batch, small, assert_close):
    lens = [(20, PREFILL_PART + 10), (2, PREFILL_PART + 300)]
    batch = make_batch(CpuKernels(torch.float32), small, lens)
    assert_close(batch.run(), batch.expected())


def test_layers_of_a_step_share_its_plan(make_batch, small, assert_close):
    batch = make_batch(CpuKernels(torch.float32), small, MIXED)
    first = batch.run()
    plan = batch.metadata.plan
    batch.query *= 0.5
    assert_close(batch.run(), batch.expected())
    assert batch.metadata.plan is plan
    batch.query *= 2
    assert torch.equal(batch.run(), first)


def test_a_small_step_after_a_large_one_reuses_its_scratch_memory(make_batch, small, assert_close):
    kernels = CpuKernels(torch.float32)
    for lens in (MIXED, [(1, 300)], [(1, 900)] * 9, MIXED):
        batch = make_batch(kernels, small, lens)
        assert_close(batch.run(), batch.expected())


def test_instances_in_different_threads_do_not_disturb_each_other(make_batch, small, assert_close):
    batches = [make_batch(CpuKernels(torch.float32), small, MIXED, seed=seed) for seed in range(3)]
    outputs: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(batches))}
    start = threading.Barrier(len(batches))

    def work(i: int) -> None:
        start.wait(timeout=60)
        outputs[i] = [batches[i].run() for _ in range(5)]

    workers = [threading.Thread(target=work, args=(i,)) for i in outputs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    for i, batch in enumerate(batches):
        assert len(outputs[i]) == 5
        for output in outputs[i]:
            assert_close(output, batch.expected())


@pytest.mark.skipif(
    not llvm.get_process_triple().startswith("x86_64"), reason="emulates older x86 processors"
)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["haswell", "nehalem"])
def test_a_processor_with_narrower_vectors_gets_the_same_result(
    monkeypatch, make_batch, small, assert_close, name, cache_dtype
):
    newer = ("avx512", "amx", "avx10", "avxvnni", "vaes", "vpclmul", "gfni", "sha512")
    newer += ("avx", "fma", "f16c", "bmi") if name == "nehalem" else ()

    class Features(dict):
        def flatten(self):
            return ",".join(("+" if present else "-") + feature for feature, present in self.items())

    features = Features(
        (feature, present and not feature.startswith(newer))
        for feature, present in llvm.get_host_cpu_features().items()
    )
    older = cpu_jit.Processor(name, features)
    monkeypatch.setattr(cpu_jit, "host_processor", lambda: older)
    monkeypatch.setattr(cpu_trials, "host_processor", lambda: older)
    monkeypatch.setattr(cpu_elements, "host_processor", lambda: older)
    for function in (attention_functions.compile_attention, attention_functions.compile_write_kv):
        monkeypatch.setattr(cpu_backend, function.__name__, function.__wrapped__)
    kernels, lens = CpuKernels(cache_dtype, torch.bfloat16), MIXED[1:3] + MIXED[4:]
    batch = make_batch(kernels, small, lens, torch.bfloat16, cache_dtype=cache_dtype)
    assert_close(batch.run(), batch.expected())
    written = torch.full_like(batch.kv_cache, 7)
    expected = written.clone()
    kernels.write_kv(batch.key, batch.value, written, batch.all_slots)
    reference.write_kv(batch.key, batch.value, expected, batch.all_slots, keys_transposed=True)
    assert torch.equal(written, expected)
    assert cpu_elements.supports(torch.float16) is (name == "haswell")


def test_tensors_of_another_type_are_refused_before_they_are_read(make_batch, small):
    batch = make_batch(CpuKernels(torch.float32), small, [(1, 4)])
    kernels, metadata = batch.metadata.kernels, batch.metadata
    with pytest.raises(InvalidArgumentError, match=r"query\.dtype"):
        kernels.paged_attention(batch.query.bfloat16(), batch.kv_cache, metadata, batch.options)
    with pytest.raises(InvalidArgumentError, match="kv_cache"):
        kernels.paged_attention(batch.query, batch.kv_cache.bfloat16(), metadata, batch.options)
    with pytest.raises(InvalidArgumentError, match=r"value\.dtype"):
        kernels.write_kv(batch.key, batch.value.half(), batch.kv_cache, metadata.slot_mapping)
    with pytest.raises(InvalidArgumentError, match="slot_mapping"):
        kernels.write_kv(batch.key, batch.value, batch.kv_cache, metadata.slot_mapping.int())
    metadata.block_table = metadata.block_table.long()
    with pytest.raises(InvalidArgumentError, match="block_table"):
        batch.run()


def test_warm_up_leaves_nothing_to_compile(make_batch, make_shape, assert_close, monkeypatch):
    kernels = CpuKernels(torch.float32)
    kernels.warm_up(num_heads=10, num_kv_heads=2, head_dim=24, block_size=4)

    def refuse(*args: object) -> None:
        raise AssertionError("compiled during a step")

    batch = make_batch(kernels, make_shape(10, 2, 24, 4), [(1, 9), (3, 3)])
    monkeypatch.setattr(attention_functions, "compile_tried", refuse)
    kernels.write_kv(batch.key, batch.value, batch.kv_cache, batch.all_slots)
    assert_close(batch.run(), batch.expected())


def test_work_covers_every_query_and_every_visible_token_once(make_batch, small):
    metadata = make_batch(CpuKernels(torch.float32), small, [*MIXED[:3], (40, 5000), (97, 97)]).metadata
    for work, limit in ((decode_work(metadata), 1), (prefill_work(metadata, max_tokens=16), 16)):
        assert (work.rows[:, Work.TOKENS] <= limit).all()
        seen: dict[int, list[tuple[int, int]]] = {}
        for row in work.rows.tolist():
            request, first, tokens = row[Work.REQUEST], row[Work.FIRST_TOKEN], row[Work.TOKENS]
            start = int(metadata.query_start_loc[request])
            context = int(metadata.seq_lens[request]) - (int(metadata.query_start_loc[request + 1]) - start)
            assert row[Work.VISIBLE] == context + (first - start) + 1
            for token in range(first, first + tokens):
                end = min(row[Work.KV_END], context + (token - start) + 1)
                seen.setdefault(token, []).append((row[Work.KV_START], end))
        for token, ranges in seen.items():
            request = int(np.searchsorted(metadata.query_start_loc.numpy(), token, side="right")) - 1
            behind = int(metadata.query_start_loc[request + 1]) - token - 1
            covered = [t for start, end in ranges for t in range(start, end)]
            assert covered == list(range(int(metadata.seq_lens[request]) - behind))
        places = work.rows[:, Work.PARTIAL] + work.rows[:, Work.PART]
        assert sorted(places.tolist()) == list(range(work.partials))
        assert set(work.rows[:, Work.TASK].tolist()) == set(range(work.tasks))
    assert (
        decode_work(metadata).rows[:, Work.KV_END] - decode_work(metadata).rows[:, Work.KV_START]
    ).max() == (DECODE_PART)
