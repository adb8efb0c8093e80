"""Linear layers of transformers' classes that multiply one input, as one product with their stacked weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from nbengine.models.layers.dense import dense_linear

logger = logging.getLogger(__name__)

Paths = tuple[str, ...]
"""The paths of the linear layers of a stack, in the order in which they run."""


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that multiplies in the usual way."""
    return type(module) is nn.Linear and "forward" not in vars(module)


@contextlib.contextmanager
def noted_stacks(model: nn.Module, found: list[Paths]) -> Iterator[None]:
    """Watch a model run, and enter at the end which of its linear layers can be stacked.

    They get the very same tensor, which nothing changes in between, and each runs once.
    """
    calls: list[tuple[str, nn.Module, Tensor, int]] = []

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def take(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            # The tensor is kept until the end, so that no other one gets its identity.
            calls.extend((path, module, x, x._version) for x in given)

        return take

    hooks = [
        module.register_forward_pre_hook(note(path))
        for path, module in model.named_modules()
        if is_plain(module)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    paths = [path for path, *_ in calls]
    by_input: dict[tuple[int, int, bool], list[str]] = {}
    for path, module, x, version in calls:
        if paths.count(path) == 1:
            by_input.setdefault((id(x), version, module.bias is None), []).append(path)
    found.extend(tuple(stack) for stack in by_input.values() if len(stack) > 1)


class Stack:
    """Linear layers of one input. The first that is given an input multiplies for all; the others take their parts of
    that. Each hands out columns of one tensor."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = list(linears)
        self._sizes = [len(linear.weight) for linear in linears]
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._x: Tensor | None = None
        self._products: list[Tensor | None] = []
        for place, linear in enumerate(linears):
            vars(linear)["forward"] = self._forward_of(place)

    def give_up(self) -> None:
        """Have each layer multiply by itself again."""
        for linear in self._linears:
            vars(linear).pop("forward", None)

    def allocate(
        self, empty: Callable[[tuple[int, ...], torch.dtype], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[nn.Linear, str, Tensor]]:
        """Allocate weights of one type, uninitialised, and yield each layer's part with the layer and its name there."""
        columns = self._linears[0].weight.shape[1]
        self._weight = empty((sum(self._sizes), columns), dtype)
        for linear, part in zip(self._linears, self._weight.split_with_sizes(self._sizes), strict=True):
            yield linear, "weight", part
        if self._linears[0].bias is not None:
            self._bias = empty((sum(self._sizes),), dtype)
            for linear, part in zip(self._linears, self._bias.split_with_sizes(self._sizes), strict=True):
                yield linear, "bias", part

    def _forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self._x is not x or self._products[place] is None:
                self._x, self._products = x, list(self._multiply(x).split_with_sizes(self._sizes, -1))
            found, self._products[place] = self._products[place], None
            if not any(each is not None for each in self._products):
                self._x = None
            assert found is not None
            return found

        return forward

    def _multiply(self, x: Tensor) -> Tensor:
        if self._weight is None:
            # The model is tried out, without memory.
            return x.new_empty(*x.shape[:-1], sum(self._sizes))
        return dense_linear(x, self._weight, self._bias)


def make_stacks(model: nn.Module, stacks: Sequence[Paths]) -> list[Stack]:
    """Stack linear layers of a model, as far as it has them: some may belong to another pipeline stage."""
    modules = dict(model.named_modules())
    found = []
    for paths in stacks:
        linears = [modules[path] for path in paths if path in modules]
        if len(linears) == len(paths) and all(map(is_plain, linears)):
            found.append(Stack(linears))
    return found


def checked_stacks(model: nn.Module, stacks: Sequence[Paths], run: Callable[[], object]) -> tuple[Paths, ...]:
    """Return the stacks if the class can do with products that are columns of one tensor, as `run`, which runs the model
    without numbers, shows; else none."""
    made = make_stacks(model, stacks)
    try:
        run()
    except RuntimeError as error:
        # Rows that do not lie one after the other have no view of another shape.
        logger.info("%s multiplies one projection at a time: %s", type(model).__name__, error)
        return ()
    finally:
        for stack in made:
            stack.give_up()
    return tuple(stacks)
