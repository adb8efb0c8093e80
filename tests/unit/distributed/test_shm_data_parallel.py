"""Rows of several engine cores through shared memory, here between threads of one process."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nbengine.distributed import shm_data_parallel
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.data_parallel import DataParallelEnd, RehearsalGroup, rehearsal
from nbengine.distributed.layout import RankLayout
from nbengine.distributed.row_counts import Word
from nbengine.distributed.shared_memory import Peers, SharedMemory, patience, unlink
from nbengine.distributed.shm_data_parallel import ShmDataParallelGroup
from nbengine.errors import NBEngineError, QueueClosedError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def groups(directory, size, max_tensor_bytes=20_000):
    handle = ShmDataParallelGroup.reserve(str(directory), size, max_tensor_bytes)
    memories = [SharedMemory(handle) for _ in range(size)]
    unlink(handle)
    return [
        ShmDataParallelGroup(memory, rank, size, patience(memory, short=False), Peers({}))
        for rank, memory in enumerate(memories)
    ]


def on_threads(ends, body):
    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(body, ends))


def values(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_rank_order(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_rows_arrive_in_rank_order_and_sums_are_rounded_once(tmp_path, size, dtype):
    """Of no, one and many rows, in tensors that take one round and several."""
    chooser = random.Random(size)
    plan = [
        ([chooser.choice((0, 0, 1, 2, 7, 150)) for _ in range(size)], chooser.choice((1, 33, 300)))
        for _ in range(25)
    ]

    def body(group):
        results = []
        for step, (counts, width) in enumerate(plan):
            group.begin_step(counts[group.rank])
            mine = values((counts[group.rank], width), dtype, 10 * step + group.rank)
            everything = values((sum(counts), width), dtype, 1000 + 10 * step + group.rank)
            results.append((group.gather(mine), group.reduce_scatter(everything)))
        return results

    results = on_threads(groups(tmp_path, size), body)
    for step, (counts, width) in enumerate(plan):
        rows = [values((count, width), dtype, 10 * step + rank) for rank, count in enumerate(counts)]
        terms = [values((sum(counts), width), dtype, 1000 + 10 * step + rank) for rank in range(size)]
        sums = in_rank_order(terms).split(counts)
        for rank in range(size):
            gathered, own = results[rank][step]
            assert torch.equal(gathered, torch.cat(rows))
            assert torch.equal(own, sums[rank])


def test_flags_and_broadcasts_are_in_step_with_rows(tmp_path):
    def body(group):
        for step in range(30):
            group.begin_step(step % 3)
            assert group.any(group.rank == step % 3) == (step % 3 < group.size)
            assert not group.any(False)
            x = torch.full((5000,), float(group.rank))
            group.broadcast(x, step % group.size)
            assert (x == step % group.size).all()
            assert len(group.gather(torch.zeros(step % 3, 4))) == group.size * (step % 3)

    on_threads(groups(tmp_path, 2), body)


def test_a_type_that_nothing_is_compiled_for_is_summed_too(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_data_parallel, "supports", lambda dtype: False)
    terms = [values((5, 40), torch.float16, rank) for rank in range(2)]

    def body(group):
        group.begin_step(2 + group.rank)
        return group.reduce_scatter(terms[group.rank])

    assert torch.equal(torch.cat(on_threads(groups(tmp_path, 2), body)), in_rank_order(terms))


def test_rows_that_were_not_announced_are_refused_before_anything_is_exchanged(tmp_path):
    def body(group):
        group.begin_step(2)
        for exchange, rows in ((group.gather, 3), (group.reduce_scatter, 2)):
            with pytest.raises(NBEngineError, match=f"{rows} rows where begin_step has announced"):
                exchange(torch.zeros(rows, 4))
        return group.gather(torch.ones(2, 4)).sum()

    assert on_threads(groups(tmp_path, 2), body) == [16, 16]


def test_engine_cores_that_are_not_at_the_same_place_are_told(tmp_path):
    """A dummy batch here and the question of an agreement there would otherwise be taken for each other."""

    def body(group):
        with pytest.raises(NBEngineError, match=f"engine cores \\[{1 - group.rank}\\] are at another place"):
            group.begin_step(1) if group.rank else group.any(True)

    on_threads(groups(tmp_path, 2), body)


def test_a_step_in_which_nobody_has_rows_costs_no_exchange(tmp_path):
    def body(group):
        group.begin_step(0)
        if group.rank:
            return None
        # The other one is not there for it.
        return group.gather(torch.empty(0, 4)).shape, group.reduce_scatter(torch.empty(0, 4)).shape

    assert on_threads(groups(tmp_path, 2), body) == [((0, 4), (0, 4)), None]


def test_a_rank_that_waits_learns_that_another_has_left(tmp_path):
    waiting, leaving = groups(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(waiting.begin_step, 1)
        time.sleep(0.05)
        leaving.close()
        with pytest.raises(QueueClosedError):
            future.result(timeout=60)


def test_large_tensors_go_through_memory_of_limited_size(tmp_path):
    handle = ShmDataParallelGroup.reserve(str(tmp_path), 4, 1 << 30)
    assert handle.data_bytes == 4 * 2 * shm_data_parallel.MAX_SLOT_BYTES
    unlink(handle)


@pytest.mark.parametrize("word", list(Word))
def test_a_word_says_what_its_number_means(word):
    numbers = [0, 1, 4096]
    assert word.decode([word.encode(number) for number in numbers]) == numbers
    other = next(each for each in Word if each is not word)
    with pytest.raises(NBEngineError, match=r"engine cores \[1\] are at another place"):
        word.decode([word.encode(1), other.encode(1)])


def test_a_rehearsal_needs_as_much_memory_and_nobody_else():
    end = DataParallelEnd()
    state = ParallelState(RankLayout(dp_rank=1, dp_size=3), dp=end)
    x = torch.arange(8.0).view(2, 4)
    with rehearsal(state):
        state.dp.begin_step(2)
        everything = state.dp.gather(x)
        assert everything.shape == (6, 4)
        assert torch.equal(state.dp.reduce_scatter(everything), x)
        assert state.dp.size == 3
    assert state.dp.size == 1
    with rehearsal(SINGLE):
        assert SINGLE.dp.gather(x) is x
    assert RehearsalGroup(2).gather(x).shape == (4, 4)


def test_an_object_that_holds_an_end_changes_group_with_it(tmp_path):
    first, second = groups(tmp_path, 2)
    end = DataParallelEnd(first)
    assert (end.rank, end.size) == (0, 2)
    end.switch(DataParallelEnd())
    assert (end.rank, end.size) == (0, 1)
    assert end.any(True)
    with pytest.raises(QueueClosedError):
        second.begin_step(1)
