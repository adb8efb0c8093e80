"""Linear layers of transformers' classes that multiply one input: which are stacked, and what that changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbengine.models.families.transformers_stacks import Paths, checked_stacks, make_stacks, noted_stacks

LAYERS = 3


@pytest.mark.parametrize(
    ("kind", "products"),
    # Queries, keys and values; their output; gate and other projection; the way back. Phi has its first projection of
    # the feed-forward block beside queries, keys and values.
    [("StableLm", 4), ("Starcoder2", 4), ("Phi", 3)],
)
def test_a_step_multiplies_each_input_once(
    kind: str,
    products: int,
    tmp_path: Path,
    load: Any,
    make_runner: Any,
    random_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = {"num_key_value_heads": 4} if kind == "Phi" else {}
    oracle = random_model(kind, num_hidden_layers=LAYERS, **heads)
    oracle.save_pretrained(tmp_path)
    runner = make_runner(load(tmp_path, model_impl="transformers"))
    multiply, calls = F.linear, []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(tuple(weight.shape))
        return multiply(x, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    found = runner.step({"a": [5, 6, 7]})["a"]
    # The last one makes logits.
    assert len(calls) == LAYERS * products + 1
    monkeypatch.undo()
    with torch.inference_mode():
        expected = oracle(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


class Layers(nn.Module):
    """Two linear layers whose input `between` may change between them, and whose outcomes `after` takes."""

    def __init__(self, between: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 6)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.after(self.first(x))
        return first, self.after(self.second(self.between(x)))


def stacks_of(model: Layers) -> tuple[Paths, ...]:
    def run() -> object:
        return model(torch.ones(1, 3, 8, device="meta"))

    found: list[Paths] = []
    with torch.no_grad():
        with noted_stacks(model, found):
            run()
        return checked_stacks(model, found, run)


def same(x: Tensor) -> Tensor:
    return x


def test_layers_of_one_input_are_stacked() -> None:
    assert stacks_of(Layers(same, same).to("meta")) == (("first", "second"),)


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x + 1, torch.clone])
def test_an_input_that_changes_in_between_is_another(change: Callable[[Tensor], Tensor]) -> None:
    assert stacks_of(Layers(change, same).to("meta")) == ()


def test_a_class_that_needs_rows_one_after_the_other_gets_them() -> None:
    model = Layers(same, lambda x: x.view(-1)).to("meta")
    assert stacks_of(model) == ()
    assert all("forward" not in vars(layer) for layer in (model.first, model.second))


def test_each_step_has_products_of_its_own_input_even_after_one_that_broke_off() -> None:
    model = Layers(same, same).requires_grad_(requires_grad=False)
    (stack,) = make_stacks(model, [("first", "second")])
    weights = {
        (id(layer), name): value.clone()
        for layer in (model.first, model.second)
        for name, value in layer.named_parameters()
    }
    for layer, name, part in stack.allocate(new_memory, torch.float32):
        part.copy_(weights[id(layer), name])
    x, other = torch.randn(2, 1, 3, 8)
    for given in (x, other, x):
        model.first(given)
        first, second = model(given)
        for found, layer in ((first, model.first), (second, model.second)):
            torch.testing.assert_close(found, multiply_by(layer, weights, given))
    # Nothing is kept of the last input, and the same tensor with other numbers is multiplied again.
    x.add_(1)
    torch.testing.assert_close(model(x)[1], multiply_by(model.second, weights, x))


def new_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def multiply_by(layer: nn.Linear, weights: dict[tuple[int, str], Tensor], x: Tensor) -> Tensor:
    return x @ weights[id(layer), "weight"].T + weights[id(layer), "bias"]
