"""The products with dense weights of 16-bit types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class DenseProducts(Protocol):
    """Products with dense weights whose results for a row depend on nothing but the row: neither on the number of
    rows, nor on a row's place, nor on the number of threads. They serve one thread at a time, the one that calls
    torch."""

    name: str
    instructions: str
    """The processor's instructions that they use, by name."""

    def warm_up(self, dtype: torch.dtype, hidden_dtype: torch.dtype) -> None:
        """Compile what weights of type `dtype` and rows of `hidden_dtype` need, so that no step waits for it."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, [T, out_features], for x [T, in_features] and weight [out_features,
        in_features], bfloat16 or float16.

        x and bias are of the weight's type or float32; x is rounded to the weight's type, sums and the bias's addition
        are float32, and the result is of the type of x, rounded once. It goes to `out`, if that is given.

        Raises:
            InvalidArgumentError: shapes or types do not fit together.
        """
