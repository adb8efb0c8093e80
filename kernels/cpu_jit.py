"""From LLVM IR to machine code for this processor, in about 0.1 s a module, without a toolchain."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from nbengine.errors import NBEngineError

_OPTIMISATION_LEVEL = 2
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_lock = threading.Lock()


@dataclass(frozen=True)
class Function:
    """A compiled function of one int64. Its machine code stays in memory as long as this object does."""

    address: int
    call: Callable[[int], None]
    engine: llvm.ExecutionEngine


@cache
def accumulator_budget() -> int:
    """How many vectors of 16 float32 a loop can keep in registers, leaving some for its operands."""
    return 24 if llvm.get_host_cpu_features().get("avx512f") else 6


def compile_module(module: ir.Module, *names: str) -> list[Function]:
    """Optimise and compile a module made with `nbengine.kernels.cpu_ir`; the functions of these names.

    Raises:
        NBEngineError: LLVM has no code generator for this processor, or refused the module.
    """
    with _lock:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        try:
            parsed = llvm.parse_assembly(str(module))
            machine = _target_machine()
            options = llvm.PipelineTuningOptions(speed_level=_OPTIMISATION_LEVEL)
            options.loop_vectorization = False
            options.slp_vectorization = False
            passes = llvm.create_pass_builder(machine, options)
            passes.getModulePassManager().run(parsed, passes)
            engine = llvm.create_mcjit_compiler(parsed, machine)
            engine.finalize_object()
        except RuntimeError as error:
            raise NBEngineError(f"could not compile the CPU kernels: {error}") from error
    addresses = [int(engine.get_function_address(name)) for name in names]
    return [Function(address, _PROTOTYPE(address), engine) for address in addresses]


def _target_machine() -> llvm.TargetMachine:
    features = llvm.get_host_cpu_features()
    flags = features.flatten()
    if features.get("avx512f"):
        # Some processors are tuned to 256 bits by default, which would halve the registers used here.
        flags += ",-prefer-256-bit"
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=flags, opt=_OPTIMISATION_LEVEL, jit=True
    )
