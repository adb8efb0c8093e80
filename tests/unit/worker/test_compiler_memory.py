"""The compiler's code leaves a worker's memory when it has started, and comes back when it is called."""

from __future__ import annotations

import sys

import llvmlite.binding as llvm
import pytest

from nbengine.config import EngineConfig
from nbengine.kernels.cpu.jit import COMPILER_LIBRARY, host_processor
from nbengine.runtime import heap
from nbengine.worker.kernel_store import unmap_compiler
from nbengine.worker.worker import Worker

MEGABYTE = 1 << 20
SMAPS = """\
7f00-7f10 r-xp 00000000 08:01 5 /lib/{name}
Rss:                 4 kB
Anonymous:           0 kB
7f10-7f20 r--p 00000000 08:01 5 /lib/{name}
Anonymous:           8 kB
7f20-7f30 rw-p 00000000 08:01 5 /lib/{name}
Anonymous:           0 kB
7f30-7f40 r--p 00000000 08:01 5 /lib/{name}
Anonymous:           0 kB
7f40-7f50 r-xp 00000000 08:01 6 /lib/another-{name}
Anonymous:           0 kB
7f50-7f60 r-xp 00000000 00:00 0
Anonymous:           0 kB
"""


def resident(name: str) -> int:
    """The bytes of a library in memory that nobody has changed."""
    found, is_own, rss = 0, False, 0
    for line in heap._SMAPS.read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            is_own = line.endswith(f"/{name}")
        elif is_own and key == "Rss:":
            rss = int(rest[0])
        elif is_own and key == "Anonymous:" and rest[0] == "0":
            found += rss << 10
    return found


def compile_something() -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("define i64 @one() { ret i64 1 }")
    code: bytes = llvm.Target.from_default_triple().create_target_machine().emit_object(module)
    return code


@pytest.mark.skipif(sys.platform != "linux", reason="the system lists no process's memory")
def test_the_compilers_code_leaves_memory_and_works_on() -> None:
    code = compile_something()
    assert resident(COMPILER_LIBRARY) > 8 * MEGABYTE
    unmap_compiler()
    assert resident(COMPILER_LIBRARY) < MEGABYTE
    assert compile_something() == code
    assert host_processor().name
    assert resident(COMPILER_LIBRARY) > MEGABYTE


@pytest.mark.skipif(sys.platform != "linux", reason="the system lists no process's memory")
def test_a_worker_gives_it_up_when_it_has_started(tiny_config: EngineConfig) -> None:
    worker = Worker(tiny_config)
    worker.init_device()
    worker.load_model()
    compile_something()
    worker.initialize_kv_cache(16)
    assert resident(COMPILER_LIBRARY) < MEGABYTE


def test_pages_of_the_library_alone_that_nobody_changed_are_given_up() -> None:
    lines = iter(SMAPS.format(name="libx.so").splitlines(keepends=True))
    assert list(heap._unchanged(lines, "libx.so")) == [(0x7F00, 0x7F10), (0x7F30, 0x7F40)]
