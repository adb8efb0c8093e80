"""Products with dense weights in the layers of transformers' classes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nbengine.kernels.dense_kernels import select_dense


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `torch.nn.functional.linear` of x [..., in_features] and weight [out_features, in_features], where a row's
    result does not depend on the other rows."""
    products = None if x.dtype is not weight.dtype else select_dense(x.device, weight.dtype)
    if products is None:
        return F.linear(x, weight, bias)
    found = products.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return found.view(*x.shape[:-1], len(weight))


def use_dense_products(model: nn.Module) -> None:
    """Have the linear layers of a model multiply with `dense_linear`, those that have not been given another way to."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            vars(module)["forward"] = _forward_of(module)


def _forward_of(linear: nn.Linear) -> object:
    return lambda x: dense_linear(x, linear.weight, linear.bias)
