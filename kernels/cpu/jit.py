"""This module compiles LLVM IR to machine code for this processor, in some tenths of a second, without a
toolchain.

Code that was compiled once can be kept for later processes: `keep_machine_code`.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from nbengine.errors import NBEngineError

COMPILER_LIBRARY: str = llvm.ffi.get_library_name()
"""The name of the file of LLVM's code."""
_OPTIMISATION_LEVEL = 2
_PACKAGE = __name__.rpartition(".cpu.")[0]
_IMPORTED = re.compile(rf"^\s*(?:from|import)\s+({re.escape(_PACKAGE)}[\w.]*)".encode(), re.MULTILINE)
_TRIALS = b"_trials"
"""The ending of modules that try code and have no part in it; they import much else."""
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
P = ParamSpec("P")
_lock = threading.Lock()
_engines: list[llvm.ExecutionEngine] = []  # an engine owns the machine code it made
_WRONG = b"computes wrongly "
"""The beginning of a store's entry for a module whose code has failed its trial on this machine. The hash of this package
follows: with another one, whose trial or reference may be mended, the code is tried again."""


class MachineCodeStore(Protocol):
    """A store that keeps object files between runs; a key names all that went into the code. Neither call
    raises."""

    def get(self, key: str) -> bytes | None:
        """Return the object file that was put there, unharmed, or None."""

    def put(self, key: str, code: bytes) -> None:
        """Keep the object file, if there is room."""


_store: MachineCodeStore | None = None


def keep_machine_code(store: MachineCodeStore | None) -> None:
    """From now on, take compiled code from `store` where it has it, and give it what is compiled."""
    global _store
    _store = store


@dataclass(frozen=True)
class Function:
    """A compiled function of one int64, in memory until the process ends."""

    address: int
    call: Callable[[int], None]


@dataclass(frozen=True)
class Processor:
    """A processor as LLVM knows it: its name, and the instruction sets that it has."""

    name: str
    features: llvm.FeatureMap

    @property
    def accumulators(self) -> int:
        """Count the vectors of 16 float32 that a loop can keep in registers beside its operands."""
        return 24 if self.features.get("avx512f") else 6

    @property
    def converts_float16(self) -> bool:
        """Return whether the processor converts float16 by itself: Arm does, x86 needs F16C."""
        return not llvm.get_process_triple().startswith(("x86", "i686")) or bool(self.features.get("f16c"))

    @property
    def flags(self) -> str:
        """Return the code generation flags for LLVM."""
        flags = str(self.features.flatten())
        # Some processors are tuned to half their vector width, which would halve the registers used here.
        return flags + ",-prefer-256-bit" if self.features.get("avx512f") else flags


def host_processor() -> Processor:
    """Return the processor on which this process runs."""
    return Processor(llvm.get_host_cpu_name(), llvm.get_host_cpu_features())


def compile_module(
    build: Callable[Concatenate[ir.Module, P], None], names: Sequence[str], *args: P.args, **kwargs: P.kwargs
) -> list[Function]:
    """Optimise and compile the module that `build` defines, with functions made with
    `nbengine.kernels.cpu.codegen`; return those of these names.

    What `build` defines follows from its module and what that imports of this package, the processor and the other
    arguments, whose representations tell them apart: code that is kept is found without building anything.

    Raises:
        NBEngineError: LLVM has no code generator for this processor, or refused the module.
    """
    functions, _ = _compiled(host_processor(), partial(build, *args, **kwargs), names)
    return functions


