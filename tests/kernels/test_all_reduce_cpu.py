"""Exchanges through shared memory, with threads as ranks: the compiled code does not know the difference."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from nbengine.kernels.cpu import flags as cpu_flags
from nbengine.kernels.cpu.all_reduce import compile_all_gather, compile_all_reduce
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.exchange import SLOTS, ExchangeArguments
from nbengine.kernels.cpu.flags import FLAG_BYTES, FlagArguments, Patience, compile_flags
from tests.support.thorough import combinations

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATIENCES = {"looking": (1000, 0), "yielding": (0, 50), "sleeping": (0, 0)}
SLOT_BYTES = 4096


class Ranks:
    """Arguments of the ranks of a group in memory of this process, poisoned where nothing has been written."""

    def __init__(self, size: int, *, looks: tuple[int, int] = (100, 5), nap_ms: int = 50) -> None:
        self.size = size
        flags = FLAG_BYTES * (1 + size)
        self.memory = np.full(FLAG_BYTES + flags + size * SLOTS * SLOT_BYTES, 0xFF, np.uint8)
        start = -self.memory.ctypes.data % FLAG_BYTES
        self.memory[start : start + flags] = 0
        base = self.memory.ctypes.data + start
        patience = Patience(*looks, base, 0, nap_ms * 1_000_000)
        self.arguments = [
            ExchangeArguments(
                patience=patience,
                flags=base + FLAG_BYTES,
                slots=base + flags,
                slot_bytes=SLOT_BYTES,
                rank=rank,
                phase=1,
            )
            for rank in range(size)
        ]
        self.gave_up = threading.Event()

    def run(self, body):
        """`body(rank)` in a thread each; the results by rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(body, range(self.size)))

    def call(self, rank, function, x, total, **fields):
        arguments = self.arguments[rank]
        for name, value in {**fields, "x": x.data_ptr(), "total": total, "position": 0, "stage": 0}.items():
            setattr(arguments, name, value)
        while True:
            function.call(ctypes.addressof(arguments))
            if arguments.done:
                return
            self.gave_up.set()

    def all_reduce(self, rank, x, name):
        function = getattr(compile_all_reduce(self.size, ELEMENTS[x.dtype]), name)
        self.call(rank, function, x, x.numel())
        return x

    def all_gather(self, rank, x):
        output = x.new_empty((x.shape[0], x.shape[1] * self.size))
        width = x.shape[1] * x.itemsize
        self.call(rank, compile_all_gather(self.size), x, x.nbytes, output=output.data_ptr(), width=width)
        return output


