"""The LLVM IR that the CPU kernels' generators make for some shapes and processors: hashes of all of it, and the text of the
shortest module of each generator, one file a Python module in `tests/kernels/generated`.

    python -m tests.kernels.generated_code     (`make kernel-texts`)

writes the files again. They name processors, so that they are the same on every machine: nothing is compiled for them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from nbengine.kernels.cpu import (
    all_reduce,
    attention_functions,
    block_packing,
    decode_plan,
    dense,
    draw,
    exchange_operation,
    expert_steps,
    grouped_routing,
    head_products,
    jit,
    largest,
    latent_rows,
    matrix_tiles,
    next_step,
    norm_rounding,
    penalties,
    products,
    program,
    recurrent,
    routing,
    row_functions,
    rows,
    taken_rows,
    trials,
)
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.grouped_routing import GroupedChoice
from nbengine.kernels.cpu.head_products import HeadShape
from nbengine.kernels.cpu.jit import Function, Processor
from nbengine.kernels.cpu.latent_rows import LatentRowShape
from nbengine.kernels.cpu.layout import PLAIN, Features, Span
from nbengine.kernels.cpu.records import EIGHT_BITS, SIXTEEN_BITS, RecordLayout
from nbengine.kernels.quantized import FORMATS, ZERO_POINTS, Format

FOLDER = Path(__file__).with_name("generated")
_OLD = frozenset[str]()
_AVX2 = frozenset(("avx", "avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512vnni", "avx512bf16"}
PROCESSORS: Mapping[str, frozenset[str]] = {
    "x86-64-v2": _OLD,
    "haswell": _AVX2,
    "znver4": _AVX512,
    "sapphirerapids": _AVX512 | {"amx-tile", "amx-bf16"},
}
"""Processors, and those of their features that generators look at."""
_HASH_DIGITS = 16
_MOST_CHARACTERS = 24_000
"""The longest text that is kept: of longer ones there is the hash alone."""

F32, BF16, F16, I8 = Element.FLOAT32, Element.BFLOAT16, Element.FLOAT16, Element.INT8
EVERYTHING = Features(Span.WINDOW, True, True)
FORMATS_AND_MORE = (*FORMATS.values(), *ZERO_POINTS.values())


def _calls(features: frozenset[str]) -> Iterator[Callable[[], object]]:
    """The calls that compile each kernel, for shapes of small models and of the tests: of what takes long to generate all
    for the newest instruction sets, and some for others."""
    is_new = features >= _AVX512
    yield from _products(FORMATS_AND_MORE if is_new else (FORMATS["q4_1"],))
    if features:
        yield partial(products.compile_gated.__wrapped__, FORMATS["q4_1"], EIGHT_BITS, "silu")
        yield partial(products.compile_round_rows.__wrapped__, SIXTEEN_BITS)
        yield partial(products._compile_multiply.__wrapped__, FORMATS["q4_1"], SIXTEEN_BITS, False)
    if is_new:
        yield partial(products._compile_multiply.__wrapped__, FORMATS["q4_1"], EIGHT_BITS, True)
        yield partial(products.compile_gated.__wrapped__, FORMATS["q8_0"], EIGHT_BITS, "relu2")
        yield partial(
            products.compile_gated.__wrapped__, FORMATS["mxfp4"], EIGHT_BITS, (1.702, 7.0), has_bias=True
        )
    for element in (F32, BF16, F16):
        yield partial(dense.compile_dense.__wrapped__, element, F32)
        yield partial(taken_rows.compile_take_rows.__wrapped__, element, is_part=True)
    for stands in (False, True):
        shape = HeadShape(128, 64, BF16, F32, stands)
        yield partial(head_products.compile_heads.__wrapped__, shape)
    yield partial(dense.compile_dense.__wrapped__, BF16, BF16)
    yield from _attention(is_new)
    yield from _row_functions()
    for element in (F32, BF16):
        yield partial(recurrent.compile_delta_rule.__wrapped__, 32, 48, element)
        yield partial(recurrent.compile_state_space.__wrapped__, 32, 48, element)
        yield partial(recurrent.compile_short_convolution.__wrapped__, 70, 4, element, True, True)
        yield partial(all_reduce.compile_all_reduce.__wrapped__, 2, element)
        yield partial(rows.compile_reduce_scatter_rows.__wrapped__, 2, element)
        yield partial(routing.compile_scores.__wrapped__, element)
    yield from _steps()


def _products(formats: Iterable[Format]) -> Iterator[Callable[[], object]]:
    yield partial(products.compile_round_rows.__wrapped__, EIGHT_BITS)
    for form in formats:
        yield partial(products._compile_multiply.__wrapped__, form, EIGHT_BITS, False)
        yield partial(taken_rows.compile_take_rows.__wrapped__, form)
    for form in FORMATS.values():
        yield partial(block_packing._compile.__wrapped__, form)


def _attention(is_new: bool) -> Iterator[Callable[[], object]]:
    compile_attention = attention_functions.compile_attention.__wrapped__
    yield partial(compile_attention, 24, 1, 16, F32, F32, EVERYTHING)
    for element, row_element in ((F32, F32), (BF16, BF16), (I8, F32)):
        yield partial(attention_functions.compile_write_kv.__wrapped__, 64, 16, element, row_element)
        if is_new:
            yield partial(compile_attention, 64, 3, 16, element, row_element)
    yield partial(attention_functions.compile_write_latent.__wrapped__, 96, BF16, F32)
    if is_new:
        yield partial(compile_attention, 24, 1, 16, F32, F32, Features(Span.CHUNK))
        yield partial(compile_attention, 96, 4, 16, BF16, F32, PLAIN, 64)


def _row_functions() -> Iterator[Callable[[], object]]:
    compile_rows = row_functions.compile_rows.__wrapped__
    of_rows = ("rms_norm", "silu", "gelu_tanh", "sigmoid", "relu2", "add", "multiply", "divide", "softplus")
    for name in (*of_rows, "soft_cap", "at_least", "at_most", "scale", "sigmoid_scale"):
        yield partial(compile_rows, name, 96, F32)
    for name in row_functions.DELTA_GATES:
        yield partial(compile_rows, name, 21, F32)
    of_heads = ("rms_norm_groups", "rms_norm_heads", "rms_norm_every_other_head", "gate_every_other_head")
    for name in (*of_heads, "rotate", "rotate_pairs"):
        yield partial(compile_rows, name, 3, F32, 64)
    for name in ("rms_norm", "silu"):
        yield partial(compile_rows, name, 96, BF16)
    yield partial(compile_rows, "rotate", 3, F32, 64, picked=True, turned=32)
    yield partial(row_functions.compile_clamped_gate.__wrapped__, 96, F32, (1.702, 7.0))


def _steps() -> Iterator[Callable[[], object]]:
    """Those of what a step does beside the layers' arithmetic."""
    for adds in (False, True):
        yield partial(norm_rounding.compile_norm_round.__wrapped__, 576, EIGHT_BITS, adds=adds)
    for choice in (GroupedChoice(True, True, True), GroupedChoice(False, False, False)):
        yield partial(grouped_routing.compile_grouped.__wrapped__, choice)
    yield partial(latent_rows.compile_latent_rows.__wrapped__, LatentRowShape(4, 32, 16, 64, True))
    for span in (None, *Span):
        yield partial(decode_plan.compile_decode_plan.__wrapped__, span)
    yield partial(expert_steps.compile_combine.__wrapped__, 64)
    yield partial(all_reduce.compile_all_gather.__wrapped__, 2)
    yield partial(rows.compile_gather_rows.__wrapped__, 2)
    for function in (
        *(expert_steps.compile_sort, expert_steps.compile_spread, expert_steps.compile_each),
        *(routing.compile_choose, largest.compile_largest, draw.compile_draw, penalties._compile),
        *(next_step.compile_next_step, program._compile_program, exchange_operation.compile_exchange),
    ):
        yield function.__wrapped__


