"""A decoder whose weights stay quantised computes what their values say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from nbengine.kernels.cpu.quantized import CpuProducts
from nbengine.kernels.quantized import Format, dense
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config
from nbengine.models.checkpoints.gguf_loader import GGUFWeights
from nbengine.models.checkpoints.loader import load_decoder
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats
from nbengine.models.registry import decoder_config
from nbengine.runtime.progress import Reporter
from tests.kernels.quantized_weights import rounded

TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(4)).tolist()
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}


class PlainProducts:
    """Products with the dense weights, of rows rounded in plain torch."""

    name = instructions = "plain"

    def warm_up(self, form: Format, activation_bits: int) -> None: ...

    def linear(
        self, x: Tensor, form: Format, data: Tensor, out_features: int, activation_bits: int
    ) -> Tensor:
        return (rounded(x, activation_bits) @ dense(form, data, out_features).double().T).float()

    def rows(self, ids: Tensor, form: Format, data: Tensor) -> Tensor:
        return dense(form, data, data.shape[0] * 16)[ids]


def load(path: Path, products: Any) -> DecoderForCausalLM:
    config = decoder_config(hf_config(read_header(path)))
    formats = GGUFWeights(path, config).formats
    return load_decoder(
        config,
        (path,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=None,
        report=Reporter(None, "load"),
        packed=ALL_DENSE if products is None else PackedFormats(formats, products),
    )


@pytest.mark.parametrize(
    ("kind", "settings", "variant"),
    [
        ("Llama", {}, {"arch": "llama", "weight_type": Kind.Q4_0, "permute": True}),
        (
            "Llama",
            {"tie_word_embeddings": True, "attention_bias": True},
            {"arch": "llama", "weight_type": Kind.Q4_1, "permute": True},
        ),
        ("Qwen2", {}, {"arch": "qwen2", "weight_type": Kind.Q5_1}),
        ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {"arch": "qwen3", "weight_type": Kind.Q8_0}),
    ],
)
def test_a_quantised_decoder_gives_the_logits_of_its_weights_values(
    kind: str,
    settings: dict[str, Any],
    variant: dict[str, Any],
    tmp_path: Path,
    random_model: Any,
    write_gguf: Any,
    gguf_variant: Any,
    make_runner: Any,
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(kind, **settings), gguf_variant(**variant))
    model = load(path, CpuProducts())
    packed = [slot for slot in model.weight_slots().values() if slot.form is not None]
    assert len(packed) >= 3 * 7
    logits = make_runner(model).step({"a": TOKENS})["a"]
    expected = make_runner(load(path, PlainProducts())).step({"a": TOKENS})["a"]
    exact = make_runner(load(path, None)).step({"a": TOKENS})["a"]
    rounding = float((expected - exact).std())
    assert 0 < rounding < 0.05 * float(exact.std())
    # A sum in another order may round an activation of a later layer otherwise, which is rare.
    assert float((logits - expected).std()) < 0.5 * rounding
    assert float((logits - expected).abs().median()) < 0.1 * rounding


def test_a_quantised_decoder_takes_the_memory_of_its_blocks(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    variant = gguf_variant(arch="llama", weight_type=Kind.Q4_0)
    path = write_gguf(tmp_path / "model.gguf", random_model("Llama", **WIDE), variant)
    quantised, exact = load(path, CpuProducts()), load(path, None)
    # 4.5 bits a value in place of 32; norms and the padding of 96 rows do not count.
    assert quantised.weights_bytes < 0.15 * exact.weights_bytes


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 1, 30, 2]])
def test_a_quantised_decoders_logits_do_not_depend_on_chunks_or_neighbours(
    chunks: list[int], tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any, make_runner: Any
) -> None:
    variant = gguf_variant(arch="llama", weight_type=Kind.Q4_1)
    path = write_gguf(tmp_path / "model.gguf", random_model("Llama"), variant)
    model = load(path, CpuProducts())
    alone = make_runner(model).step({"a": TOKENS})["a"]
    runner, at, found = make_runner(model), 0, []
    for size in chunks:
        found.append(runner.step({"b": [5] * 3, "a": TOKENS[at : at + size]})["a"])
        at += size
    # The test's attention, of plain torch, is the only part whose sums may be in another order.
    torch.testing.assert_close(torch.cat(found), alone, rtol=0, atol=2e-2 * float(alone.std()))
