"""Shared memory between ranks, here between threads of one process."""

from __future__ import annotations

import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nbengine.distributed import shm_communicator
from nbengine.distributed.shared_memory import Peers, SharedMemory, create_memory, patience, unlink
from nbengine.distributed.shm_communicator import ShmCommunicator
from nbengine.distributed.shm_link import SLOTS, ShmLink
from nbengine.errors import EngineStartError, InvalidArgumentError, QueueClosedError


def link_ends(directory, max_tensor_bytes=4096):
    handle = ShmLink.reserve(str(directory), max_tensor_bytes)
    memories = [SharedMemory(handle) for _ in range(2)]
    unlink(handle)
    return [ShmLink(memory, patience(memory, short=False), Peers({})) for memory in memories]


def communicators(directory, size):
    handle = ShmCommunicator.reserve(str(directory), size)
    memories = [SharedMemory(handle) for _ in range(size)]
    unlink(handle)
    return [
        ShmCommunicator(memory, rank, size, patience(memory, short=False), Peers({}))
        for rank, memory in enumerate(memories)
    ]


def on_threads(ends, body):
    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(body, ends))


def test_the_file_is_its_owners_alone_and_its_pages_are_reserved(tmp_path):
    handle = create_memory(str(tmp_path), 2, 100_000)
    status = os.stat(handle.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= handle.size
    unlink(handle)
    unlink(handle)
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_an_error_that_says_how_much_was_needed_and_leaves_nothing(tmp_path):
    with pytest.raises(EngineStartError, match=r"the 4294967296\.0 MiB of shared memory .* cannot be had in"):
        create_memory(str(tmp_path), 0, 2**52)
    with pytest.raises(EngineStartError, match=r"workers exchange tensors cannot be had in .*nowhere"):
        create_memory(str(tmp_path / "nowhere"), 0, 1)
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_until_the_last_tensor_in_it_is_gone(tmp_path):
    sender, receiver = link_ends(tmp_path)
    sender.send(torch.arange(4.0))
    received = receiver.receive((4,), torch.float32)
    for end in (sender, receiver):
        end.close()
    del sender, receiver
    assert received.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_shape_arrive_in_order(tmp_path, dtype):
    sender, receiver = link_ends(tmp_path, 40_000)
    shapes = [(1, 1), (3, 5), (100, 100), (0, 7), (2,), (50, 3)] * 20
    sent = [torch.randn(shape).to(dtype) for shape in shapes]

    def send_all():
        for x in sent:
            copy = x.clone()
            sender.send(copy)
            copy.fill_(9)

    thread = threading.Thread(target=send_all)
    thread.start()
    for x in sent:
        assert torch.equal(receiver.receive(x.shape, dtype), x)
    thread.join()


def test_the_sender_goes_on_until_all_slots_are_full_and_then_waits(tmp_path):
    sender, receiver = link_ends(tmp_path)
    sent = []

    def send_all():
        for number in range(6):
            sender.send(torch.full((3,), float(number)))
            sent.append(number)

    thread = threading.Thread(target=send_all)
    thread.start()
    while len(sent) < SLOTS:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(sent) == SLOTS
    # A received tensor is the caller's: its slot is not written again before the next call.
    first = receiver.receive((3,), torch.float32)
    time.sleep(0.05)
    assert len(sent) == SLOTS
    assert first.tolist() == [0, 0, 0]
    for number in range(1, 6):
        assert receiver.receive((3,), torch.float32).tolist() == [number] * 3
    thread.join()


def test_a_tensor_that_is_too_large_is_refused_at_both_ends(tmp_path):
    sender, receiver = link_ends(tmp_path, 4096)
    with pytest.raises(InvalidArgumentError, match=r"x.nbytes must be at most 4096, got 4100"):
        sender.send(torch.zeros(1025))
    with pytest.raises(InvalidArgumentError, match=r"x.nbytes must be at most 4096, got 4100"):
        receiver.receive((1025,), torch.float32)
    sender.send(torch.ones(1024))
    assert receiver.receive((1024,), torch.float32).sum() == 1024


def test_who_waits_learns_that_the_other_has_closed(tmp_path):
    sender, receiver = link_ends(tmp_path)
    threading.Timer(0.05, sender.close).start()
    with pytest.raises(QueueClosedError):
        receiver.receive((1,), torch.float32)


def test_what_was_sent_before_closing_still_arrives(tmp_path):
    sender, receiver = link_ends(tmp_path)
    sender.send(torch.ones(3))
    sender.close()
    assert receiver.receive((3,), torch.float32).tolist() == [1, 1, 1]
    with pytest.raises(QueueClosedError):
        receiver.receive((3,), torch.float32)


def test_the_sum_overwrites_a_contiguous_tensor_and_no_other(tmp_path):
    def body(communicator):
        x = torch.ones(4, 6)
        transposed = torch.ones(4, 6).t()
        return communicator.all_reduce(x) is x, communicator.all_reduce(transposed), transposed

    for same, total, given in on_threads(communicators(tmp_path, 2), body):
        assert same
        assert (total == 2).all()
        assert (given == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16])
def test_types_that_nothing_is_compiled_for_are_summed_too(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(shm_communicator, "supports", lambda dtype: False)
    parts = [(torch.randn(5, 3) * 100).to(dtype) for _ in range(3)]
    results = on_threads(communicators(tmp_path, 3), lambda end: end.all_reduce(parts[end.rank].clone()))
    wide = [part.float() if dtype is torch.float16 else part for part in parts]
    expected = (wide[0] + wide[1] + wide[2]).to(dtype)
    assert all(torch.equal(result, expected) for result in results)


def test_empty_tensors_and_scalars_of_a_row_can_be_exchanged(tmp_path):
    def body(communicator):
        empty = communicator.all_reduce(torch.ones(0, 4))
        gathered = communicator.all_gather(torch.full((1,), float(communicator.rank)))
        communicator.barrier()
        return empty.shape, communicator.all_gather(torch.ones(0, 4)).shape, gathered.tolist()

    assert on_threads(communicators(tmp_path, 2), body) == [((0, 4), (0, 8), [0, 1])] * 2


def test_a_rank_that_waits_learns_that_another_has_left(tmp_path):
    stays, leaves = communicators(tmp_path, 2)
    threading.Timer(0.05, leaves.close).start()
    with pytest.raises(QueueClosedError):
        stays.all_reduce(torch.ones(3))
