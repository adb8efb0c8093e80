"""The division of transformers' models among ranks: layers among pipeline stages, and the projections that their
plans for tensor parallelism name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbengine.distributed.communicator import ParallelState
from nbengine.errors import InvalidArgumentError
from nbengine.models.layers.dense import dense_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nbengine.models.configs.transformers_config import TransformersConfig

_WHOLE = (
    "embedding_colwise",
    "embedding_rowwise",
    "local_params",
    "mla_kv_a_proj",
    "replicate",
    "replicated_with_grad_allreduce",
)
"""Kinds of division that leave every rank with all of a weight. Transformers divides embeddings; here they are
whole, so that no sum follows them."""
_OF_PROJECTIONS = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")
_OF_EXPERTS = {"gate_up_proj": ("packed_colwise", 1), "down_proj": ("rowwise", 2)}
"""The dimension along which the tensors of all experts of a layer [experts, ...] are divided."""
NUM_EXPERTS_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a parameter of `full_shape` that a rank has: from `start` on along the dimension `dim`.

    Where a parameter has the gates of experts and then their other projections, a rank has this part of both.
    """

    full_shape: tuple[int, ...]
    dim: int
    start: int


def divide_projections(
    model: PreTrainedModel, config: TransformersConfig, parallel: ParallelState
) -> dict[str, Part]:
    """Leave this rank's parts of the projections in a model without memory, and sum and gather their products;
    return the parts, by the names of parameters.

    Raises:
        InvalidArgumentError: the class has no plan, or one that cannot be followed with that many ranks.
    """
    size = parallel.layout.tp_size
    if size == 1:
        return {}
    name = config.architecture
    if not model.tp_plan:
        raise _not_divided(size, f"{name} of transformers has no plan for tensor parallelism")
    if config.num_kv_heads % size or config.num_heads % size:
        heads = f"{config.num_heads} attention heads, {config.num_kv_heads} key-value heads"
        raise _not_divided(size, f"a divisor of both numbers of heads: {heads}")
    plan = _Plan(model, name, parallel)
    return {**plan.divide_modules(), **plan.divide_parameters()}


def holds_experts(module: nn.Module, name: str) -> bool:
    """Return whether a parameter of `module` has the matrices of all experts, each [out, in], its gate before its other
    projection."""
    is_plain = getattr(module, "is_transposed", None) is False and getattr(module, "is_concatenated", False)
    own = name.rpartition(".")[2]
    return (
        is_plain
        and own in ("gate_up_proj", "down_proj")
        and getattr(module, own).dim() == NUM_EXPERTS_DIMENSIONS
    )


class _Plan:
    """A class's plan for tensor parallelism, as it is carried out."""

    def __init__(self, model: PreTrainedModel, name: str, parallel: ParallelState) -> None:
        self._model = model
        self._name = name
        self._parallel = parallel
        self._rules = [(re.compile(_pattern(key)), style) for key, style in (model.tp_plan or {}).items()]
        self._tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())

    def divide_modules(self) -> dict[str, Part]:
        """Divide projections, and sum what divided experts compute."""
        parts: dict[str, Part] = {}
        for path, module in self._model.named_modules():
            style = self._style(path)
            if style is None or style in _WHOLE or f"{path}.weight" in self._tied:
                continue
            if style == "moe_tp_experts":
                _sum_outcome(module, self._parallel.tp.all_reduce)
            elif style in _OF_PROJECTIONS and type(module) is nn.Linear:
                parts.update(_divide(path, module, style, self._parallel))
            else:
                raise self._refused(path, style)
        return parts

    def divide_parameters(self) -> dict[str, Part]:
        """Divide the parameters that the plan names by themselves: those of experts, and one number a head."""
        parts: dict[str, Part] = {}
        for path, parameter in list(self._model.named_parameters()):
            style = self._style(path)
            if style is None or style in _WHOLE:
                continue
            owner, _, own = path.rpartition(".")
            dim = 0
            if parameter.dim() > 1:
                offered, dim = _OF_EXPERTS.get(own, ("", 0))
                is_plain = holds_experts(self._model.get_submodule(owner), own)
                if style != offered or self._style(owner) != "moe_tp_experts" or not is_plain:
                    raise self._refused(path, style)
            elif style != "colwise":
                raise self._refused(path, style)
            parts[path] = self._narrow(path, parameter, dim, packed=style == "packed_colwise")
        return parts

    def _narrow(self, path: str, parameter: Tensor, dim: int, *, packed: bool) -> Part:
        layout = self._parallel.layout
        full = tuple(parameter.shape)
        inner = full[dim] // (1 + packed)
        if inner % layout.tp_size:
            raise _not_divided(layout.tp_size, f"a divisor of {inner}, which {path} has of features")
        own = inner // layout.tp_size
        owner, _, name = path.rpartition(".")
        module = self._model.get_submodule(owner)
        module._parameters[name] = _narrowed(parameter, dim, own * (1 + packed))
        return Part(full, dim, layout.tp_rank * own)

    def _style(self, path: str) -> str | None:
        return next((style for rule, style in self._rules if rule.fullmatch(path)), None)

    def _refused(self, path: str, style: str) -> InvalidArgumentError:
        why = f"the plan of {self._name} divides {path} by {style!r}, which is not offered"
        return _not_divided(self._parallel.layout.tp_size, why)


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\*", r"\d+")


