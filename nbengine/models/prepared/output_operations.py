"""The operations behind the hidden states of a prepared step: logits, the largest of them, draws, and passages to the
next step."""

from __future__ import annotations

import torch

from nbengine.distributed.communicator import RankOperations
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.draw import DrawArguments, compile_draw, scratch_bytes
from nbengine.kernels.cpu.largest import PARTS, LargestArguments, compile_largest
from nbengine.kernels.cpu.next_step import NextStepArguments, compile_next_step
from nbengine.kernels.cpu.row_functions import compile_rows
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.layers.weights import Weight
from nbengine.models.prepared.basic_operations import BasicOperations
from nbengine.models.prepared.buffers import StepBuffers
from nbengine.models.prepared.products import row_bytes
from nbengine.models.prepared.rows import Operation, row_operation


class OutputOperations(BasicOperations):
    """A list of operations that ends with logits, and with what goes on from them: `logits` are the places of those that
    come after the hidden states, and `passages` of those that lay out a next step."""

    def __init__(self, buffers: StepBuffers, ranks: RankOperations | None) -> None:
        super().__init__(buffers, ranks)
        self.logits: list[int] = []
        self.passages: list[int] = []
        self.draw = -1
        """The place of the operation that draws tokens."""

    def add_logits(self, weight: Weight, config: DecoderConfig) -> None:
        """Turn normalised rows into logits, and look for the largest of each row; `weight` are this rank's rows of
        the output projection."""
        buffers, first, vocab_size = self._buffers, len(self.operations), config.vocab_size
        self._round_for([weight], buffers.normed, buffers.head_records)
        self._product(weight, buffers.own_logits, buffers.normed, buffers.head_records)
        if self._ranks is not None:
            self.operations.append(Operation(*self._ranks.gather_rows(buffers.own_logits, buffers.logits)))
        caps = [] if config.logits_soft_cap is None else [("soft_cap", config.logits_soft_cap)]
        for name, number in [("divide", config.logits_divisor), *caps]:
            if (name, number) != ("divide", 1):
                numbers = torch.full((vocab_size,), number, dtype=torch.float32)
                function = compile_rows(name, vocab_size, Element.FLOAT32)
                self.operations.append(
                    row_operation(function, buffers.logits, numbers, buffers.logits, repeats=True)
                )
        for function, parts in zip(compile_largest(), (PARTS, 1), strict=True):
            arguments = LargestArguments(
                parts=parts,
                width=vocab_size,
                x=buffers.logits.data_ptr(),
                x_stride=row_bytes(buffers.logits),
                peaks=buffers.peaks.data_ptr(),
                ids=buffers.ids.data_ptr(),
                values=buffers.values.data_ptr(),
            )
            self.operations.append(Operation(function, arguments, 1))
        self.logits = list(range(first, len(self.operations)))

    def add_passages(self, count: int, vocab_size: int) -> None:
        """Draw tokens, and lay out the next step, for up to `count` further steps in one run; to be added last."""
        buffers, rows = self._buffers, len(self._buffers.logits)
        self._scratch = torch.empty(rows, scratch_bytes(vocab_size), dtype=torch.uint8)
        self._drawn, self._masses = torch.empty(2, rows, dtype=torch.int64)
        draw = DrawArguments(
            width=vocab_size,
            x=buffers.logits.data_ptr(),
            x_stride=row_bytes(buffers.logits),
            scratch=self._scratch.data_ptr(),
            scratch_stride=row_bytes(self._scratch),
            ids=self._drawn.data_ptr(),
            masses=self._masses.data_ptr(),
            greedy=buffers.ids.data_ptr(),
            nothing=-1,
        )
        self.draw = len(self.operations)
        self.operations.append(Operation(compile_draw(), draw, 1, has_tokens=False))
        for _ in range(count):
            self.operations.append(Operation(compile_next_step(), NextStepArguments(items=1)))
        self.passages = list(range(self.draw + 1, len(self.operations)))
        self.chosen = buffers.ids.data_ptr(), self._drawn.data_ptr()
        """The addresses of the tokens of the largest logits, and of those that are drawn where a row asks for it."""