def compile_if_right(
    processor: Processor,
    build: Callable[Concatenate[ir.Module, P], None],
    names: Sequence[str],
    is_right: Callable[[Sequence[Function]], bool],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[Function] | None:
    """Do what `compile_module` does, for a processor like this one; return None if the functions are not right.

    `is_right` is asked once a machine: its answer is kept with the code, or in the place of it.

    Raises:
        NBEngineError: LLVM has no code generator for this processor, or refused the module.
    """
    module = partial(build, *args, **kwargs)
    functions, new_code = _compiled(processor, module, names, on_trial=True)
    if new_code is None:
        return functions or None
    passes = is_right(functions)
    _keep(module, processor, new_code if passes else _wrong())
    return functions if passes else None


def _compiled(
    processor: Processor, module: partial[None], names: Sequence[str], *, on_trial: bool = False
) -> tuple[list[Function], bytes | None]:
    """Return a module's functions, and its code, if it was compiled just now and is not kept yet because it is on trial;
    without functions it is known to compute wrongly."""
    with _lock:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        try:
            machine = _target_machine(processor)
            code = found = _kept(module, processor)
            if found is not None and found.startswith(_WRONG):
                if found == _wrong():
                    return [], None
                code = found = None
            if code is None:
                defined = ir.Module(module.func.__qualname__)
                module.func(defined, *module.args, **module.keywords)
                code = _compile(str(defined), machine)
                if not on_trial:
                    _keep(module, processor, code)
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            _engines.append(engine)
        except RuntimeError as error:
            raise NBEngineError(f"could not compile the CPU kernels: {error}") from error
    addresses = [int(engine.get_function_address(name)) for name in names]
    functions = [Function(address, _PROTOTYPE(address)) for address in addresses]
    return functions, code if on_trial and found is None else None


def _wrong() -> bytes:
    return _WRONG + _digest_of(_PACKAGE).encode()


def _store_of(module: partial[None]) -> MachineCodeStore | None:
    # A function inside another one may depend on more than its arguments say.
    return _store if module.func.__closure__ is None else None


def _kept(module: partial[None], processor: Processor) -> bytes | None:
    store = _store_of(module)
    return store.get(_key(module, processor)) if store else None


def _keep(module: partial[None], processor: Processor, code: bytes) -> None:
    store = _store_of(module)
    if store:
        store.put(_key(module, processor), code)


def _key(module: partial[None], processor: Processor) -> str:
    """Return the hash of all that the machine code of a module depends on."""
    compiler = (llvmlite.__version__, llvm.llvm_version_info, llvm.get_process_triple(), _OPTIMISATION_LEVEL)
    source = module.func.__module__
    name = (module.func.__qualname__, module.args, module.keywords)
    parts = (compiler, source, _digest_of(source), processor.name, processor.flags, name)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _digest_of(name: str) -> str:
    """Return the hash of a module of this package, of all that it imports of it, and of this one; of a module elsewhere,
    that of the whole package."""
    found = {name if name.startswith(f"{_PACKAGE}.") else _PACKAGE, __name__}
    waiting = [*found]
    while waiting:
        _, imported = _source(waiting.pop())
        waiting.extend(imported - found)
        found |= imported
    return hashlib.sha256(repr([(each, _source(each)[0]) for each in sorted(found)]).encode()).hexdigest()


@cache
def _source(name: str) -> tuple[str, frozenset[str]]:
    """Return the hash of a module's source, and the modules of this package that it imports, also inside functions; of
    a package all that it has."""
    path = Path(__file__).parents[1].joinpath(*name.removeprefix(_PACKAGE).split(".")[1:])
    if path.is_dir():
        inside = (
            each for each in path.iterdir() if each.suffix in ("", ".py") and each.name != "__pycache__"
        )
        return "", frozenset(f"{name}.{each.stem}" for each in inside)
    text = path.with_suffix(".py").read_bytes()
    imported = (each.decode() for each in _IMPORTED.findall(text) if not each.endswith(_TRIALS))
    return hashlib.sha256(text).hexdigest(), frozenset(imported)


def _compile(text: str, machine: llvm.TargetMachine) -> bytes:
    parsed = llvm.parse_assembly(text)
    options = llvm.PipelineTuningOptions(speed_level=_OPTIMISATION_LEVEL)
    options.loop_vectorization = False
    options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    code: bytes = machine.emit_object(parsed)
    return code


def _target_machine(processor: Processor) -> llvm.TargetMachine:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=processor.name, features=processor.flags, opt=_OPTIMISATION_LEVEL, jit=True
    )