def generated() -> dict[str, str]:
    """Return the files by name, as the generators of this tree make them."""
    found: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    for name, features in PROCESSORS.items():
        processor = Processor(name, llvm.FeatureMap(dict.fromkeys(features, True)))
        with _generating(processor, partial(_note, found, name)):
            for call in _calls(features):
                call()
    by_file: dict[str, list[tuple[str, str, str, list[str]]]] = {}
    for (source, builder, arguments), (text, names) in found.items():
        by_file.setdefault(source, []).append((builder, arguments, text, names))
    return {f"{source}.txt": _file(source, modules) for source, modules in by_file.items()}


def _note(
    found: dict[tuple[str, str, str], tuple[str, list[str]]], processor: str, module: partial[None]
) -> None:
    """Note a module for a processor; what it defines follows from its arguments, so it is built once."""
    source = module.func.__module__.rpartition(".")[2]
    name = re.sub("^_?define_?", "", module.func.__qualname__) or source
    arguments = ", ".join(map(_short, (*module.args, *module.keywords.values())))
    known = found.get((source, name, arguments))
    if known is None:
        made = ir.Module(name)
        module.func(made, *module.args, **module.keywords)
        known = found[source, name, arguments] = canonical(str(made)), []
    known[1].append(processor)


@contextmanager
def _generating(processor: Processor, note: Callable[[partial[None]], None]) -> Iterator[None]:
    """Have modules be noted instead of compiled, for a processor that this machine may not have."""

    def noted(
        _: Processor, module: partial[None], names: Any, **_options: Any
    ) -> tuple[list[Function], None]:
        note(module)
        return [Function(0, lambda _argument: None) for _ in names], None

    replaced = (
        (jit, "host_processor", lambda: processor),
        (trials, "host_processor", lambda: processor),
        (jit, "_compiled", noted),
        (matrix_tiles, "_may_use_tiles", lambda: True),
    )
    before = [getattr(where, name) for where, name, _ in replaced]
    for where, name, other in replaced:
        setattr(where, name, other)
    try:
        yield
    finally:
        for (where, name, _), own in zip(replaced, before, strict=True):
            setattr(where, name, own)


