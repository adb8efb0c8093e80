"""A program runs its operations one after the other, each with all of its parts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.kernels.cpu import threads
from nbengine.kernels.cpu.elements import ELEMENTS
from nbengine.kernels.cpu.program import Program
from nbengine.kernels.cpu.row_functions import ROWS_AT_A_TIME, RowArguments, compile_rows
from tests.support.thorough import amount

SIZE = 16
ADD = compile_rows("add", SIZE, ELEMENTS[torch.bfloat16])


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def addition(x: torch.Tensor, other: torch.Tensor, output: torch.Tensor) -> RowArguments:
    stride = SIZE * x.element_size()
    return RowArguments(
        items=-(-len(x) // ROWS_AT_A_TIME),
        rows=len(x),
        x=x.data_ptr(),
        x_stride=stride,
        other=other.data_ptr(),
        other_stride=stride,
        output=output.data_ptr(),
        output_stride=stride,
    )


def test_sums_that_build_on_each_other_are_right_whatever_has_one_part(num_threads):
    @settings(max_examples=amount(15, thorough=1200))
    @given(st.lists(st.sampled_from([1, ROWS_AT_A_TIME, 5 * ROWS_AT_A_TIME]), min_size=1, max_size=12))
    def check(rows: list[int]) -> None:
        """Each operation doubles the first rows of what the one before it has made."""
        x = torch.ones(5 * ROWS_AT_A_TIME, SIZE, dtype=torch.bfloat16)
        program = Program([(ADD, addition(x[:count], x[:count], x[:count])) for count in rows])
        everything = program.some(range(len(rows)))
        for repeat in (1, 2):
            program.run(everything)
            doublings = torch.tensor([sum(n > row for n in rows) for row in range(len(x))]) * repeat
            expected = torch.full((len(x),), 2.0).pow(doublings)
            assert torch.equal(x.float(), expected[:, None].expand(-1, SIZE))

    check()


DOUBLED = """
import torch
torch.set_num_threads(2)
from test_program import ADD, SIZE, addition
from nbengine.kernels.cpu.program import Program
x = torch.ones(64, SIZE, dtype=torch.bfloat16)
program = Program([(ADD, addition(x, x, x))] * 3)
program.run(program.some(range(3)))
assert torch.equal(x, torch.full_like(x, 8))
"""


@pytest.mark.parametrize(
    "environment",
    [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}, {"OMP_MAX_ACTIVE_LEVELS": "0"}],
    ids=str,
)
def test_a_program_ends_though_there_are_fewer_threads_than_were_asked_for(environment):
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", DOUBLED]
    subprocess.run(command, env=os.environ | environment | {"PYTHONPATH": path}, timeout=100, check=True)


def test_a_program_runs_without_an_openmp_runtime(num_threads, monkeypatch):
    monkeypatch.setattr(threads, "_RUNTIMES", ("libno_such_runtime.so",))
    x = torch.ones(5 * ROWS_AT_A_TIME, SIZE, dtype=torch.bfloat16)
    program = Program([(ADD, addition(x, x, x))] * 3)
    program.run(program.some(range(3)))
    assert torch.equal(x, torch.full_like(x, 8))


def test_arguments_may_change_between_runs(num_threads):
    one, two, out = (torch.full((1, SIZE), value, dtype=torch.bfloat16) for value in (1, 2, 0))
    program = Program([(ADD, addition(one, one, out)), (ADD, addition(out, one, out))])
    program.run(program.some([0, 1]))
    assert out.unique().tolist() == [3]
    place = RowArguments.other.offset // 8
    program.arguments[:, place] = two.data_ptr()
    program.run(program.some([0, 1]))
    assert out.unique().tolist() == [5]
