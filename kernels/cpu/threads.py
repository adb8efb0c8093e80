"""This module runs a kernel on the threads that torch already has.

The kernels draw their work from a shared counter, so that any number of threads may run one at once. They
run on the OpenMP threads of torch, through the OpenMP runtime's own `GOMP_parallel`: two pools would compete
for the same cores, each spinning while the other works. It must be called from the thread that calls torch,
because every OpenMP caller has its own pool.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from ctypes import CDLL, c_uint, c_void_p
from typing import TypeAlias, cast

import torch

from nbengine.kernels.cpu.jit import Function

logger = logging.getLogger(__name__)

_RUNTIMES = ("libgomp.so.1", "libiomp5.so", "libomp.so.5", "libomp.so")

ParallelEntry: TypeAlias = Callable[[int, int, int, int], None]
"""The signature is (address of a function, its argument, number of threads, 0)."""

Runner: TypeAlias = Callable[[Function, int, int], None]
"""The signature is (function, its argument, number of threads): run the function on all of them, return when
all have."""


def select_runner() -> Runner:
    """Return a runner over torch's threads, else over the calling one, with a warning where torch uses
    more."""
    parallel = openmp_parallel()
    if parallel is None:
        if torch.get_num_threads() > 1:
            logger.warning("torch's OpenMP runtime has no GOMP_parallel: attention will run on one thread")
        return _run_here

    def run(function: Function, argument: int, threads: int) -> None:
        if threads > 1:
            parallel(function.address, argument, threads, 0)
        else:
            function.call(argument)

    return run


def openmp_parallel() -> ParallelEntry | None:
    """Find `GOMP_parallel` of the OpenMP runtime that is loaded already, if any has it."""
    library = _runtime()
    if library is None:
        return None
    library.GOMP_parallel.restype = None
    library.GOMP_parallel.argtypes = (c_void_p, c_void_p, c_uint, c_uint)
    return cast(ParallelEntry, library.GOMP_parallel)


def address_of_team_size() -> int:
    """Return the address of a C function that says on how many threads a runner runs the function that calls it; 0: on
    one. They may be fewer than were asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC)."""
    library = _runtime()
    return 0 if library is None else ctypes.cast(library.omp_get_num_threads, c_void_p).value or 0


def _runtime() -> CDLL | None:
    """Find the OpenMP runtime that is loaded already, if it has `GOMP_parallel`."""
    mode = getattr(os, "RTLD_NOLOAD", None)
    if mode is None:
        return None
    for name in _RUNTIMES:
        try:
            library = CDLL(name, mode=mode | os.RTLD_NOW)
        except OSError:
            continue
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


def _run_here(function: Function, argument: int, threads: int) -> None:
    del threads
    function.call(argument)
