"""The registry: every class has a family, people can add their own, and what is missing is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from nbengine import register_model
from nbengine.config import ModelConfig
from nbengine.config.registered_models import forget_model
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.configs.hf_config import FAMILIES_KEY, load_hf_config
from nbengine.models.configs.transformers_config import TEXT_PARTS as THROUGH_TRANSFORMERS
from nbengine.models.family import DecoderFamily
from nbengine.models.listing import markdown_table, runnable
from nbengine.models.registry import DECODERS, decoder_config, load_family
from tests.support.family_cases import CASES
from tests.support.recurrent_cases import CASES as RECURRENT
from tests.tools.compared_models import COLUMNS, ENCODERS_THROUGH_TRANSFORMERS, rows, table_on_page
from tests.unit.models.test_text_parts import CASES as TEXT_PARTS
from tests.unit.models.test_text_parts import class_of

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
KINDS = {case.kind for case in CASES.values()} | {kind for kind, _ in RECURRENT.values()}
COMPARED = {f"{kind}ForCausalLM" for kind in KINDS} | {
    "Gemma3ForConditionalGeneration",
    *(f"{class_of(kind)}ForConditionalGeneration" for kind in TEXT_PARTS),
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


class Own(DecoderFamily):
    """A family that somebody has registered."""

    def variant(self, hf: Any) -> dict[str, Any]:
        """Say that all layers but one have a window of the given size."""
        return {"residual_scale": 0.5}


OWN = f"{__name__}:Own"


@pytest.fixture
def registered() -> Any:
    register_model("OwnForCausalLM", OWN)
    yield
    forget_model("OwnForCausalLM")


def test_every_class_is_one_of_transformers_and_is_compared_with_it() -> None:
    assert {*DECODERS, *THROUGH_TRANSFORMERS} == COMPARED
    assert all(hasattr(transformers, name) for name in DECODERS)


def test_every_family_is_found_and_says_what_it_is() -> None:
    for reference in DECODERS.values():
        assert load_family(reference).title


def test_the_page_lists_what_the_registry_has() -> None:
    _, _, rest = PAGE.read_text().partition("<!-- models: begin -->\n")
    assert rest.partition("\n<!-- models: end -->")[0] == markdown_table()


def test_the_page_says_how_each_family_was_compared() -> None:
    """`make models` counts the comparisons of a run, and writes them there."""
    listed, found = {row.title: row for row in runnable({})}, table_on_page()
    assert list(found) == list(rows())
    for title, counts in found.items():
        row = listed.get(title)
        missing = {column for column, count in counts.items() if not count}
        if title == ENCODERS_THROUGH_TRANSFORMERS or (row is not None and "encoders" in title):
            assert missing == set(COLUMNS) - {"cut"}
        elif row is not None:
            # The engine computes the text of Qwen3-VL MoE as that of Qwen 3 MoE.
            engine = {"engine"} if title == "Qwen3-VL MoE (text)" else set()
            assert missing == (engine if row.gguf else {"gguf"} | engine), title
        elif row is None:
            assert missing == {"gguf"}, title


def test_families_and_their_listing_import_no_torch() -> None:
    code = (
        "import sys\nfrom nbengine.models.listing import runnable\nrunnable({})\n"
        "from nbengine.models.registry import decoder_config\n"
        f"decoder_config({HF!r})\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_registered_reaches_another_process_as_plain_data(registered: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**HF, "architectures": ["OwnForCausalLM"]}))
    sent = msgspec.json.encode(ModelConfig("m", directory=str(tmp_path)))
    forget_model("OwnForCausalLM")
    received = msgspec.json.decode(sent, type=ModelConfig)
    config = decoder_config(load_hf_config(received))
    assert (config.family, config.residual_scale) == (OWN, 0.5)
    with pytest.raises(ModelLoadError, match="OwnForCausalLM is not supported"):
        decoder_config(load_hf_config(ModelConfig("m", directory=str(tmp_path))))


def test_a_registered_family_takes_the_place_of_a_known_one(tmp_path: Path) -> None:
    register_model("LlamaForCausalLM", OWN)
    try:
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(HF))
        config = ModelConfig("m", directory=str(tmp_path))
    finally:
        forget_model("LlamaForCausalLM")
    assert decoder_config(load_hf_config(config)).residual_scale == 0.5
    assert decoder_config(HF).residual_scale == 1


def test_a_file_names_no_code_to_import(tmp_path: Path) -> None:
    stated = {**HF, "architectures": ["Evil"], FAMILIES_KEY: {"Evil": "os:system"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(stated))
    assert FAMILIES_KEY not in load_hf_config(ModelConfig("m", directory=str(tmp_path)))


def test_registering_imports_nothing_and_checks_its_arguments(registered: None) -> None:
    for wrong in ("module", "module:", ":Class", "a b:C", 3):
        with pytest.raises(InvalidArgumentError, match="family must be"):
            register_model("XForCausalLM", wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="architecture must be"):
        register_model("", OWN)
    register_model("XForCausalLM", "nowhere.at_all:Class")
    forget_model("XForCausalLM")
    hf = {**HF, "architectures": ["XForCausalLM"], FAMILIES_KEY: {"XForCausalLM": "nowhere.at_all:Class"}}
    with pytest.raises(ModelLoadError, match=r"nowhere\.at_all:Class.*PYTHONPATH"):
        decoder_config(hf)
    assert runnable({"OwnForCausalLM": OWN})[-2].how == OWN


@pytest.mark.parametrize(
    ("hf", "missing"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "gated delta rule.*other architectures only",
        ),
        ({"index_topk": 2048}, "an indexer chooses, which nbengine does not have"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder.*does not have"),
        ({"state_size": 16}, "Mamba.*other architectures only"),
        ({"vision_config": {}}, "images"),
    ],
)
def test_an_unsupported_model_says_what_is_missing_and_what_runs(hf: dict[str, Any], missing: str) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"NewForCausalLM is not supported; it needs .*{missing}.*Gemma3.*Llama"
    ):
        decoder_config({**HF, "architectures": ["NewForCausalLM"], **hf})


def test_a_misspelt_class_is_told_the_nearest() -> None:
    with pytest.raises(ModelLoadError, match=r"did you mean Gemma3ForCausalLM\?"):
        decoder_config({**HF, "architectures": ["Gema3ForCausalLM"]})


def test_a_model_of_text_and_images_is_read_as_its_text(
    tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    import torch
    from safetensors.torch import save_file

    oracle = random_model(
        "Gemma3", head_dim=16, query_pre_attn_scalar=16, sliding_window=8, tie_word_embeddings=True
    )
    text = oracle.config.to_dict()
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode({**whole, "vision_config": {"hidden_size": 8}})
    )
    weights = {
        f"language_model.{name}": tensor
        for name, tensor in oracle.state_dict().items()
        if "lm_head" not in name
    }
    weights["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(8)
    save_file(weights, str(tmp_path / "model.safetensors"))
    tokens = list(range(3, 40))
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(
        make_runner(load(tmp_path)).step({"a": tokens})["a"], expected, rtol=0, atol=2e-4
    )
    weights["surprise.weight"] = torch.ones(8)
    save_file(weights, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelLoadError, match=r"does not use: surprise\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "entries", "kinds"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, "ffff"),
        ("MistralForCausalLM", {"sliding_window": 8, "num_key_value_heads": 2}, "wwww"),
        ("MistralForCausalLM", {"sliding_window": 256, "num_key_value_heads": 2}, "ffff"),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, "wfwf"),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, "wfwf"),
        ("Olmo3ForCausalLM", {"sliding_window": 8}, "wwwf"),
        ("GptOssForCausalLM", {"sliding_window": 8, "num_key_value_heads": 2}, "wfwf"),
    ],
)
def test_each_layer_says_what_it_keeps_of_a_request(name: str, entries: dict[str, Any], kinds: str) -> None:
    rules = decoder_config({**HF, "architectures": [name], **entries}).cache_rules()
    assert [(rule.kind, rule.size) for rule in rules] == [
        ("window", 8) if kind == "w" else ("full", 0) for kind in kinds
    ]


def test_experts_are_told_from_the_registry(tmp_path: Path) -> None:
    assert resolve_model(ModelConfig("random-tiny-moe")).is_moe
    assert not resolve_model(ModelConfig("random-tiny")).is_moe