def _divide(path: str, linear: nn.Linear, style: str, parallel: ParallelState) -> dict[str, Part]:
    layout, tp = parallel.layout, parallel.tp
    dim = 0 if style.startswith("colwise") else 1
    full_shape = tuple(linear.weight.shape)
    if full_shape[dim] % layout.tp_size:
        if style in ("colwise_gather_output", "rowwise_split_input"):
            return {}
        raise _not_divided(layout.tp_size, f"a divisor of {full_shape[dim]}, which {path} has of features")
    own = full_shape[dim] // layout.tp_size
    start = layout.tp_rank * own
    found = {f"{path}.weight": Part(full_shape, dim, start)}
    linear.weight = _narrowed(linear.weight, dim, own)
    if dim == 0:
        linear.out_features = own
        if linear.bias is not None:
            found[f"{path}.bias"] = Part(tuple(linear.bias.shape), 0, start)
            linear.bias = _narrowed(linear.bias, 0, own)
        if style == "colwise_gather_output":
            _replace_forward(
                linear, lambda x: _gathered(dense_linear(x, linear.weight, linear.bias), parallel)
            )
    else:
        linear.in_features = own
        is_whole = style == "rowwise_split_input"

        def product(x: Tensor) -> Tensor:
            x = x[..., start : start + own] if is_whole else x
            return _summed(dense_linear(x, linear.weight), linear.bias, tp.all_reduce)

        _replace_forward(linear, product)
    return found


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    vars(module)["forward"] = forward


def _sum_outcome(module: nn.Module, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Have a module answer with the sum of what all ranks' modules of this name compute."""
    forward = module.forward
    _replace_forward(
        module, lambda *arguments, **named: _summed(forward(*arguments, **named), None, all_reduce)
    )


def _summed(x: Tensor, bias: Tensor | None, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:
    if not x.is_meta:
        x = all_reduce(x.reshape(-1, x.shape[-1])).view(x.shape)
    return x if bias is None else x + bias


def _gathered(x: Tensor, parallel: ParallelState) -> Tensor:
    if x.is_meta:
        return x.new_empty(*x.shape[:-1], x.shape[-1] * parallel.layout.tp_size)
    return parallel.tp.all_gather(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _narrowed(weight: Tensor, dim: int, size: int) -> nn.Parameter:
    shape = list(weight.shape)
    shape[dim] = size
    return nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device), requires_grad=False)


def _not_divided(size: int, why: str) -> InvalidArgumentError:
    return InvalidArgumentError("tensor_parallel_size", size, f"1 with model_impl='transformers' ({why})")


class Skipped(nn.Module):
    """Stands for a layer that another stage has; it hands its input on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        vars(self).update({**plain, "training": False})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states as they are."""
        return hidden_states


class Stage:
    """The layers of one pipeline stage within a model that has been tried out; the others are taken out of it."""

    def __init__(
        self, model: PreTrainedModel, trunk: nn.Module, config: TransformersConfig, parallel: ParallelState
    ) -> None:
        self.received: Tensor | None = None
        """The hidden states from the stage before, which the first layer of this one takes."""
        self.sent: Tensor | None = None
        """The outcome of the last layer."""
        layout = parallel.layout
        if layout.pp_size == 1:
            return
        layers = _layers_of(model, trunk, config, layout.pp_size)
        own = layout.stage_layers(config.num_layers)
        for index in range(config.num_layers):
            if index not in own:
                layers[index] = Skipped(layers[index])
        if not layout.is_first_stage:
            layers[own.start].register_forward_pre_hook(self._receive, with_kwargs=True)
        if not layout.is_last_stage:
            layers[own.stop - 1].register_forward_hook(self._note)
        _drop_ends(model, trunk, parallel)

    def _receive(
        self, _module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (self.received, *arguments[1:]), named
        return arguments, {**named, "hidden_states": self.received}

    def _note(self, _module: nn.Module, _arguments: Any, outcome: Any) -> None:
        self.sent = outcome[0] if isinstance(outcome, tuple) else outcome


def _layers_of(
    model: PreTrainedModel, trunk: nn.Module, config: TransformersConfig, size: int
) -> nn.ModuleList:
    """Return the layers that the plan for pipeline parallelism names."""
    plan = getattr(model.config, "base_model_pp_plan", None) or {}
    for name in plan:
        layers = getattr(trunk, name, None)
        if isinstance(layers, nn.ModuleList) and len(layers) == config.num_layers:
            return layers
    why = (
        f"1 with model_impl='transformers' ({config.architecture} there has no plan for pipeline parallelism)"
    )
    raise InvalidArgumentError("pipeline_parallel_size", size, why)


def _drop_ends(model: PreTrainedModel, trunk: nn.Module, parallel: ParallelState) -> None:
    """Take out what is before the first stage's layers and behind the last one's, unless it is used here."""
    layout = parallel.layout
    is_tied = bool(model.all_tied_weights_keys)
    if not layout.is_first_stage and not (layout.is_last_stage and is_tied):
        model.set_input_embeddings(nn.Identity())
    if not layout.is_last_stage:
        if model.get_output_embeddings() is not None:
            model.set_output_embeddings(nn.Identity())
        for name, module in list(model.named_children()):
            if not any(each is trunk for each in module.modules()):
                setattr(model, name, nn.Identity())
        for name, module in list(trunk.named_children()):
            if "norm" in name and not isinstance(module, nn.ModuleList):
                setattr(trunk, name, nn.Identity())
