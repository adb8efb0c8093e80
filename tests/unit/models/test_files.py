"""From names to files: the order of the kinds of names, and what is said when one leads nowhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError, ModelNotFoundError
from nbengine.frontend.text.tokenizer import resolve_tokenizer
from nbengine.models.checkpoints import files
from nbengine.models.checkpoints.files import cache_dir, list_aliases, resolve_model
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.hub import model_files
from nbengine.models.checkpoints.safetensors_loader import SafetensorsWeights


def resolve(name: str | Path, **settings: Any) -> ModelConfig:
    return resolve_model(ModelConfig(model=str(name), **settings))


@pytest.fixture
def checkpoint(private_cache: Path) -> Path:
    return Path(resolve("random-tiny").directory)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make a directory that every GGUF file's prepared directory is said to be."""
    directory = tmp_path / "prepared"
    directory.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (directory / name).write_text("{}")
    monkeypatch.setattr(files, "prepared_directory", lambda path, report, advised: directory)
    return directory


def test_a_directory_gives_absolute_paths(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    config = resolve(checkpoint.name)
    assert config.resolved
    assert config.directory == str(checkpoint)
    assert config.weights == (str(checkpoint / "model.safetensors"),)


def test_a_resolved_configuration_comes_back_as_it_is(checkpoint: Path) -> None:
    config = resolve(checkpoint)
    assert resolve_model(config) is config


def test_an_index_decides_which_shards_belong_to_the_model(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("one.safetensors", "two.safetensors", "adapter.safetensors"):
        (checkpoint / name).write_bytes(b"")
    assert [Path(path).name for path in resolve(checkpoint).weights] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, r"its index names: gone\.safetensors"),
        ({"weight_map": {"a": "../model.safetensors"}}, r"outside its directory: \.\./model\.safetensors"),
        ({}, "has no weight_map"),
        ([], "not an object"),
    ],
)
def test_a_wrong_index_is_refused(index: Any, message: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=message):
        resolve(checkpoint)


def test_a_directory_without_what_a_model_needs_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="has no weights"):
        resolve(tmp_path / "empty")
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        resolve(checkpoint)
    assert resolve(checkpoint, tokenizer="elsewhere").resolved
    (checkpoint / "tokenizer.model").touch()
    assert resolve(checkpoint).resolved
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve(checkpoint)


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "extra.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
     "generation_config.json", "chat_template.jinja", "model.safetensors.index.json", "model.gguf"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("put", "kind"),
    [(put_pipe, r"a named pipe \(FIFO\)"), (put_socket, "a socket"), (put_device, "a character device"),
     (Path.mkdir, "a directory")],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_by_its_name_at_once(
    name: str, put: Callable[[Path], None], kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "odd"
    shutil.copytree(checkpoint, directory)
    (directory / name).unlink(missing_ok=True)
    put(directory / name)
    message = f"{re.escape(str(directory / name))} is {kind}; a model's files must be regular files"
    with pytest.raises(ModelLoadError, match=message):
        resolve(directory)
    if name == "model.gguf":
        if put is not Path.mkdir:
            with pytest.raises(ModelLoadError, match=message):
                resolve(directory / name)
        with pytest.raises(ModelLoadError, match=message):
            read_header(directory / name)
    if "token" in name:
        with pytest.raises(ModelLoadError, match=message):
            resolve_tokenizer(str(directory))
    if name == "model.safetensors":
        with pytest.raises(ModelLoadError, match=message):
            SafetensorsWeights([directory / name])


def test_a_header_longer_than_any_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="truncated, corrupt or no safetensors file"):
        SafetensorsWeights([path])
    for counts in ((2**60, 0), (0, 2**60)):
        path = tmp_path / "model.gguf"
        path.write_bytes(
            b"GGUF" + (3).to_bytes(4, "little") + b"".join(n.to_bytes(8, "little") for n in counts)
        )
        with pytest.raises(ModelLoadError, match=f"{2**60} .* cannot fit into its 24 bytes"):
            read_header(path)


def test_a_gguf_file_is_found_by_path_and_by_directory(prepared: Path, tmp_path: Path) -> None:
    directory = tmp_path / "ggufs"
    directory.mkdir()
    path = directory / "Model.Q4_1.GGUF"
    path.write_bytes(b"GGUF")
    assert resolve(path).weights == (str(path),)
    path = path.rename(directory / "model.gguf")
    assert resolve(directory) == ModelConfig(str(directory), directory=str(prepared), weights=(str(path),))
    (directory / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"pass the path of one: model\.gguf, other\.gguf"):
        resolve(directory)


def test_load_format_chooses_between_the_kinds_of_weights(checkpoint: Path, prepared: Path) -> None:
    (checkpoint / "model.gguf").write_bytes(b"GGUF")
    assert resolve(checkpoint).weights[0].endswith(".safetensors")
    assert resolve(checkpoint, load_format="gguf").weights[0].endswith(".gguf")
    with pytest.raises(ModelLoadError, match="load_format is 'safetensors'"):
        resolve(checkpoint / "model.gguf", load_format="safetensors")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no weights \(\*\.safetensors\)"):
        resolve(checkpoint, load_format="safetensors")


