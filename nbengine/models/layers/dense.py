"""Products with dense weights in the layers of transformers' classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbengine.kernels.dense_kernels import DenseProducts, pays_to_split, select_dense, select_split


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `torch.nn.functional.linear` of x [..., in_features] and weight [out_features, in_features]. In 16 bits a
    row's result does not depend on the other rows."""
    products = _products(x, weight)
    if products is None:
        return F.linear(x, weight, bias)
    found = products.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return found.view(*x.shape[:-1], len(weight))


def _products(x: Tensor, weight: Tensor) -> DenseProducts | None:
    if x.dtype is not weight.dtype:
        return None
    columns = x.shape[-1]
    if weight.dtype is torch.float32 and not pays_to_split(x.numel() // max(1, columns), columns):
        return None
    return _select(weight)


def _select(weight: Tensor) -> DenseProducts | None:
    if weight.dtype is torch.float32:
        return select_split(weight.device)
    return select_dense(weight.device, weight.dtype)


def use_dense_products(model: nn.Module) -> None:
    """Have the linear layers of a model multiply with `dense_linear`, those that have not been given another way to. What
    that needs is compiled now, so that no step waits for it."""
    for module in model.modules():
        if type(module) is nn.Linear:
            _select(module.weight)
            if "forward" not in vars(module):
                vars(module)["forward"] = _forward_of(module)


def _forward_of(linear: nn.Linear) -> object:
    return lambda x: dense_linear(x, linear.weight, linear.bias)
