"""The operations on quantised weights, as the kernels of every device have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from nbengine.kernels.quantized import Format


class QuantizedProducts(Protocol):
    """The products of float32 activations with quantised weights, packed as `nbengine.kernels.quantized`
    says."""

    name: str

    @property
    def instructions(self) -> str:
        """Return the names of the processor's instructions that they use."""

    def warm_up(self, form: Format, activation_bits: int = 8) -> None:
        """Compile what weights of a format need, so that no step waits for it."""

    def linear(
        self, x: torch.Tensor, form: Format, data: torch.Tensor, out_features: int, activation_bits: int = 8
    ) -> torch.Tensor:
        """Return x @ weight.T, [T, out_features], for x [T, columns], both float32.

        Each row of x is rounded to 8 or 16 bits by itself, so that its result does not depend on the others.
        """

    def rows(self, ids: torch.Tensor, form: Format, data: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [T, columns] float32; `ids`, int64 [T], name rows that exist."""


class BlockPacker(Protocol):
    """A packer of GGUF blocks into the layout of `nbengine.kernels.quantized`, for any number of threads at once."""

    def warm_up(self, form: Format) -> None:
        """Compile what blocks of a format need."""

    def pack(
        self, form: Format, blocks: NDArray[np.uint8], output: torch.Tensor, order: NDArray[np.int64] | None
    ) -> bool:
        """Pack the blocks [rows, bytes] of some rows into `output`, uint8 [tiles, cells, bytes of a cell]; return
        False if a scale or a minimum is not finite.

        Row i is row order[i] of the blocks, or row i without an order. The rows of the last tile that are not there
        become 0.

        Raises:
            InvalidArgumentError: blocks, order and output do not fit together.
        """
