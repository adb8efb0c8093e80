"""Lengths that a model's files state: one limits requests, and those that are shorter are named at the start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nbengine.config import ModelConfig
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.pooling_config import advised_model_len, longest_model_len
from nbengine.models.configs.stated_lengths import warn_of_changed_angles, warn_of_shorter_lengths
from nbengine.models.configs.usual_names import OTHER_NAMES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}
NAMES = OTHER_NAMES["max_position_embeddings"]


def model(directory: Path, **files: dict[str, Any]) -> ModelConfig:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return ModelConfig(directory=str(directory))


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Any:
    def warnings(config: ModelConfig, max_model_len: int = 1000) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "nbengine"):
            warn_of_shorter_lengths(config, max_model_len)
        return caplog.messages

    return warnings


@pytest.mark.parametrize("name", NAMES)
def test_a_length_under_any_of_its_names_limits_requests(name: str, tmp_path: Path) -> None:
    assert longest_model_len(load_hf_config(model(tmp_path, config={name: 90}))) == 90


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config": {"n_positions": 512}}, "n_positions (config.json) 512"),
        ({"tokenizer_config": {"model_max_length": 512}}, "model_max_length (tokenizer_config.json) 512"),
        ({"generation_config": {"max_length": 512}}, "max_length (generation_config.json) 512"),
        (
            {"config": {"rope_scaling": {**YARN, "original_max_position_embeddings": 128}}},
            "the scaled rotary embedding (config.json) 512",
        ),
    ],
)
def test_a_shorter_length_is_named_with_its_file_and_the_remedy(
    files: dict[str, Any], said: str, warnings_of: Any, tmp_path: Path
) -> None:
    config = {"max_position_embeddings": 1000, **files.pop("config", {})}
    found = model(tmp_path, config=config, **files)
    [message] = warnings_of(found)
    where = "where a prompt and its output may have 1000 tokens; max_model_len=512 keeps to that"
    assert message == f"{tmp_path}: the files state {said}, {where}"
    assert warnings_of(found, 512) == []


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"model_max_length": 1000000000000000019884624838656}},
        {"tokenizer_config": {"model_max_length": None}},
        {"generation_config": {"max_length": 20}},
        {"generation_config": {"max_length": 4096, "max_new_tokens": 5}},
        {"config": {"max_position_embeddings": 250, "rope_scaling": YARN}},
    ],
)
def test_lengths_that_say_nothing_and_those_that_are_long_enough_are_not_named(
    files: dict[str, Any], warnings_of: Any, tmp_path: Path
) -> None:
    assert warnings_of(model(tmp_path, **{"config": {"max_position_embeddings": 1000}, **files})) == []


DYNAMIC = {"max_position_embeddings": 1000, "rope_scaling": {"type": "dynamic", "factor": 2.0}}


def test_a_length_beyond_which_all_angles_change_is_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    found = model(tmp_path, config=DYNAMIC)
    hf = load_hf_config(found)
    assert (longest_model_len(hf), advised_model_len(str(tmp_path), hf)) == (2000, 1000)
    with caplog.at_level(logging.WARNING, "nbengine"):
        warn_of_changed_angles(found, 1000)
        assert caplog.messages == []
        warn_of_changed_angles(found, 1500)
    [message] = caplog.messages
    assert "begins beyond 1000 tokens; all requests are computed with the angles for 1500 tokens" in message


def test_a_generation_config_that_is_left_out_is_not_named(warnings_of: Any, tmp_path: Path) -> None:
    model(tmp_path, config={"max_position_embeddings": 1000}, generation_config={"max_length": 512})
    assert warnings_of(ModelConfig(directory=str(tmp_path), generation_config="none")) == []