def test_a_model_in_a_directory_named_like_an_alias_wins_over_the_alias(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random-tiny").mkdir()
    assert resolve("random-tiny").directory == str(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "random-tiny", dirs_exist_ok=True)
    assert resolve("random-tiny").directory == str(tmp_path / "random-tiny")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("Random-Tiny", "did you mean random-tiny"),
        ("gpt-17", r"no alias \(smollm2-135m, all-minilm-l6-v2, random-tiny, random-tiny-moe\)"),
        ("./nowhere", "it is no directory"),
        ("/nowhere/at/all", "it is no directory"),
        ("nowhere.gguf", r"there is no file nowhere\.gguf"),
        ("x" * 5000, "File name too long"),
        ("~nobody-of-that-name/model", "no model"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_was_tried(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        resolve(name)


def test_the_aliases_are_listed() -> None:
    assert list(list_aliases()) == ["smollm2-135m", "all-minilm-l6-v2", "random-tiny", "random-tiny-moe"]


@pytest.mark.parametrize(
    ("name", "is_moe"),
    [
        ("MixtralForCausalLM", True),
        ("Qwen2MoeForCausalLM", True),
        ("Qwen3MoeForSequenceClassification", True),
        ("Qwen3ForCausalLM", False),
        ("BertModel", False),
    ],
)
def test_a_mixture_of_experts_is_told_by_its_architecture_and_overrides(
    name: str, is_moe: bool, checkpoint: Path
) -> None:
    assert resolve(checkpoint, hf_overrides={"architectures": [name]}).is_moe is is_moe
    (checkpoint / "config.json").write_text(json.dumps({"architectures": [name]}))
    assert resolve(checkpoint).is_moe is is_moe
    assert not resolve(checkpoint, hf_overrides={"architectures": ["LlamaForCausalLM"]}).is_moe


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(tmp_path / "a"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("NBENGINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "b" / "nbengine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "nbengine"


class Hub:
    """A hub with one repository: `cached` is its copy in the hub's cache, `remote` what it delivers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, remote: Path) -> None:
        self.remote = remote
        self.cached: Path | None = None
        self.failure: Exception | None = None
        self.patterns: list[str] = []
        self.revision: str | None = None
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)

    def snapshot_download(
        self, repository: str, revision: str | None, local_files_only: bool = False, allow_patterns: Any = ()
    ) -> str:
        self.revision = revision
        if local_files_only:
            if self.cached is None:
                raise LocalEntryNotFoundError("not cached")
            return str(self.cached)
        self.patterns = list(allow_patterns)
        return str(self.remote)

    def model_info(self, repository: str, revision: str | None, files_metadata: bool, timeout: float) -> Any:
        if self.failure is not None:
            raise self.failure
        names = [*os.listdir(self.remote), "README.md", "onnx/model.onnx", "pytorch_model.bin"]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=1) for name in names])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Hub:
    return Hub(monkeypatch, checkpoint)


def test_a_hub_id_downloads_what_the_model_needs_and_no_more(hub: Hub) -> None:
    config = resolve("someone/model", revision="v2")
    assert config.directory == str(hub.remote)
    assert hub.revision == "v2"
    assert set(hub.patterns) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_complete_copy_in_the_hub_cache_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    hub.failure = ConnectionError("unreachable")
    hub.cached = hub.remote
    assert resolve("someone/model").directory == str(hub.remote)
    hub.cached = tmp_path / "partial"
    shutil.copytree(hub.remote, hub.cached)
    (hub.cached / "model.safetensors").unlink()
    with pytest.raises(
        ModelNotFoundError, match="local hub cache: incomplete; hub: ConnectionError: unreachable"
    ):
        resolve("someone/model")


def test_an_offline_environment_does_not_ask_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.failure = AssertionError("asked")
    with pytest.raises(ModelNotFoundError, match="local hub cache: not there; hub: HF_HUB_OFFLINE is set"):
        resolve("someone/model")


NAMES = [
    "config.json",
    "tokenizer.json",
    "model-1.safetensors",
    "consolidated.safetensors",
    "sub/x.safetensors",
]


def test_of_a_repositorys_files_one_kind_of_weights_is_chosen() -> None:
    assert model_files("r", NAMES, "auto") == ["config.json", "tokenizer.json", "model-1.safetensors"]
    assert model_files("r", [*NAMES, "m.gguf"], "gguf")[-1] == "m.gguf"
    vocabulary = ["tokenizer.model", "additional_chat_templates/rag.jinja", "merges.txt"]
    assert model_files("r", [*NAMES, *vocabulary], "auto")[:-1] == [
        "config.json",
        "tokenizer.json",
        *vocabulary,
    ]
    with pytest.raises(ModelLoadError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        model_files("r", ["b.gguf", "a.gguf"], "auto")
    with pytest.raises(ModelLoadError, match=r"has no \*\.safetensors or \*\.gguf files"):
        model_files("r", ["pytorch_model.bin"], "auto")
