"""Files of Bamba and of Granite 4 name one architecture: the reader tells them apart, or refuses.

The converter writes `rope.scaling.finetuned` into every such file: true for Bamba, and false for Granite 4 with
recurrent layers, whose heads are not turned. Only Granite 4 has scales, experts and a block that all tokens share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config
from tests.support.gguf_converter import Converter
from tests.unit.models.test_gguf_families import TOKENS, assert_same, loaded, made, runner_of

SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
SHARED, TURNED = "expert_shared_feed_forward_length", "rope.scaling.finetuned"
HEAD_DIM = 16
AS_BAMBA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "attention_multiplier": HEAD_DIM**-0.5,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
}
"""Settings of Granite 4 with which it computes what Bamba computes."""


def written(directory: Path, *, without: tuple[str, ...] = (), **more: Any) -> Path:
    """The file of the checkpoint in a directory, without some keys and with others besides or in their place."""
    converter = Converter(directory, Kind.F32)
    left_out = [f"{{arch}}.{key}" for key in without]
    stated = {key: value for key, value in converter.metadata() if key not in left_out}
    converter.metadata = lambda: iter(stated.items())  # type: ignore[method-assign]
    more = {f"granitehybrid.{key.replace('__', '.')}": value for key, value in more.items()}
    return converter.write(directory / "other.gguf", more)


def class_of(path: Path) -> str:
    [name] = hf_config(read_header(path))["architectures"]
    return str(name)


def test_a_file_of_granite_4_that_lost_its_scales_is_refused_and_not_read_as_bamba(
    tmp_path: Path, random_model: Any
) -> None:
    made("granite 4", Kind.F32, tmp_path, random_model)
    message = r"other\.gguf: granitehybrid\.attention\.scale is missing.* convert_hf_to_gguf"
    for without in (SCALES, (*SCALES, SHARED), (*SCALES, SHARED, "expert_count")):
        path = written(tmp_path, without=without)
        assert read_header(path).metadata["granitehybrid.rope.scaling.finetuned"] is False
        with pytest.raises(ModelLoadError, match=message):
            hf_config(read_header(path))
    # The block that all tokens share is Granite's, whatever is said of the rotary embedding.
    with pytest.raises(ModelLoadError, match=message):
        hf_config(read_header(written(tmp_path, without=(*SCALES, TURNED))))


def test_a_file_of_granite_4_needs_only_the_scales_that_are_not_1(tmp_path: Path, random_model: Any) -> None:
    ones = {key: value for key, value in AS_BAMBA.items() if value == 1.0}
    oracle, _ = made("granite 4", Kind.F32, tmp_path, random_model, **ones)
    path = written(tmp_path, without=SCALES[1:])
    assert class_of(path) == "GraniteMoeHybridForCausalLM"
    assert_same(runner_of("granite 4", loaded(path)).step({"a": TOKENS})["a"], oracle)


def test_layers_without_attention_need_no_scale_for_it(tmp_path: Path, random_model: Any) -> None:
    settings = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
    oracle, _ = made(
        "granite 4", Kind.F32, tmp_path, random_model, layer_types=["linear_attention"] * 4, **settings
    )
    path = written(tmp_path, without=SCALES)
    assert class_of(path) == "GraniteMoeHybridForCausalLM"
    assert_same(runner_of("granite 4", loaded(path)).step({"a": TOKENS})["a"], oracle)


@pytest.mark.parametrize(
    ("name", "without"), [("granite 4", (*SCALES, SHARED, TURNED)), ("bamba", (TURNED,))]
)
def test_a_file_that_does_not_tell_the_two_apart_is_refused(
    name: str, without: tuple[str, ...], tmp_path: Path, random_model: Any
) -> None:
    made(name, Kind.F32, tmp_path, random_model)
    message = (
        r"other\.gguf: granitehybrid\.rope\.scaling\.finetuned is missing, which is true for Bamba and false for "
        r"Granite 4\. Convert the model again"
    )
    with pytest.raises(ModelLoadError, match=message):
        hf_config(read_header(written(tmp_path, without=without)))


def test_granite_4_whose_heads_are_turned_reads_as_bamba_where_both_give_the_same_numbers(
    tmp_path: Path, random_model: Any
) -> None:
    oracle, _ = made("granite 4", Kind.F32, tmp_path, random_model, **AS_BAMBA)
    assert oracle.config.hidden_size // oracle.config.num_attention_heads == HEAD_DIM
    stated = written(tmp_path, rope__scaling__finetuned=True)
    assert class_of(stated) == "GraniteMoeHybridForCausalLM"
    unstated = written(tmp_path, without=(*SCALES, SHARED), rope__scaling__finetuned=True)
    assert class_of(unstated) == "BambaForCausalLM"
    for path in (stated, unstated):
        assert_same(runner_of("granite 4", loaded(path)).step({"a": TOKENS})["a"], oracle)


@pytest.mark.parametrize("name", ["bamba", "bamba, heads turned whole"])
def test_bamba_reads_as_granite_4_where_both_give_the_same_numbers(
    name: str, tmp_path: Path, random_model: Any
) -> None:
    oracle, path = made(name, Kind.F32, tmp_path, random_model)
    assert class_of(path) == "BambaForCausalLM"
    scales = {"attention__scale": HEAD_DIM**-0.5, **dict.fromkeys(SCALES[1:], 1.0)}
    scaled = written(tmp_path, **scales)
    assert class_of(scaled) == "GraniteMoeHybridForCausalLM"
    for each in (path, scaled):
        assert_same(runner_of(name, loaded(each)).step({"a": TOKENS})["a"], oracle)
