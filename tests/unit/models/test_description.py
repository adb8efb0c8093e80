"""A model's small files on their way to another machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError
from nbengine.models.configs.description import ModelDescription, describe_model, described_model

CONTENT = {"config.json": b"{}", "chat_template.jinja": b"{{ x }}", "1_Pooling/config.json": b"[1]"}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    for name, content in {
        **CONTENT,
        "model.safetensors": b"\0",
        "model.safetensors.index.json": b"{}",
    }.items():
        path = tmp_path / "m" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_bytes(b"{1}")
    return ModelConfig("m", directory=str(tmp_path / "m"), tokenizer=str(tmp_path / "t"))


def files_in(directory: str) -> dict[str, bytes]:
    root = Path(directory)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_files_arrive_without_the_weights_and_go_at_the_end(config: ModelConfig) -> None:
    sent = msgspec.msgpack.encode(describe_model(config))
    received = msgspec.msgpack.decode(sent, type=ModelDescription)
    with described_model(config, received) as model:
        assert files_in(model.directory) == CONTENT
        assert model.tokenizer is not None
        assert files_in(model.tokenizer) == {"tokenizer.json": b"{1}"}
        assert model.directory != config.directory
    assert not Path(model.directory).exists()


def test_a_tokenizer_of_its_own_is_not_made_up(config: ModelConfig) -> None:
    description = describe_model(ModelConfig("m", directory=config.directory))
    with described_model(config, description) as model:
        assert model.tokenizer is None


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/../../x.json", "a/b/c.json", ""])
def test_no_name_leads_out_of_the_directory(config: ModelConfig, name: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with (
        pytest.raises(ModelLoadError, match="a file of the name"),
        described_model(config, ModelDescription([(name, b"")], None)),
    ):
        pass
    assert sorted(tmp_path.rglob("*")) == before
