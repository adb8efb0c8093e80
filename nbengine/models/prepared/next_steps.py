"""Several steps of a program in one run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.cpu.draw import DrawArguments
from nbengine.kernels.cpu.flags import address_of
from nbengine.kernels.cpu.next_step import TABLE_WORDS, NextStepArguments
from nbengine.kernels.cpu.program import STOPPED_AT, Operations, Program, places_of
from nbengine.models.further_steps import FurtherSteps
from nbengine.models.prepared.operations import StepOperations

_AT = places_of(NextStepArguments)


class NextSteps:
    """The operations of a step, each time followed by those that draw tokens and lay out the next step."""

    def __init__(self, program: Program, made: StepOperations, block_size: int) -> None:
        self._program = program
        self._draw, places = made.draw, made.passages
        self._chosen = made.chosen
        self._places = slice(places[0], places[-1] + 1)
        self._tables: NDArray[np.int64] = np.zeros((0, TABLE_WORDS), np.int64)
        self._told: FurtherSteps | None = None
        self._runs: dict[tuple[int, bool], Operations] = {}
        addresses = program.addresses
        self._set(
            shift=block_size.bit_length() - 1,
            stopped=addresses[self._places] + 8 * STOPPED_AT,
            counters=addresses[0],
            operations=places[0],
            operation_bytes=program.arguments.strides[0],
            clock=address_of("clock_gettime"),
        )

    def forget(self) -> None:
        """Forget where the inputs are: they are about to lie elsewhere."""
        self._told = None

    def run(
        self,
        step: Operations,
        further: FurtherSteps,
        groups: Sequence[AttentionMetadata],
        input_ids: Tensor,
        positions: Tensor,
    ) -> None:
        """Run `step`, and then what may follow; `groups` has the metadata of each cache group."""
        if further is not self._told:
            self._take_in(further, groups, input_ids, positions)
        kind = further.most, further.has_draws
        run = self._runs.get(kind)
        if run is None:
            run = self._runs[kind] = self._repeated(step, *kind)
        self._set(
            chosen=self._chosen[further.has_draws],
            draws=further.draws.data_ptr() if further.has_draws else 0,
        )
        between = 2 if further.has_draws else 1
        further.taken = self._program.run(run) // (step.count + between)

    def _take_in(
        self,
        further: FurtherSteps,
        groups: Sequence[AttentionMetadata],
        input_ids: Tensor,
        positions: Tensor,
    ) -> None:
        self._told = further
        self._tables = np.array(list(map(_table_words, groups)), np.int64)
        self._program.view(self._draw, DrawArguments).rows = further.draws.data_ptr()
        self._set(
            ends=further.ends.data_ptr(),
            num_ends=further.ends.shape[1],
            stop=further.stop.data_ptr(),
            taken=_row_addresses(further.token_ids),
            ended_at=_row_addresses(further.ended_at),
            ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            groups=len(groups),
            tables=self._tables.ctypes.data,
        )

    def _set(self, **values: int | NDArray[np.int64]) -> None:
        for name, value in values.items():
            self._program.arguments[self._places, _AT[name]] = value

    def _repeated(self, step: Operations, most: int, has_draws: bool) -> Operations:
        """Return the operations of a step and of `most` further ones."""
        draw = [self._draw] if has_draws else []
        parts = [step.table]
        for passage in range(self._places.start, self._places.start + most):
            parts += [self._program.some([*draw, passage]).table, step.table]
        return Operations(np.ascontiguousarray(np.concatenate(parts)))


def _row_addresses(rows: Tensor) -> NDArray[np.int64]:
    addresses: NDArray[np.int64] = (
        rows.data_ptr() + np.arange(len(rows)) * rows.stride(0) * rows.element_size()
    )
    return addresses


def _table_words(group: AttentionMetadata) -> tuple[int, int, int, int]:
    table = group.block_table
    row_bytes = table.stride(0) * table.element_size()
    return table.data_ptr(), row_bytes, group.slot_mapping.data_ptr(), group.seq_lens.data_ptr()
