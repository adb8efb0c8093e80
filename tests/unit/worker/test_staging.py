"""Memory that is filled again and again, for a device that reads it whenever it comes to it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from nbengine.worker.batch.staging import StagingBuffer
from tests.unit.worker.late_device import DEVICE, LateDevice

MakeLate = Callable[[int, float], LateDevice]


@pytest.fixture
def make_late(monkeypatch: pytest.MonkeyPatch) -> MakeLate:
    def make(seed: int, haste: float) -> LateDevice:
        late = LateDevice(seed, haste)
        monkeypatch.setattr(torch, "Event", late.event)
        return late

    return make


@pytest.mark.parametrize("seed", range(4))
def test_a_device_reads_what_was_handed_over_however_late_it_is(make_late: MakeLate, seed: int) -> None:
    random, late = Random(seed), make_late(seed, [0, 0.05, 0.2, 0.8][seed])
    with late, torch.inference_mode():
        buffer = StagingBuffer(8, torch.int64, DEVICE)
        given, read = [], []
        for number in range(200):
            count = random.randint(0, 8)
            values = [8 * number + place for place in range(count)]
            buffer.array[:count] = values
            given.append(values)
            read.append(buffer.tensor(count).clone())
        assert [tensor.tolist() for tensor in read] == given


def test_nothing_is_waited_for_while_the_device_is_less_than_two_steps_behind(make_late: MakeLate) -> None:
    late = make_late(0, 0)
    ends = []
    with late, torch.inference_mode():
        buffer = StagingBuffer(8, torch.int64, DEVICE)
        for number in range(20):
            buffer.array[:] = number
            buffer.tensor(8).clone()
            ends.append(late.num_given)
            if number:
                late.advance(ends[-2])
        assert late.num_waits == 0
        assert late.most_undone > 0
        buffer.array[:] = 20
        buffer.tensor(8)
        assert late.num_waits == 0
        buffer.array[:] = 21
    assert late.num_waits == 1


def test_on_a_cpu_an_array_is_handed_over_as_it_is() -> None:
    buffer = StagingBuffer(4, torch.float64, torch.device("cpu"))
    buffer.array[:] = 1, 2, 3, 4
    assert buffer.tensor(3).tolist() == [1, 2, 3]
    assert buffer.tensor(3).data_ptr() == buffer.tensor(4).data_ptr() == buffer.array.ctypes.data


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_busy_gpu_reads_what_was_handed_over() -> None:
    buffer = StagingBuffer(1 << 16, torch.int64, torch.device("cuda"))
    read = []
    for number in range(20):
        torch.cuda._sleep(20_000_000)
        buffer.array[:] = number
        read.append(buffer.tensor(1 << 16).clone())
    assert [(tensor == number).all().item() for number, tensor in enumerate(read)] == [True] * 20
