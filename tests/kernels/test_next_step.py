"""The compiled passage to the next step lays out what numpy lays out."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.kernels.cpu.flags import address_of
from nbengine.kernels.cpu.next_step import TABLE_WORDS, NextStepArguments, compile_next_step
from nbengine.kernels.draw_parameters import DRAW_ROW
from nbengine.sampling.random_streams import uniforms
from tests.support.thorough import amount

BLOCKS, UNTOUCHED = 9, -7


@dataclass
class Steps:
    """Requests in the middle of a step, in arrays with room for one more, which must stay as it is."""

    lengths: list[int]
    chosen: list[int]
    block_size: int = 4
    num_groups: int = 1
    ends: list[list[int]] = field(default_factory=list)
    stop: int = 0

    def __post_init__(self) -> None:
        chance = np.random.default_rng(len(self.lengths))
        count = len(self.lengths)
        self.arrays: dict[str, Any] = {
            "chosen": np.array([*self.chosen, 3]),
            "ids": np.full(count + 1, UNTOUCHED),
            "taken": np.full(count + 1, UNTOUCHED),
            "positions": np.array([length - 1 for length in self.lengths] + [UNTOUCHED]),
            "ends": np.array(self.ends or [[]] * count, np.int64).reshape(count, -1),
            "stop": np.array([self.stop]),
            "stopped": np.zeros(1, np.int64),
            "counters": np.arange(1, 13).reshape(4, 3),
            "ended_at": np.full(3, UNTOUCHED),
        }
        self.blocks = chance.integers(0, 1000, (self.num_groups, count, BLOCKS), np.int32)
        self.slots = np.full((self.num_groups, count + 1), UNTOUCHED)
        self.seq_lens = np.full((self.num_groups, count + 1), UNTOUCHED, np.int32)
        self.seq_lens[:, :count] = self.lengths

    def take(self) -> bool:
        """Go on to the next step; return whether there is one."""
        table = self.blocks.strides[1]
        addresses = [
            (each.ctypes.data, table, slots.ctypes.data, seq_lens.ctypes.data)
            for each, slots, seq_lens in zip(self.blocks, self.slots, self.seq_lens, strict=True)
        ]
        tables = np.array(addresses, np.int64)
        assert tables.shape[1] == TABLE_WORDS
        arguments = NextStepArguments(
            items=1,
            rows=len(self.lengths),
            num_ends=self.arrays["ends"].shape[1],
            groups=self.num_groups,
            tables=tables.ctypes.data,
            shift=self.block_size.bit_length() - 1,
            operations=3,
            operation_bytes=self.arrays["counters"].strides[0],
            clock=address_of("clock_gettime"),
            **{name: array.ctypes.data for name, array in self.arrays.items()},
        )
        compile_next_step().call(ctypes.addressof(arguments))
        return not self.arrays["stopped"][0]


@settings(max_examples=amount(100, thorough=6000))
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 4, 8]),
    num_groups=st.integers(1, 3),
    data=st.data(),
)
def test_each_request_goes_on_with_its_token(
    lengths: list[int], size: int, num_groups: int, data: st.DataObject
) -> None:
    lengths = [min(length, BLOCKS * size - 1) for length in lengths]
    tokens = [data.draw(st.integers(0, 99)) for _ in lengths]
    ends = [[100, 101, -1] for _ in lengths]
    steps = Steps(lengths, tokens, size, num_groups, ends)
    before = time.time_ns()
    assert steps.take()
    seconds, nanoseconds, other = steps.arrays["ended_at"].tolist()
    assert before <= seconds * 10**9 + nanoseconds <= time.time_ns()
    assert nanoseconds < 10**9
    assert other == UNTOUCHED
    arrays, count = steps.arrays, len(lengths)
    for name in ("ids", "taken"):
        assert arrays[name].tolist() == [*tokens, UNTOUCHED]
    assert arrays["positions"].tolist() == [*lengths, UNTOUCHED]
    assert steps.seq_lens.tolist() == [[*(length + 1 for length in lengths), UNTOUCHED]] * num_groups
    positions = np.array(lengths)
    blocks = np.take_along_axis(steps.blocks, np.tile((positions // size)[:, None], (num_groups, 1, 1)), 2)
    assert (steps.slots[:, :count] == blocks[..., 0] * size + positions % size).all()
    assert (steps.slots[:, count] == UNTOUCHED).all()
    # Those of the three operations, and nothing else.
    assert arrays["counters"].tolist() == [[0, 2, 3], [0, 5, 6], [0, 8, 9], [10, 11, 12]]


@pytest.mark.parametrize(
    "more",
    [
        {"chosen": [5, -1]},
        {"ends": [[-1, -1], [-1, 6]]},
        {"ends": [[5, -1], [-1, -1]]},
        {"stop": 1},
    ],
    ids=["not finite", "the last end", "the first end", "stopped from outside"],
)
def test_nothing_changes_where_no_step_follows(more: dict[str, Any]) -> None:
    steps = Steps(**{"lengths": [3, 9], "chosen": [5, 6], **more})
    before = {name: array.copy() for name, array in steps.arrays.items() if name != "stopped"}
    assert not steps.take()
    assert all((steps.arrays[name] == array).all() for name, array in before.items())
    assert (steps.slots == UNTOUCHED).all()
    assert steps.seq_lens.tolist() == [[3, 9, UNTOUCHED]]


def test_rows_get_the_next_random_numbers_of_their_streams() -> None:
    steps = Steps([3, 9, 4], [5, 6, 7])
    rows = np.zeros(3, DRAW_ROW)
    streams = np.array([1, 2**64 - 1, 0x123456789ABCDEF0], np.uint64)
    rows["stream"], rows["number"], rows["inverse"] = streams, [0, 7, 2**40], 0.5
    steps.arrays["draws"] = rows
    for count in (1, 2, 3):
        assert steps.take()
        numbers = np.array([0, 7, 2**40]) + count
        assert rows["number"].tolist() == numbers.tolist()
        assert rows["uniform"].tolist() == uniforms(streams, numbers).tolist()
    assert rows["stream"].tolist() == streams.tolist()
    assert rows["inverse"].tolist() == [0.5] * 3


def test_an_end_of_one_request_is_none_of_another() -> None:
    assert Steps([3, 9], [5, 6], ends=[[6, -1], [5, 7]]).take()
