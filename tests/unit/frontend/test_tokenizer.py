"""Loading tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError, ModelNotFoundError
from nbengine.frontend.tokenizer import load_tokenizer, resolve_tokenizer


def test_it_neither_truncates_nor_pads_whatever_its_file_says(model_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_directory, copy)
    content = json.loads((copy / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    (copy / "tokenizer.json").write_text(json.dumps(content))
    original = load_tokenizer(ModelConfig(directory=str(model_directory)))
    tokenizer = load_tokenizer(ModelConfig(directory=str(copy)))
    ids = tokenizer.backend_tokenizer.encode("the quick brown fox").ids
    assert ids == original.backend_tokenizer.encode("the quick brown fox").ids
    assert len(ids) > 2


def test_a_tokenizer_of_its_own_wins_over_the_models(model_directory: Path, tmp_path: Path) -> None:
    config = ModelConfig(directory=str(tmp_path), tokenizer=resolve_tokenizer(str(model_directory)))
    assert load_tokenizer(config).eos_token == "<|end|>"


def test_a_directory_without_a_tokenizer_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(ModelConfig(directory=str(tmp_path)))
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        resolve_tokenizer(str(tmp_path))


def test_a_corrupt_tokenizer_is_a_load_error(model_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_directory, copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_tokenizer(ModelConfig(directory=str(copy)))


def test_a_name_that_is_nothing_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no/such/place", "nobody/no-such-tokenizer", "~nobody-here/tokenizer"):
        with pytest.raises(ModelNotFoundError, match="no tokenizer"):
            resolve_tokenizer(name)