def random(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_rank_order(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize(
    ("name", "size", "dtype"), combinations(["one_phase", "two_phases"], [2, 3, 4], DTYPES)
)
def test_every_rank_gets_the_sum_in_rank_order_rounded_once(name, size, dtype):
    ranks = Ranks(size)
    counts = [1, 15, 16, 63, 64, 65, 1000, 1024, 1025, 2048, 2049, 7777]
    parts = [[random(count, dtype, 100 * rank + i) for i, count in enumerate(counts)] for rank in range(size)]
    results = ranks.run(lambda rank: [ranks.all_reduce(rank, part.clone(), name) for part in parts[rank]])
    for given, *sums in zip(zip(*parts, strict=True), *results, strict=True):
        for actual in sums:
            assert torch.equal(actual, in_rank_order(given))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_all_rows_side_by_side(size, dtype):
    ranks = Ranks(size)
    shapes = [(1, 1), (3, 7), (1, 5000), (40, 33), (2, 4096)]
    parts = [
        [(random(shape, torch.float32, 9 * rank + i) * 50).to(dtype) for i, shape in enumerate(shapes)]
        for rank in range(size)
    ]
    results = ranks.run(lambda rank: [ranks.all_gather(rank, part) for part in parts[rank]])
    for given, *gathered in zip(zip(*parts, strict=True), *results, strict=True):
        assert all(torch.equal(each, torch.cat(given, dim=-1)) for each in gathered)


@pytest.mark.parametrize("looks", PATIENCES.values(), ids=PATIENCES)
@pytest.mark.parametrize("size", [2, 5])
def test_random_exchanges_at_a_random_pace_are_right_however_one_waits(size, looks):
    ranks = Ranks(size, looks=looks)
    plan = np.random.default_rng(size)
    calls = [
        (plan.choice(["one_phase", "two_phases", "all_gather"]), int(plan.integers(1, 3000)))
        for _ in range(300)
    ]

    def rank_body(rank):
        delays = np.random.default_rng(rank)
        results = []
        for i, (name, count) in enumerate(calls):
            if delays.random() < 0.1:
                time.sleep(delays.random() * 1e-3)
            x = random((1, count), torch.float32, 1000 * rank + i)
            results.append(
                ranks.all_gather(rank, x) if name == "all_gather" else ranks.all_reduce(rank, x, name)
            )
        return results

    results = ranks.run(rank_body)
    for i, (name, count) in enumerate(calls):
        parts = [random((1, count), torch.float32, 1000 * rank + i) for rank in range(size)]
        expected = torch.cat(parts, dim=-1) if name == "all_gather" else in_rank_order(parts)
        assert all(torch.equal(each[i], expected) for each in results), (i, name, count)


@pytest.mark.parametrize("name", ["one_phase", "two_phases", "all_gather"])
def test_a_call_that_gave_up_waiting_goes_on_where_it_was(name):
    ranks = Ranks(3, nap_ms=1)
    parts = [random((1, 9000), torch.float32, rank) for rank in range(3)]

    def rank_body(rank):
        # The last one comes when another one has waited in vain.
        assert rank < 2 or ranks.gave_up.wait(60)
        x = parts[rank].clone()
        return ranks.all_gather(rank, x) if name == "all_gather" else ranks.all_reduce(rank, x, name)

    expected = torch.cat(parts, dim=-1) if name == "all_gather" else in_rank_order(parts)
    assert all(torch.equal(each, expected) for each in ranks.run(rank_body))


def test_nothing_is_written_beside_the_tensor():
    ranks = Ranks(2)
    for name in ("one_phase", "two_phases"):
        for count in (1, 17, 100, 2000):
            padded = [torch.full((count + 64,), 7.0) for _ in range(2)]
            ranks.run(lambda rank: ranks.all_reduce(rank, padded[rank][32 : 32 + count], name))  # noqa: B023
            for x in padded:
                assert (x[32 : 32 + count] == 14).all()
                assert (x[:32] == 7).all()
                assert (x[32 + count :] == 7).all()


def test_not_a_number_and_infinity_come_through():
    ranks = Ranks(2)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf, -0.0, 3e38])
    other = torch.tensor([1.0, 1.0, 1.0, -torch.inf, -0.0, 3e38])
    for sums in ranks.run(lambda rank: ranks.all_reduce(rank, (special, other)[rank].clone(), "one_phase")):
        assert torch.equal(sums.isnan(), torch.tensor([True, False, False, True, False, False]))
        assert sums[[1, 2, 5]].tolist() == [torch.inf, -torch.inf, torch.inf]
        assert torch.signbit(sums[4])


@pytest.fixture(params=["futex", "polling"])
def flag(request, monkeypatch):
    """A flag, and the functions on it, with and without the kernel's help."""
    if request.param == "polling":
        monkeypatch.setattr(cpu_flags, "futex_number", lambda: None)
    elif cpu_flags.futex_number() is None:
        pytest.skip("no futex here")
    functions = compile_flags.__wrapped__()
    memory = np.zeros(3 * FLAG_BYTES, np.uint8)
    base = memory.ctypes.data + -memory.ctypes.data % FLAG_BYTES
    return functions, memory, base


def flag_arguments(base, count, nap_seconds):
    patience = Patience(10, 2, base, nap_seconds, 1_000_000)
    return FlagArguments(patience=patience, flag=base + FLAG_BYTES, count=count)


def test_who_sleeps_is_woken_when_the_flag_is_raised(flag):
    functions, _, base = flag
    waiting, raising = flag_arguments(base, 3, 20), flag_arguments(base, 3, 20)
    thread = threading.Thread(target=functions.wait_for.call, args=(ctypes.addressof(waiting),))
    start = time.monotonic()
    thread.start()
    sleepers = ctypes.c_int64.from_address(base + FLAG_BYTES + 8)
    # Without a futex nobody signs up as a sleeper.
    while cpu_flags.futex_number() is not None and not sleepers.value:
        time.sleep(0.001)
    functions.announce.call(ctypes.addressof(raising))
    thread.join()
    assert waiting.done
    assert time.monotonic() - start < 60
    assert sleepers.value == 0


def test_a_flag_raised_further_than_needed_is_enough(flag):
    functions, _, base = flag
    raising, waiting = flag_arguments(base, 2**40 + 5, 0), flag_arguments(base, 2**40, 0)
    functions.announce.call(ctypes.addressof(raising))
    functions.wait_for.call(ctypes.addressof(waiting))
    assert waiting.done


def test_waiting_ends_without_avail_after_some_naps_and_at_once_when_it_is_over(flag):
    functions, _, base = flag
    waiting = flag_arguments(base, 1, 0)
    functions.wait_for.call(ctypes.addressof(waiting))
    assert not waiting.done
    ctypes.c_int64.from_address(base).value = 1
    patient = flag_arguments(base, 1, 2)
    start = time.monotonic()
    functions.wait_for.call(ctypes.addressof(patient))
    assert not patient.done
    assert time.monotonic() - start < 60


def test_the_flags_work_on_this_machine():
    assert cpu_flags.available()