def canonical(text: str) -> str:
    """Return IR without what depends on llvmlite: its header, and the names that it makes up for values and blocks."""
    lines = [line for line in text.splitlines() if line and not line.startswith((";", "target", "source"))]
    names: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        prefix, name = match[1], match[2].strip('"')
        return prefix + names.setdefault(name, f"v{len(names)}")

    found = []
    for line in lines:
        if line.startswith("define"):
            names.clear()
        if label := re.fullmatch(r'("?[\w.$-]+"?):', line):
            name = label[1].strip('"')
            found.append(names.setdefault(name, f"v{len(names)}") + ":")
        else:
            found.append(re.sub(r'(%)("[^"]+"|[\w.$-]+)', numbered, line))
    return "\n".join(found) + "\n"


def _file(source: str, modules: list[tuple[str, str, str, list[str]]]) -> str:
    lines = [f"What kernels/cpu/{source}.py generates; make kernel-texts writes this file.", ""]
    shortest: dict[str, tuple[str, str]] = {}
    for builder, arguments, text, names in sorted(modules):
        digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
        where = "" if len(names) == len(PROCESSORS) else f" on {', '.join(names)}"
        lines.append(f"{digest} {builder}({arguments}){where}")
        if len(text) <= _MOST_CHARACTERS and len(text) < len(shortest.get(builder, ("", text + " "))[1]):
            shortest[builder] = arguments, text
    for builder, (arguments, text) in shortest.items():
        lines += ["", f"{builder}({arguments})", text.rstrip()]
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    """Return an argument as a file names it, without addresses or what says nothing."""
    if isinstance(value, Format):
        return value.name
    if isinstance(value, RecordLayout):
        return f"{value.bits} bits"
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value):
        return f"({', '.join(f'{each.name}={_short(getattr(value, each.name))}' for each in fields(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    return repr(value)


def write() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    made = generated()
    for path in FOLDER.glob("*.txt"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    print(f"{len(made)} files in {FOLDER}", file=sys.stderr)


if __name__ == "__main__":
    write()
