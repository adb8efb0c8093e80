"""Draws on the CPU in one call, with a compiled kernel."""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import NBEngineError

logger = logging.getLogger(__name__)


class CompiledDraws:
    """A caller of the kernel, for one thread at a time.

    Raises:
        ImportError: llvmlite is not installed.
        NBEngineError: LLVM has no code generator for this processor.
    """

    def __init__(self) -> None:
        from nbengine.kernels.cpu.draw import DrawArguments, compile_draw, scratch_bytes
        from nbengine.kernels.cpu.threads import select_runner

        self._function = compile_draw()
        self._run = select_runner()
        self._arguments = DrawArguments()
        self._address = ctypes.addressof(self._arguments)
        self._scratch_bytes = scratch_bytes
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __call__(self, logits: Tensor, parameters: NDArray[np.void]) -> tuple[Tensor, Tensor]:
        """Draw a token for each row of logits, float32 [R, V], with parameters (`DRAW_ROW`) [R].

        Returns:
            The tokens, int64 [R], `UNDECIDED` for rows whose filters keep too many, and masses, float64 [R]: not finite
            where there is nothing to draw from, and minus infinity where every token was forbidden.
        """
        count, width = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        each = self._scratch_bytes(width)
        if each * count > len(self._scratch):
            self._scratch = np.empty(each * count, np.uint8)
        ids = torch.empty(count, dtype=torch.int64)
        masses = torch.empty(count, dtype=torch.float64)
        own = self._arguments
        own.counter, own.items, own.width = 0, count, width
        own.x, own.x_stride = logits.data_ptr(), logits.stride(0) * logits.element_size()
        own.rows, own.scratch, own.scratch_stride = (
            parameters.ctypes.data,
            self._scratch.ctypes.data,
            each,
        )
        own.ids, own.masses = ids.data_ptr(), masses.data_ptr()
        if count == 1:
            self._function.call(self._address)
        else:
            self._run(self._function, self._address, min(count, torch.get_num_threads()))
        return ids, masses


def compiled_draws() -> CompiledDraws | None:
    """Return a new caller, None where draws cannot be compiled."""
    try:
        return CompiledDraws()
    except (ImportError, NBEngineError) as error:
        logger.info("tokens are drawn by torch: %s", error)
        return None
