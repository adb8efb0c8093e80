"""Compiled kernels on disk: found again, and of no harm whatever happens to the files."""

from __future__ import annotations

import ctypes
import logging
import os

import numpy as np
import pytest

from nbengine.kernels.cpu import jit as cpu_jit
from nbengine.kernels.cpu.codegen import define
from nbengine.worker import kernel_store, worker
from nbengine.worker.kernel_store import KernelStore
from nbengine.worker.worker import Worker


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kernels"


@pytest.fixture
def compilations(monkeypatch, directory):
    """The texts that LLVM had to compile while a store in `directory` is in use."""
    texts = []
    real = cpu_jit._compile
    monkeypatch.setattr(cpu_jit, "_store", KernelStore(directory))
    monkeypatch.setattr(cpu_jit, "_compile", lambda text, machine: texts.append(text) or real(text, machine))
    return texts


def define_add(module, number):
    define(
        module,
        "function",
        1,
        lambda code, args: code.store_int(code.load_int(args) + number, args),
        exported=True,
    )


def add(number):
    """Compile a kernel that adds `number` to an int64, and return what it makes of 10."""
    (function,) = cpu_jit.compile_module(define_add, ["function"], number)
    memory = np.array([10], np.int64)
    function.call(ctypes.c_int64(memory.ctypes.data))
    return int(memory[0])


def test_a_kernel_is_compiled_once_and_then_taken_from_the_disk(compilations, directory):
    assert [add(3), add(3), add(3)] == [13] * 3
    assert len(compilations) == 1
    (file,) = directory.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert directory.stat().st_mode & 0o077 == 0


def test_another_kernel_and_another_processor_have_files_of_their_own(compilations, monkeypatch):
    assert [add(3), add(4)] == [13, 14]
    name = cpu_jit.host_processor().name
    features = cpu_jit.llvm.get_host_cpu_features()
    features["sse4a"] = not features.get("sse4a", False)
    monkeypatch.setattr(cpu_jit, "host_processor", lambda: cpu_jit.Processor(name, features))
    assert add(3) == 13
    assert len(compilations) == 3


def test_what_is_kept_is_found_without_building_it_again_until_the_sources_change(compilations, monkeypatch):
    built, real = [], define
    monkeypatch.setitem(globals(), "define", lambda *rest, **named: built.append(1) or real(*rest, **named))
    assert [add(3), add(3), add(4)] == [13, 13, 14]
    assert len(built) == 2
    monkeypatch.setattr(cpu_jit, "_digest_of", lambda _name: "changed")
    assert add(3) == 13
    assert len(built) == 3


@pytest.mark.parametrize(
    ("changed", "depends"),
    [
        ("cpu.products", True),
        ("cpu.records", True),
        ("quantized", True),
        ("cpu.jit", True),
        ("cpu.trials", True),
        ("cpu.product_trials", False),
        ("cpu.routing", False),
        ("triton.experts", False),
    ],
)
def test_code_depends_on_what_its_module_imports_and_on_no_more(changed, depends, monkeypatch):
    before = {name: cpu_jit._digest_of(f"nbengine.kernels.{name}") for name in ("cpu.products", changed)}
    elsewhere = cpu_jit._digest_of(__name__)
    real, name = cpu_jit._source, f"nbengine.kernels.{changed}"
    other = ("other", real(name)[1])
    monkeypatch.setattr(cpu_jit, "_source", lambda each: other if each == name else real(each))
    after = {name: cpu_jit._digest_of.__wrapped__(f"nbengine.kernels.{name}") for name in before}
    assert after[changed] != before[changed]
    assert (after["cpu.products"] != before["cpu.products"]) is depends
    assert cpu_jit._digest_of.__wrapped__(__name__) != elsewhere


def test_what_a_function_inside_another_one_builds_is_not_kept(compilations, directory):
    """Its name and arguments do not say what it builds."""

    def build(number):
        def build_it(module):
            define_add(module, number)

        (function,) = cpu_jit.compile_module(build_it, ["function"])
        memory = np.array([10], np.int64)
        function.call(ctypes.c_int64(memory.ctypes.data))
        return int(memory[0])

    assert [build(3), build(4)] == [13, 14]
    assert len(compilations) == 2
    assert not directory.exists()


