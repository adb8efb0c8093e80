"""The kernels' generators make what the files in `tests/kernels/generated` say: a change of it shows in review."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from tests.kernels.generated_code import FOLDER, canonical, generated

pytestmark = pytest.mark.skipif(
    not llvm.get_process_triple().startswith("x86_64"), reason="the files are of x86-64 processors"
)


def test_the_generated_code_is_the_one_that_was_reviewed() -> None:
    made, kept = generated(), {path.name: path.read_text() for path in FOLDER.glob("*.txt")}
    other = sorted(name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name))
    assert not other, (
        f"other code than tests/kernels/generated holds: {', '.join(other)}. "
        "If it is meant, `make kernel-texts` writes the files again; review their difference."
    )


def test_names_and_headers_of_llvmlite_are_no_difference() -> None:
    one = """; ModuleID = "multiply"
target triple = "unknown-unknown-unknown"

define void @"f"(i64 %".1")
{
entry:
  %".3" = add i64 %".1", 4
  br label %"loop.1"
loop.1:
  ret void
}
"""
    other = one.replace(".3", "sum").replace("loop.1", "again").replace('"multiply"', '"other"')
    assert canonical(one) == canonical(other)
    assert canonical(one) != canonical(one.replace("4", "5"))
    assert canonical(one) != canonical(one.replace("add", "sub"))
