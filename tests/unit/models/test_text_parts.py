"""Models of text and images run as their text: tokens are those of transformers, and parts for images are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import EXPERTS, GEMMA_4, GROWING
from parallel_support import ThreadWorld
from safetensors.torch import load_file, save_file
from transformers_cases import LLAMA_4

from nbengine.errors import ModelLoadError
from tests.tools.compared_models import THROUGH_TRANSFORMERS
from tests.unit.models.conftest import SIZES

TOKENS, INNER = list(range(3, 40)), 48
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
"""Of eight pairs four turn by the time of an image, two by its row, and two by its column."""
SMALL = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
MISTRAL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}
QWEN3 = {"head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}
DEEP = {**SMALL, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mistral3": ({"head_dim": 16}, MISTRAL),
    "Mistral3, Ministral": (
        {"head_dim": 16, "model_type": "ministral3", "rope_parameters": GROWING},
        MISTRAL,
    ),
    "Gemma4": (
        {**GEMMA_4, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {**MISTRAL, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 64},
    ),
    "Qwen2VL": (
        {"rope_parameters": SECTIONS},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    ),
    "Qwen2_5_VL": ({"rope_parameters": SECTIONS}, {**SMALL, "fullatt_block_indexes": [0]}),
    "Qwen3VL": (QWEN3, DEEP),
    "Llama4": (
        LLAMA_4,
        {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
    # No matrix of experts is square, so that its two ways to lie in a file can be told apart.
    "Qwen3VLMoe": ({**QWEN3, **EXPERTS, "moe_intermediate_size": INNER}, DEEP),
}
"""By the beginning of transformers' class names, and what is behind a comma: settings of the text and of the images."""
WAYS = [*((kind, "nbengine") for kind in CASES), ("Llama4", "transformers")]
"""The kinds with the library whose layers run: the backend of transformers has the text of one."""


@pytest.fixture(scope="module", params=WAYS, ids=" of ".join)
def way(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A model of transformers, and `model_impl`."""
    kind, model_impl = request.param
    return made(kind), model_impl


def turn_experts(path: Path) -> None:
    """Give the experts of a file the inputs' features first, as those of the released Qwen3-VL have them."""
    weights = load_file(path)
    turned = {name: tensor.mT.contiguous() for name, tensor in weights.items() if ".mlp.experts." in name}
    assert {tuple(tensor.shape[1:]) for tensor in turned.values()} == {(64, 2 * INNER), (INNER, 64)}
    save_file({**weights, **turned}, path, {"format": "pt"})


def class_of(kind: str) -> str:
    """The beginning of a kind's class name."""
    return kind.partition(",")[0]


def made(kind: str) -> Any:
    """A random model of transformers, with a part for images."""
    import transformers

    text, vision = CASES[kind]
    model_class = getattr(transformers, f"{class_of(kind)}ForConditionalGeneration")
    config = model_class.config_class(
        text_config={**SIZES, **text}, vision_config=vision, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if "language_model" in name or "lm_head" in name:
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.data.copy_(1 + 0.3 * noise if "norm" in name else noise * scale)
    return model


@pytest.mark.parametrize("is_original", [True, False], ids=["as released", "as saved now"])
def test_tokens_are_those_of_transformers(
    way: tuple[Any, str], is_original: bool, tmp_path: Path, load: Any, make_runner: Any, compared: Any
) -> None:
    oracle, model_impl = way
    oracle.save_pretrained(tmp_path, save_original_format=is_original)
    runner = make_runner(load(tmp_path, model_impl=model_impl))
    found = torch.cat([runner.step({"a": TOKENS[:20]})["a"], runner.step({"a": TOKENS[20:]})["a"]])
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
    compared(oracle if model_impl == "nbengine" else THROUGH_TRANSFORMERS, "cut")


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)], ids=["TP2", "PP2"])
def test_experts_that_lie_turned_in_a_file_are_divided_among_ranks(
    tp_size: int, pp_size: int, tmp_path: Path, load: Any, make_runner: Any, compared: Any
) -> None:
    oracle = made("Qwen3VLMoe")
    oracle.save_pretrained(tmp_path)
    turn_experts(tmp_path / "model.safetensors")
    world = ThreadWorld(tp_size, pp_size)
    runners = [make_runner(load(tmp_path, parallel=state), parallel=state) for state in world.states]

    def run(state: Any) -> torch.Tensor:
        runner = runners[state.layout.rank]
        step = runner.step if state.layout.is_last_stage else runner.hidden
        found: torch.Tensor = step({"a": TOKENS})["a"]
        return found

    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    for logits in world.run(run)[world.states[-1].layout.pp_rank * tp_size :]:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    compared(oracle, "tensor" if tp_size > 1 else "pipeline")


def test_a_tensor_that_no_part_has_is_refused(way: tuple[Any, str], tmp_path: Path, load: Any) -> None:
    oracle, model_impl = way
    oracle.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.surprise.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not use: model\.surprise\.weight"):
        load(tmp_path, model_impl=model_impl)
