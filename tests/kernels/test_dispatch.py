"""The dispatch chooses kernels for a device and the threads that run them, and warns where it has no fast
ones."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from types import SimpleNamespace

import pytest
import torch

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.cpu import elements as cpu_elements
from nbengine.kernels.cpu import threads as cpu_threads
from nbengine.kernels.cpu.backend import CpuKernels
from nbengine.kernels.dispatch import select_kernels
from nbengine.kernels.row_kernels import select_gate, select_pair_gate, select_rms_norm, select_rotation
from nbengine.kernels.torch.backend import TorchKernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_gets_compiled_kernels_without_a_warning(dtype, caplog):
    assert isinstance(select_kernels(CPU, dtype), CpuKernels)
    assert not caplog.records


@pytest.mark.parametrize(("device", "package"), [("cpu", "llvmlite"), ("cuda", "triton")])
def test_without_its_compiler_a_device_gets_plain_torch_and_a_warning(monkeypatch, caplog, device, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    assert isinstance(select_kernels(torch.device(device), torch.float32), TorchKernels)
    assert f"{package} is not installed" in caplog.text


def test_a_processor_without_half_precision_gets_plain_torch_for_it(monkeypatch, caplog):
    monkeypatch.setattr(cpu_elements, "supports", lambda dtype: dtype != torch.float16)
    assert isinstance(select_kernels(CPU, torch.float16), TorchKernels)
    assert "lacks an instruction" in caplog.text


def test_another_device_gets_plain_torch_and_a_warning(caplog):
    assert isinstance(select_kernels(torch.device("meta"), torch.float32), TorchKernels)
    assert "no kernels for this device" in caplog.text


def test_other_types_are_refused_by_name():
    with pytest.raises(InvalidArgumentError, match="dtype must be float32, bfloat16 or float16"):
        select_kernels(CPU, torch.float64)


class Weight(SimpleNamespace):
    """As much of a weight on a GPU as can be had without one."""

    def __len__(self):
        return self.size


def test_functions_of_rows_on_a_gpu_are_triton_s_but_for_float32(monkeypatch):
    rows = pytest.importorskip("nbengine.kernels.triton.row_functions", reason="Triton is not installed")
    for name in ("TritonRMSNorm", "TritonGate", "TritonPairGate", "TritonRotation"):
        monkeypatch.setattr(rows, name, lambda *_, name=name: name)
    cuda = torch.device("cuda")

    def select(dtype, size=64, activation="silu"):
        return [
            select_rms_norm(Weight(device=cuda, dtype=torch.float32, size=size), 1e-5, dtype),
            select_gate(cuda, dtype, size, activation),
            select_pair_gate(cuda, dtype, size, "sigmoid"),
            select_rotation(cuda, dtype, 2, size),
        ]

    every = ["TritonRMSNorm", "TritonGate", "TritonPairGate", "TritonRotation"]
    assert select(torch.bfloat16) == select(torch.float16, size=72) == every
    assert select(torch.float32) == [None] * 4
    assert select(torch.bfloat16, size=rows.MAX_ROW + 1) == [None, "TritonGate", "TritonPairGate", None]
    assert select(torch.bfloat16, activation="relu")[1] is None
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    assert select(torch.bfloat16) == [None] * 4


@pytest.mark.skipif(
    cpu_threads.openmp_parallel() is None, reason="torch's OpenMP runtime has no GOMP_parallel"
)
def test_the_runner_runs_on_as_many_threads_as_asked_and_waits_for_them():
    seen: list[tuple[int, int]] = []
    together = threading.Barrier(3)

    @ctypes.CFUNCTYPE(None, ctypes.c_int64)
    def kernel(argument: int) -> None:
        together.wait(timeout=60)
        seen.append((threading.get_native_id(), argument))

    address = ctypes.cast(kernel, ctypes.c_void_p).value
    cpu_threads.openmp_parallel()(address, 77, 3, 0)
    assert len({thread for thread, _ in seen}) == 3
    assert [argument for _, argument in seen] == [77] * 3


def test_without_a_common_openmp_runtime_the_calling_thread_runs_alone(
    monkeypatch, caplog, make_batch, make_shape, assert_close
):
    monkeypatch.setattr(cpu_threads, "_RUNTIMES", ("libno_such_runtime.so",))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    batch = make_batch(CpuKernels(torch.float32), make_shape(6, 2, 32, 16), [(1, 300), (9, 40)])
    assert "attention will run on one thread" in caplog.text
    assert_close(batch.run(), batch.expected())
