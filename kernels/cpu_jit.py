"""From LLVM IR to machine code for this processor, in some tenths of a second, without a toolchain."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir

from nbengine.errors import NBEngineError

_OPTIMISATION_LEVEL = 2
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_lock = threading.Lock()
_engines: list[llvm.ExecutionEngine] = []  # an engine owns the machine code it made


@dataclass(frozen=True)
class Function:
    """A compiled function of one int64, in memory until the process ends."""

    address: int
    call: Callable[[int], None]


@dataclass(frozen=True)
class Processor:
    """A processor as LLVM knows it: its name, and which instruction sets it has."""

    name: str
    features: llvm.FeatureMap

    @property
    def accumulators(self) -> int:
        """How many vectors of 16 float32 a loop can keep in registers beside its operands."""
        return 24 if self.features.get("avx512f") else 6

    @property
    def converts_float16(self) -> bool:
        """Whether it converts float16 by itself: Arm does, x86 needs F16C."""
        return not llvm.get_process_triple().startswith(("x86", "i686")) or bool(self.features.get("f16c"))

    @property
    def flags(self) -> str:
        """Code generation flags, for LLVM."""
        flags = str(self.features.flatten())
        # Some processors are tuned to half their vector width, which would halve the registers used here.
        return flags + ",-prefer-256-bit" if self.features.get("avx512f") else flags


def host_processor() -> Processor:
    """The processor that this process runs on."""
    return Processor(llvm.get_host_cpu_name(), llvm.get_host_cpu_features())


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
            machine = _target_machine(host_processor())
            options = llvm.PipelineTuningOptions(speed_level=_OPTIMISATION_LEVEL)
            options.loop_vectorization = False
            options.slp_vectorization = False
            passes = llvm.create_pass_builder(machine, options)
            passes.getModulePassManager().run(parsed, passes)
            engine = llvm.create_mcjit_compiler(parsed, machine)
            engine.finalize_object()
            _engines.append(engine)
        except RuntimeError as error:
            raise NBEngineError(f"could not compile the CPU kernels: {error}") from error
    addresses = [int(engine.get_function_address(name)) for name in names]
    return [Function(address, _PROTOTYPE(address)) for address in addresses]


def _target_machine(processor: Processor) -> llvm.TargetMachine:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=processor.name, features=processor.flags, opt=_OPTIMISATION_LEVEL, jit=True
    )