@pytest.mark.parametrize("damage", ["cut off", "one bit", "empty", "another's code"])
def test_a_damaged_file_is_compiled_again_and_mended(compilations, directory, damage, caplog):
    add(3)
    (file,) = directory.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut off":
        content = content[: len(content) // 2]
    elif damage == "one bit":
        content[-1] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        add(4)
        (other,) = set(directory.iterdir()) - {file}
        content = bytearray(other.read_bytes())
    file.write_bytes(content)
    compilations.clear()
    assert [add(3), add(3)] == [13, 13]
    assert len(compilations) == 1
    assert f"{file} is damaged" in caplog.text


def test_what_others_could_have_written_is_not_run(compilations, directory, caplog):
    add(3)
    (file,) = directory.iterdir()
    file.chmod(0o622)
    compilations.clear()
    assert add(3) == 13
    assert len(compilations) == 1
    assert "others can write it" in caplog.text
    directory.chmod(0o770)
    assert add(3) == 13
    assert len(compilations) == 2
    assert "is not this user's alone" in caplog.text


def test_a_kernel_is_compiled_where_nothing_can_be_kept(compilations, directory, monkeypatch, caplog):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(kernel_store, "write_own", full)
    with caplog.at_level(logging.INFO):
        assert [add(3), add(3)] == [13, 13]
    assert len(compilations) == 2
    assert "compiled kernels are not kept" in caplog.text
    directory.rmdir()
    directory.write_text("in the way")
    assert add(3) == 13


def test_only_the_files_used_last_are_kept(compilations, directory, monkeypatch):
    monkeypatch.setattr(cpu_jit, "_store", KernelStore(directory, 3))
    for number in range(3):
        add(number)
    for age, file in enumerate(sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime_ns)):
        os.utime(file, (1000 + age, 1000 + age))
    add(0)  # the oldest of them is used again
    compilations.clear()
    add(3)
    assert len(list(directory.iterdir())) == 3
    add(0)
    assert len(compilations) == 1, "what was used last was dropped"
    add(1)
    assert len(compilations) == 2, "what nobody had used for longest was kept"


@pytest.fixture
def no_store(monkeypatch):
    """A process without a store, in which a worker keeps its kernels; nothing of that outlives the test."""
    monkeypatch.setattr(cpu_jit, "_store", None)
    monkeypatch.setattr(worker, "keep_kernels", kernel_store.keep_kernels)


def test_a_worker_keeps_its_kernels_in_the_cache_directory(tiny_config, tmp_path, monkeypatch, no_store):
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(tmp_path))
    Worker(tiny_config).init_device()
    add(5)
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.suffix == ".o"


def test_a_worker_starts_without_a_cache_directory(tiny_config, monkeypatch, no_store, caplog):
    monkeypatch.setenv("NBENGINE_CACHE_DIR", "x" * 5000)
    with caplog.at_level(logging.INFO):
        Worker(tiny_config).init_device()
    assert "compiled kernels are not kept" in caplog.text
    assert add(6) == 16


@pytest.mark.parametrize("is_right", [True, False])
def test_a_verdict_is_asked_for_again_on_another_machine_and_a_bad_one_with_other_sources(
    is_right, compilations, monkeypatch, directory
):
    asked = []

    def find():
        """Return whether there are functions, and how often they were tried."""
        host = cpu_jit.host_processor()
        found = cpu_jit.compile_if_right(
            host, define_add, ["function"], lambda functions: asked.append(functions) or is_right, 3
        )
        return found is not None, len(asked)

    assert [find(), find()] == [(is_right, 1)] * 2
    monkeypatch.setattr(cpu_jit, "_store", KernelStore(directory, machine="another"))
    assert [find(), find()] == [(is_right, 2)] * 2
    # The code does not depend on its trial's sources; what they have found wrong does.
    own, real = define_add.__module__, cpu_jit._digest_of
    monkeypatch.setattr(cpu_jit, "_digest_of", lambda name: real(name) if name == own else "mended")
    assert [find(), find()] == [(is_right, 2 if is_right else 3)] * 2


def test_machines_are_told_apart_by_what_their_processors_are(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(kernel_store, "_CPUINFO", cpuinfo)

    def machine(**facts):
        lines = {"model name": "EPYC", "microcode": "0x1", "flags": "fpu amx_tile", "cpu MHz": "1.0"} | facts
        cpuinfo.write_text("".join(f"{name}\t: {value}\n" for name, value in lines.items()) + "\n")
        return kernel_store._machine()

    assert machine() == machine(**{"cpu MHz": "2.0"})
    others = [machine(microcode="0x2"), machine(flags="fpu amx_tile hypervisor")]
    assert len({machine(), *others}) == 3
    cpuinfo.unlink()
    assert kernel_store._machine()
