"""Checkpoints of 8-bit floating point with a scale for each block, as DeepSeek-V3's are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES
from parallel_support import ThreadWorld
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbengine.errors import ModelLoadError

BLOCK = (24, 16)
"""Rows and columns, which divide neither the heads of a rank nor every matrix."""
LARGEST = 448.0
TOKENS = list(range(3, 60))


def spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, columns = BLOCK
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def shortened(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, and its scales."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, BLOCK, strict=True))
    padded = torch.zeros(rows * BLOCK[0], columns * BLOCK[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = padded.view(rows, BLOCK[0], columns, BLOCK[1]).abs().amax((1, 3))
    scales = largest.clamp(min=1e-12) / LARGEST
    return (weight / spread(scales, tuple(weight.shape))).to(torch.float8_e4m3fn), scales


@pytest.fixture
def checkpoint(tmp_path: Path, random_model: Any) -> tuple[Path, Any]:
    """A directory with a model whose matrices are short, but for those that DeepSeek keeps, and an oracle with
    the same numbers."""
    case = CASES["deepseek v3"]
    oracle = random_model(case.kind, **case.settings)
    oracle.save_pretrained(tmp_path)
    path, kept = tmp_path / "model.safetensors", {}
    weights = load_file(path)
    for name, weight in weights.items():
        is_short = weight.dim() == 2 and name.startswith("model.layers") and ".gate.weight" not in name
        if not is_short:
            kept[name] = weight
            continue
        numbers, scales = shortened(weight)
        kept[name], kept[f"{name}_scale_inv"] = numbers, scales
        weights[name] = numbers.float() * spread(scales, tuple(weight.shape))
    assert sum(name.endswith("_scale_inv") for name in kept) > 20
    save_file(weights, path, {"format": "pt"})
    exact = type(oracle).from_pretrained(tmp_path, dtype=torch.float32).eval()
    save_file(kept, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, exact


def change(directory: Path, edit: Any) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, {"format": "pt"})


def test_the_numbers_are_those_of_the_file(
    checkpoint: tuple[Path, Any], load: Any, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory, exact = checkpoint
    with caplog.at_level(logging.INFO):
        model = load(directory)
    found = make_runner(model).step({"a": TOKENS})["a"]
    with torch.inference_mode():
        expected = exact(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert [record.getMessage() for record in caplog.records if "FP8" in record.getMessage()] == [
        "matrices of 8-bit floating point (FP8) are held in float32, twice as large or more"
    ]


def test_two_ranks_read_their_parts_of_blocks(
    checkpoint: tuple[Path, Any], load: Any, make_runner: Any
) -> None:
    directory, exact = checkpoint
    world = ThreadWorld(2, 1)
    runners = [make_runner(load(directory, parallel=state), parallel=state) for state in world.states]
    with torch.inference_mode():
        expected = exact(torch.tensor([TOKENS])).logits[0]
    for found in world.run(lambda state: runners[state.layout.rank].step({"a": TOKENS})["a"]):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_scales_that_are_missing_or_do_not_fit_are_refused(checkpoint: tuple[Path, Any], load: Any) -> None:
    directory, _ = checkpoint
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    change(directory, lambda weights: weights.update({name: weights[name][:1]}))
    with pytest.raises(ModelLoadError, match=r"o_proj\.weight_scale_inv has the type F32 and the shape"):
        load(directory)
    change(directory, lambda weights: weights.pop(name))
    with pytest.raises(ModelLoadError, match=r"o_proj\.weight_scale_inv is missing"):
        load(directory)


def test_a_scale_that_is_not_finite_is_named(checkpoint: tuple[Path, Any], load: Any) -> None:
    directory, _ = checkpoint
    change(
        directory,
        lambda weights: weights["model.layers.1.self_attn.o_proj.weight_scale_inv"].fill_(torch.nan),
    )
    with pytest.raises(
        ModelLoadError, match=r"layers\.1\.self_attn\.o_proj\.weight or its scales have a number"
    ):
        load(directory)


@pytest.mark.parametrize("block", [None, [128], [0, 128], "128"])
def test_other_kinds_of_scales_are_refused(checkpoint: tuple[Path, Any], load: Any, block: object) -> None:
    directory, _ = checkpoint
    stated = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(ModelLoadError, match=r"weight_block_size .* is not supported"):
        load(directory, hf_overrides={"quantization_config": stated})
