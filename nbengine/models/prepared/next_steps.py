"""Several steps of a program in one run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.cpu.next_step import TABLE_WORDS, NextStepArguments
from nbengine.kernels.cpu.program import STOPPED_AT, Operations, Program, places_of
from nbengine.models.further_steps import FurtherSteps

_AT = places_of(NextStepArguments)


class NextSteps:
    """The operations of a step, each time followed by one that lays out the next step; `places` are those of the latter,
    behind all others of the program."""

    def __init__(self, program: Program, places: Sequence[int], block_size: int) -> None:
        self._program = program
        self._places = slice(places[0], places[-1] + 1)
        self._tables: NDArray[np.int64] = np.zeros((0, TABLE_WORDS), np.int64)
        self._told: FurtherSteps | None = None
        self._runs: dict[int, Operations] = {}
        addresses = program.addresses
        self._set(
            shift=block_size.bit_length() - 1,
            stopped=addresses[self._places] + 8 * STOPPED_AT,
            counters=addresses[0],
            operations=places[0],
            operation_bytes=program.arguments.strides[0],
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
        run = self._runs.get(further.most)
        if run is None:
            run = self._runs[further.most] = self._repeated(step, further.most)
        further.taken = self._program.run(run) // (step.count + 1)

    def _take_in(
        self,
        further: FurtherSteps,
        groups: Sequence[AttentionMetadata],
        input_ids: Tensor,
        positions: Tensor,
    ) -> None:
        self._told = further
        self._tables = np.array(list(map(_table_words, groups)), np.int64)
        taken = further.token_ids
        self._set(
            ends=further.ends.data_ptr(),
            num_ends=further.ends.shape[1],
            stop=further.stop.data_ptr(),
            taken=taken.data_ptr() + np.arange(len(taken)) * taken.stride(0) * taken.element_size(),
            ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            groups=len(groups),
            tables=self._tables.ctypes.data,
        )

    def _set(self, **values: int | NDArray[np.int64]) -> None:
        for name, value in values.items():
            self._program.arguments[self._places, _AT[name]] = value

    def _repeated(self, step: Operations, most: int) -> Operations:
        """Return the operations of a step and of `most` further ones."""
        passages = self._program.some(range(self._places.start, self._places.stop)).table
        parts = [step.table]
        for passage in passages[:most]:
            parts += [passage[None], step.table]
        return Operations(np.ascontiguousarray(np.concatenate(parts)))


def _table_words(group: AttentionMetadata) -> tuple[int, int, int, int]:
    table = group.block_table
    row_bytes = table.stride(0) * table.element_size()
    return table.data_ptr(), row_bytes, group.slot_mapping.data_ptr(), group.seq_lens.data_ptr()
