"""The pages of a KV cache on the CPU are taken in the background."""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from nbengine.config import EngineConfig
from nbengine.kernels.cpu.huge_pages import (
    HUGE_PAGE,
    can_take_pages,
    take_huge_pages,
    zeros_in_huge_pages,
)
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.sampling_params import SamplingParams
from nbengine.worker import model_runner
from nbengine.worker.memory import kv_pages
from nbengine.worker.memory.kv_pages import KVPages
from nbengine.worker.worker import Worker
from tests.support.resident import resident_bytes

takes_pages = pytest.mark.skipif(not can_take_pages(), reason="the system takes no pages ahead of their use")
SHAPE = (2, 1000, 4, 16, 64)


def caches(count: int) -> list[Tensor]:
    return [zeros_in_huge_pages(SHAPE, torch.float32) for _ in range(count)]


@takes_pages
def test_a_new_cache_has_no_memory_until_all_of_it_is_taken():
    tensors = caches(2)
    storages = [tensor.untyped_storage() for tensor in tensors]
    assert max(map(resident_bytes, storages)) < tensors[0].nbytes // 10
    KVPages(tensors).join()
    assert min(map(resident_bytes, storages)) >= tensors[0].nbytes


def caches_before(border: int) -> list[Tensor]:
    """Caches that begin `border` bytes before a border of huge pages."""
    found = []
    for _ in range(2):
        memory = zeros_in_huge_pages((math.prod(SHAPE) * 4 + 2 * HUGE_PAGE,), torch.uint8)
        first = (-memory.data_ptr() - border) % HUGE_PAGE
        found.append(memory[first : first + math.prod(SHAPE) * 4].view(torch.float32).view(SHAPE))
    return found


