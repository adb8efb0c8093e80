"""The models that lie on a machine are found by what is in the caches and directories; nothing is fetched for that."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from nbengine.config import ModelConfig
from nbengine.models import suggested
from nbengine.models.checkpoints.files import list_aliases, resolve_model
from nbengine.models.checkpoints.hub import is_hub_id
from nbengine.models.checkpoints.kept_models import HUB_CACHE, OWN_CACHE, kept_models

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    return path


@pytest.fixture
def tiny(private_cache: Path, hub_cache: Path) -> Path:
    """A model's directory, which is in nbengine's cache."""
    return Path(resolve_model(ModelConfig(model="random-tiny")).directory)


def put_on_hub(cache: Path, name: str, model: Path) -> Path:
    """Lay a model into the hub's cache as its library does."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abc"
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    (repository / "blobs").mkdir()
    return snapshot


def test_empty_caches_have_no_models(private_cache: Path, hub_cache: Path) -> None:
    assert kept_models() == []


def test_models_of_all_places_are_found_with_size_and_class(
    tiny: Path, hub_cache: Path, tmp_path: Path
) -> None:
    put_on_hub(hub_cache, "owner/one", tiny)
    shutil.copytree(tiny, tmp_path / "mine" / "owner" / "two")
    found = {model.name: model for model in kept_models([str(tmp_path / "mine")])}
    two = str(tmp_path / "mine" / "owner" / "two")
    places = {"random-tiny": OWN_CACHE, "owner/one": HUB_CACHE, two: str(tmp_path / "mine")}
    assert {name: model.place for name, model in found.items()} == places
    weights = (tiny / "model.safetensors").stat().st_size
    assert {(model.num_bytes, model.kind) for model in found.values()} == {(weights, "LlamaForCausalLM")}
    assert all(model.config is not None and model.config.resolved for model in found.values())


def test_what_is_incomplete_is_listed_with_the_reason(tiny: Path, hub_cache: Path, tmp_path: Path) -> None:
    snapshot = put_on_hub(hub_cache, "owner/one", tiny)
    (snapshot / "model.safetensors").unlink()
    default = tiny.parent / "smollm2-135m"
    default.mkdir()
    (default / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"half of it")
    problems = {model.name: model.problem for model in kept_models([str(tmp_path / "none")])}
    assert problems["random-tiny"] == ""
    assert "has no weights" in problems["owner/one"]
    assert "`nbengine fetch smollm2-135m`" in problems["smollm2-135m"]
    assert problems[str(tmp_path / "none")] == "cannot be read: No such file or directory"


def test_a_model_met_twice_counts_once(tiny: Path) -> None:
    assert [model.name for model in kept_models([str(tiny), str(tiny.parent)])] == ["random-tiny"]


def test_a_seed_of_its_own_is_told(private_cache: Path, hub_cache: Path) -> None:
    resolve_model(ModelConfig(model="random-tiny-moe", seed=7))
    assert [model.name for model in kept_models()] == ["random-tiny-moe --seed 7"]


def test_what_is_suggested_can_be_fetched_and_the_page_lists_it() -> None:
    names = [each.name for each in suggested.SUGGESTED]
    assert all(name in list_aliases() or is_hub_id(name) for name in names)
    assert len(set(names)) == len(names)
    _, _, rest = PAGE.read_text().partition("<!-- suggested: begin -->\n")
    assert rest.partition("\n<!-- suggested: end -->")[0] == suggested.markdown_table()