@takes_pages
@pytest.mark.parametrize("border", [0, mmap.PAGESIZE, 4 * mmap.PAGESIZE, HUGE_PAGE // 2])
def test_the_first_steps_take_the_small_pages_that_they_need(monkeypatch, border: int):
    """Until the background comes to them, wherever a cache begins."""
    started, go_on = threading.Event(), threading.Event()

    def wait(*piece: int) -> bool:
        started.set()
        return go_on.wait(60) and take_huge_pages(*piece)

    monkeypatch.setattr(kv_pages, "take_huge_pages", wait)
    tensors = caches_before(border)
    storages = [tensor.untyped_storage() for tensor in tensors]
    pages = KVPages(tensors)
    assert started.wait(60)
    for tensor in tensors:
        tensor[:, :4] = 1
    resident = sum(map(resident_bytes, storages))
    go_on.set()
    pages.join()
    halves, written = 2 * len(tensors), sum(tensor[:, :4].nbytes for tensor in tensors)
    # Either end of what is written in a half may lie in a page with something else.
    assert written <= resident <= written + halves * mmap.PAGESIZE
    for tensor in tensors:
        assert resident_bytes(tensor.untyped_storage()) >= tensor.nbytes
        assert int(tensor.count_nonzero()) == tensor[:, :4].numel()


@takes_pages
def test_what_steps_write_meanwhile_stays():
    tensors = caches(3)
    pages = KVPages(tensors)
    for block in range(SHAPE[1]):
        for number, tensor in enumerate(tensors):
            tensor[:, block] = block + number
    pages.join()
    expected = torch.arange(SHAPE[1], dtype=torch.float32)
    for number, tensor in enumerate(tensors):
        assert (tensor == (expected + number)[None, :, None, None, None]).all()


@takes_pages
def test_a_stopped_thread_has_ended_and_takes_no_more(monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    taken = []

    def take(address: int, num_bytes: int) -> bool:
        taken.append(num_bytes)
        started.set()
        return go_on.wait(60)

    monkeypatch.setattr(kv_pages, "take_huge_pages", take)
    pages = KVPages(caches(2))
    assert started.wait(60)
    stopped = pages._is_stopped
    stop = stopped.set
    monkeypatch.setattr(stopped, "set", lambda: (stop(), go_on.set()))
    pages.stop()
    assert "kv-pages" not in {thread.name for thread in threading.enumerate()}
    assert len(taken) == 1


@takes_pages
def test_while_a_step_is_computed_there_is_a_pause_before_each_piece(monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    pieces, pauses = [], []

    def take(*piece: int) -> bool:
        pieces.append(piece)
        started.set()
        return go_on.wait(60)

    monkeypatch.setattr(kv_pages, "take_huge_pages", take)
    pages = KVPages(caches(1))
    assert started.wait(60)
    monkeypatch.setattr(pages._is_stopped, "wait", pauses.append)
    seconds = itertools.count()
    monkeypatch.setattr(kv_pages.time, "thread_time", lambda: next(seconds))
    with pages:
        go_on.set()
        pages.join()
    assert pauses[1:] == [kv_pages.PAUSES] * (len(pieces) - 2)
    assert len(pauses) == len(pieces) - 1
    assert len(pieces) > 2


@takes_pages
def test_between_steps_nothing_is_waited_for(monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    pauses = []

    def take(*piece: int) -> bool:
        started.set()
        return go_on.wait(60)

    monkeypatch.setattr(kv_pages, "take_huge_pages", take)
    pages = KVPages(caches(1))
    assert started.wait(60)
    monkeypatch.setattr(pages._is_stopped, "wait", pauses.append)
    with pages:
        pass
    go_on.set()
    pages.join()
    assert not pauses


@takes_pages
def test_memory_that_runs_out_is_told_and_ends_nothing(monkeypatch, caplog):
    monkeypatch.setattr(kv_pages, "take_huge_pages", lambda address, num_bytes: False)
    with caplog.at_level(logging.WARNING):
        KVPages(caches(1)).join()
    assert "memory is short: the KV cache of 31.2 MiB is taken as it is needed" in caplog.text


@takes_pages
@pytest.mark.parametrize("shape", [SHAPE, (1, *SHAPE[1:]), (2, 3, 5)], ids=["halves", "latents", "small"])
def test_the_pieces_are_huge_pages_that_cover_each_cache_once(monkeypatch, shape):
    pieces = []
    monkeypatch.setattr(kv_pages, "take_huge_pages", lambda *piece: pieces.append(piece) or True)
    tensors = [zeros_in_huge_pages(shape, torch.float32) for _ in range(2)]
    KVPages(tensors).join()
    for tensor in tensors:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        own = sorted(piece for piece in pieces if start <= piece[0] < end)
        assert [first for first, _ in own] == [
            start,
            *range(start // HUGE_PAGE * HUGE_PAGE + HUGE_PAGE, end, HUGE_PAGE),
        ]
        assert [first + size for first, size in own] == [first for first, _ in own[1:]] + [end]


@takes_pages
def test_the_low_blocks_of_all_halves_come_first(monkeypatch):
    pieces = []
    monkeypatch.setattr(kv_pages, "take_huge_pages", lambda *piece: pieces.append(piece) or True)
    tensors = caches(2)
    KVPages(tensors).join()
    halves = [half for tensor in tensors for half in tensor]
    for place, half in enumerate(halves):
        first, size = pieces[place]
        assert first <= half.data_ptr() < first + size
    for tensor in tensors:
        split = tensor[1].data_ptr() // HUGE_PAGE * HUGE_PAGE
        for low, high in ((tensor.data_ptr(), split), (split, tensor.data_ptr() + tensor.nbytes)):
            own = [first for first, _ in pieces if low <= first < high]
            assert own == sorted(own)


@takes_pages
def test_the_pages_are_taken_when_everything_else_is_prepared(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tiny_config)
    worker.init_device()
    worker.load_model()
    model, runner = worker.model, worker.model_runner
    assert isinstance(model, DecoderForCausalLM)
    assert isinstance(runner, model_runner.ModelRunner)
    order: list[str] = []

    def note(name: str, call: Any) -> Any:
        def noted(*args: Any) -> Any:
            order.append(name)
            return call(*args)

        return noted

    monkeypatch.setattr(model, "warm_up", note("prepared", model.warm_up))
    monkeypatch.setattr(runner, "_new_batch", note("batch", runner._new_batch))
    monkeypatch.setattr(model_runner, "KVPages", note("pages", KVPages))
    worker.initialize_kv_cache(16)
    assert order == ["prepared", "batch", "pages"]


@takes_pages
def test_a_step_holds_the_pages_back_while_it_is_computed(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    is_computed = False
    computed: list[bool] = []

    class Noted(KVPages):
        def __enter__(self) -> None:
            nonlocal is_computed
            is_computed = True

        def __exit__(self, *failure: object) -> None:
            nonlocal is_computed
            is_computed = False

    monkeypatch.setattr(model_runner, "KVPages", Noted)
    run = driver()
    forward = run.runner._stage.forward

    def noted(*args: Any) -> Any:
        computed.append(is_computed)
        return forward(*args)

    monkeypatch.setattr(run.runner._stage, "forward", noted)
    run.add("0", [1, 2, 3], SamplingParams(temperature=0), max_tokens=3)
    run.run()
    assert computed == [True] * 3
    assert not is_computed
