"""Packed weights on disk: later loads have the same bits from there, and no damage to the files does harm."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.layout import layouts
from nbengine.errors import ModelLoadError, NBEngineError
from nbengine.kernels.cpu.quantized import CpuProducts
from nbengine.kernels.quantized import FORMATS
from nbengine.models.checkpoints import gguf_loader, kept_weights, loader, packed_file, packed_store
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config
from nbengine.models.checkpoints.gguf_loader import GGUFWeights
from nbengine.models.checkpoints.kept_weights import KeptWeights
from nbengine.models.checkpoints.loader import load_decoder, reload_weights
from nbengine.models.checkpoints.packed_store import PackedStore
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers import regions as regions_module
from nbengine.models.layers.regions import Region
from nbengine.models.layers.weights import PackedFormats
from nbengine.models.loading import load_model
from nbengine.models.redivision import Redivision
from nbengine.models.registry import decoder_config
from nbengine.runtime.progress import Reporter
from nbengine.worker.memory.offload import WeightsOffload
from nbengine.worker.worker import Worker
from tests.unit.models.quantized_checkpoints import VARIANTS, write_checkpoint
from tests.unit.models.test_sharded_loading import CONFIG, write_blocks

CPU = torch.device("cpu")
EXPERTS = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "vocab_size": 260,
}
GIB = 1 << 30


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory in which the store keeps its files."""
    return tmp_path / "weights"


@pytest.fixture
def store(directory: Path) -> PackedStore:
    return PackedStore(directory, GIB)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of weights that were read from a model's files, one entry a reading."""
    found: list[int] = []
    real = loader._fill

    def fill(slots: Any, weights: Any, report: Reporter) -> None:
        found.append(len(slots))
        real(slots, weights, report)

    monkeypatch.setattr(loader, "_fill", fill)
    return found


@pytest.fixture(scope="module")
def gguf_file(
    tmp_path_factory: pytest.TempPathFactory, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> Path:
    """A file with blocks of type Q4_1."""
    path = tmp_path_factory.mktemp("kept") / "model.gguf"
    found: Path = write_gguf(path, random_model("Qwen2"), gguf_variant("qwen2", Kind.Q4_1))
    return found


def load(
    path: Path,
    store: PackedStore | None,
    parallel: ParallelState = SINGLE,
    config: DecoderConfig | None = None,
    report: Reporter | None = None,
) -> DecoderForCausalLM:
    """Load a GGUF file, and wait until its weights are kept."""
    config = config or decoder_config(hf_config(read_header(path)))
    model = load_decoder(
        config,
        (path,),
        dtype=torch.bfloat16,
        device=CPU,
        max_positions=None,
        report=report or Reporter(None, "load"),
        parallel=parallel,
        packed=PackedFormats(GGUFWeights(path, config).formats, CpuProducts()),
        store=store,
    )
    return waited(model)


def waited(model: DecoderForCausalLM) -> DecoderForCausalLM:
    if model.kept is not None:
        model.kept.wait()
    return model


def bits(model: DecoderForCausalLM) -> dict[str, Tensor]:
    return {name: slot.tensor.clone() for name, slot in model.weight_slots().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def is_mapped(model: DecoderForCausalLM) -> bool:
    return model.kept is not None and model.kept.is_mapped


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def mapped_paths() -> set[str]:
    return {found.path for found in psutil.Process().memory_maps(grouped=False)}


@pytest.mark.parametrize("name", FORMATS)
def test_a_second_load_maps_the_bits_of_every_block_type(
    name: str, store: PackedStore, directory: Path, readings: list[int], tmp_path: Path
) -> None:
    path, config = tmp_path / "model.gguf", replace(CONFIG, num_layers=1)
    write_blocks(path, "llama", Kind[name.upper()], config)
    plain = bits(load(path, None, config=config))
    first = load(path, store, config=config)
    assert len(readings) == 2
    second = load(path, store, config=config)
    assert len(readings) == 2
    # The first one lets go of its own memory, so that the two share one.
    assert is_mapped(first)
    assert is_mapped(second)
    assert str(only_file(directory)) in mapped_paths()
    assert same(bits(first), plain)
    assert same(bits(second), plain)


def test_a_start_says_that_weights_are_packed_or_read_and_how_far_it_is(
    store: PackedStore, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_REPORT_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(gguf_loader, "_PIECE_BYTES", 1)
    monkeypatch.setattr(regions_module, "_READ", mmap.PAGESIZE)

    def said() -> dict[str, list[float | None]]:
        found: dict[str, list[float | None]] = {}
        report = Reporter(
            lambda message: found.setdefault(message.detail, []).append(message.fraction), "load"
        )
        load(gguf_file, store, report=report)
        return found

    size_of_all = (
        r"packing the weights, \d+(\.\d+)? [KM]iB",
        r"reading the packed weights, \d+(\.\d+)? [KM]iB",
    )
    for words in size_of_all:
        first, doing, last = (found := said())
        assert (first, last) == ("reading the weights' headers", "loaded the weights")
        assert re.fullmatch(words, doing)
        fractions = [fraction or 0.0 for fraction in found[doing]]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        assert len({fraction for fraction in fractions if 0 < fraction < 1}) > 3


@pytest.mark.parametrize("source", ["int4", "int8", "awq 64", "gptq 8"])
def test_a_second_load_maps_the_bits_of_safetensors(
    source: str, store: PackedStore, readings: list[int], tmp_path: Path, random_model: Any
) -> None:
    model = random_model("Qwen2", hidden_size=128)
    if source in VARIANTS:
        write_checkpoint(tmp_path / "model", model, VARIANTS[source])
    else:
        model.save_pretrained(tmp_path / "model")
    asked = {} if source in VARIANTS else {"quantization": source}

    def load_one(store: PackedStore | None, **asked: Any) -> DecoderForCausalLM:
        name = str(tmp_path / "model")
        config = resolve_model(ModelConfig(model=name, tokenizer="none", device="cpu", **asked))
        return waited(load_model(config, CPU, torch.bfloat16, store=store))

    plain = bits(load_one(None, **asked))
    first = load_one(store, **asked)
    second = load_one(store, **asked)
    assert len(readings) == 2
    assert is_mapped(second)
    assert same(bits(first), plain)
    assert same(bits(second), plain)
    if asked:
        other = {"int4": "int8", "int8": "int4"}[source]
        assert not same(bits(load_one(store, quantization=other)), plain)


def of(tp: int, pp: int) -> list[ParallelState]:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    return [ParallelState(layout) for layout in layouts(parallel)]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 3)])
def test_each_rank_has_its_own_part_again(
    tp: int, pp: int, store: PackedStore, directory: Path, readings: list[int], gguf_file: Path
) -> None:
    plain = [bits(load(gguf_file, None, state)) for state in of(tp, pp)]
    for state in of(tp, pp):
        load(gguf_file, store, state)
    readings.clear()
    for state, held in zip(of(tp, pp), plain, strict=True):
        model = load(gguf_file, store, state)
        assert is_mapped(model)
        assert same(bits(model), held)
    assert readings == []
    assert len(list(directory.iterdir())) == tp * pp


def test_engine_cores_with_the_same_weights_share_a_file(
    store: PackedStore, directory: Path, readings: list[int], gguf_file: Path
) -> None:
    layout = of(1, 1)[0].layout
    for core in range(3):
        load(gguf_file, store, ParallelState(replace(layout, dp_rank=core, dp_size=3)))
    assert len(readings) == 1
    only_file(directory)


@pytest.fixture(scope="module")
def expert_file(
    tmp_path_factory: pytest.TempPathFactory, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> Path:
    """A mixture of experts with blocks of type Q5_1."""
    metadata = {
        "qwen3moe.expert_count": EXPERTS["num_experts"],
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": EXPERTS["moe_intermediate_size"],
    }
    variant = gguf_variant("qwen3moe", Kind.Q5_1, metadata=metadata, vocabulary=260)
    path = tmp_path_factory.mktemp("experts") / "model.gguf"
    found: Path = write_gguf(path, random_model("Qwen3Moe", **EXPERTS), variant)
    return found


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_are_mapped_too_and_can_be_given_up(
    expert_parallel: bool, store: PackedStore, readings: list[int], expert_file: Path
) -> None:
    def state(core: int, cores: int) -> ParallelState:
        layout = of(1, 1)[0].layout
        return ParallelState(replace(layout, dp_rank=core, dp_size=cores, expert_parallel=expert_parallel))

    plain = [bits(load(expert_file, None, state(core, 2))) for core in range(2)]
    for core in range(2):
        load(expert_file, store, state(core, 2))
    readings.clear()
    models = [load(expert_file, store, state(core, 2)) for core in range(2)]
    assert readings == []
    assert all(same(bits(model), held) for model, held in zip(models, plain, strict=True))

    # Of four engine cores the first keeps a part of its experts, in memory of its own.
    block = models[0].moe_blocks[0]
    before = dict(block.experts.slots(""))
    region = next(iter(before.values())).tensor.untyped_storage()
    assert regions_module.is_region(region)
    block.redivide(state(0, 4))
    after = dict(block.experts.slots(""))
    assert not any(regions_module.is_region(slot.tensor.untyped_storage()) for slot in after.values())
    assert same(bits(models[1]), plain[1])


def change_content(path: Path) -> None:
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_time(path: Path) -> None:
    os.utime(path, (1e9, 1e9))


def replace_file(path: Path) -> None:
    status = path.stat()
    other = path.with_suffix(".new")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [change_content, change_time, replace_file])
def test_a_file_that_has_changed_is_read_again(
    change: Callable[[Path], None], store: PackedStore, readings: list[int], gguf_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(gguf_file, path)
    load(path, store)
    change(path)
    model = load(path, store)
    assert len(readings) == 2
    assert same(bits(model), bits(load(path, None)))


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    store: PackedStore, directory: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(gguf_file, path)
    real = loader._fill

    def fill(slots: Any, weights: Any, report: Reporter) -> None:
        real(slots, weights, report)
        change_content(path)

    monkeypatch.setattr(loader, "_fill", fill)
    load(path, store)
    assert not directory.exists()


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_off_in_the_header(path: Path) -> None:
    os.truncate(path, 40)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def flip(offset: int) -> Callable[[Path], None]:
    """Flip a bit at an offset, which counts from the end if it is negative."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 4
        path.write_bytes(content)

    return change


def zero_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(packed_file.HUGE_PAGE + 4096)
        file.write(bytes(4096))


def swapped_pages(path: Path) -> None:
    content = path.read_bytes()
    first = packed_file.HUGE_PAGE
    pages = content[first : first + 4096], content[first + 4096 : first + 8192]
    path.write_bytes(content[:first] + pages[1] + pages[0] + content[first + 8192 :])


def writable_for_others(path: Path) -> None:
    path.chmod(0o662)


def unreadable(path: Path) -> None:
    path.chmod(0)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)  # nothing is unreadable for root


def a_link(path: Path) -> None:
    moved = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(moved)


def of_another_version(path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[8:16], "little")
    text = content[48 : 48 + length].replace(b'"source"', b'"origin"')
    digest = packed_file.hashlib.sha256(text).digest()
    path.write_bytes(content[:16] + digest + text + content[48 + length :])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut off": cut_off,
    "cut off in the header": cut_off_in_the_header,
    "empty": empty,
    "longer": longer,
    "bit of the magic": flip(0),
    "bit of the length": flip(14),
    "bit of the header's digest": flip(20),
    "bit of the key": flip(60),
    "bit of the first page": flip(packed_file.HUGE_PAGE + 3),
    "bit of the last page": flip(-4096),
    "page of zeros": zero_page,
    "swapped pages": swapped_pages,
    "others can write it": writable_for_others,
    "unreadable": unreadable,
    "a link": a_link,
    "another version": of_another_version,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_packed_again_and_mended(
    damage: str,
    store: PackedStore,
    directory: Path,
    readings: list[int],
    gguf_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = bits(load(gguf_file, store))
    path = only_file(directory)
    DAMAGES[damage](path)
    readings.clear()
    model = load(gguf_file, store)
    assert len(readings) == 1
    assert same(bits(model), plain)
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert str(path) in lines[0].getMessage()
    assert only_file(directory) == path
    readings.clear()
    assert same(bits(load(gguf_file, store)), plain)
    assert readings == []


def test_another_models_file_is_not_taken(
    store: PackedStore, directory: Path, readings: list[int], gguf_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "model.gguf"
    shutil.copy(gguf_file, other)
    change_content(other)
    plain = bits(load(gguf_file, store))
    path = only_file(directory)
    load(other, store)
    (foreign,) = set(directory.iterdir()) - {path}
    foreign.replace(path)
    readings.clear()
    assert same(bits(load(gguf_file, store)), plain)
    assert len(readings) == 1


def test_a_disk_that_cannot_be_read_is_no_reason_not_to_start(
    store: PackedStore, readings: list[int], gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = bits(load(gguf_file, store))

    def take_pages(region: Region, on_bytes: Callable[[int], None]) -> None:
        raise OSError(errno.EFAULT, "Bad address")

    monkeypatch.setattr(Region, "take_pages", take_pages)
    model = load(gguf_file, store)
    assert len(readings) == 2
    assert same(bits(model), plain)
    assert not is_mapped(model)


def test_directory_and_files_are_this_users_alone(
    store: PackedStore, directory: Path, gguf_file: Path
) -> None:
    load(gguf_file, store)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert only_file(directory).stat().st_mode & 0o777 == 0o600


def test_a_directory_that_others_can_reach_is_not_used(
    store: PackedStore,
    directory: Path,
    readings: list[int],
    gguf_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(gguf_file, store)
    directory.chmod(0o755)
    before = set(directory.iterdir())
    model = load(gguf_file, store)
    assert len(readings) == 2
    assert not is_mapped(model)
    assert set(directory.iterdir()) == before
    assert "is not this user's alone" in caplog.text


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_model_is_loaded_all_the_same_where_nothing_can_be_written(
    call: str,
    store: PackedStore,
    directory: Path,
    gguf_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    plain = bits(load(gguf_file, None))
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(packed_store.os, call, full)
        model = load(gguf_file, store)
    assert same(bits(model), plain)
    assert not is_mapped(model)
    assert caplog.text.count("packed weights are not kept") == 1
    assert "No space left" in caplog.text
    assert list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named_once(
    tmp_path: Path, gguf_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.INFO):
        model = load(gguf_file, PackedStore(tmp_path / "file" / "weights", GIB))
    assert not is_mapped(model)
    assert caplog.text.count("packed weights are not kept") == 1


def test_two_writers_at_once_leave_one_good_file(
    store: PackedStore, directory: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have looked for the file before either has begun to write it.
    both = threading.Barrier(2)
    real = PackedStore.write
    monkeypatch.setattr(PackedStore, "write", lambda *args: (both.wait(), real(*args))[1])
    models: list[DecoderForCausalLM] = []
    threads = [threading.Thread(target=lambda: models.append(load(gguf_file, store))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = bits(load(gguf_file, None))
    assert all(is_mapped(model) and same(bits(model), plain) for model in models)
    # The second one has not replaced the file that the first one has mapped.
    assert f"{only_file(directory)} (deleted)" not in Path("/proc/self/maps").read_text()


def test_what_a_killed_writer_has_left_is_removed(
    store: PackedStore, directory: Path, gguf_file: Path
) -> None:
    directory.mkdir(mode=0o700)
    (directory / ".model-0.weights.0123.tmp").write_bytes(bytes(100))
    load(gguf_file, store)
    assert only_file(directory).suffix == ".weights"


def test_only_the_files_used_last_are_kept(
    directory: Path, readings: list[int], gguf_file: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / f"model{number}.gguf" for number in range(3)]
    for path in paths:
        shutil.copy(gguf_file, path)
    size = 0
    for number, path in enumerate(paths[:2]):
        load(path, PackedStore(directory, GIB))
        (file,) = directory.glob(f"model{number}-*")
        size = 512 * file.stat().st_blocks
        os.utime(file, (1000 + number, 1000 + number))
    small = PackedStore(directory, 2 * size + (1 << 20))
    load(paths[0], small)  # the oldest of them is used again
    readings.clear()
    load(paths[2], small)
    assert {path.name.split("-")[0] for path in directory.iterdir()} == {"model0", "model2"}
    load(paths[0], small)
    assert len(readings) == 1


def test_weights_larger_than_the_limit_are_not_kept_and_drop_no_others(
    store: PackedStore, directory: Path, gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(gguf_file, store)
    other = tmp_path / "model.gguf"
    shutil.copy(gguf_file, other)
    before = list(directory.iterdir())
    with caplog.at_level(logging.INFO):
        load(other, PackedStore(directory, 4096))
    assert "NBENGINE_PACKED_WEIGHTS_GIB" in caplog.text
    assert list(directory.iterdir()) == before


def test_a_full_disk_is_not_filled_further(
    store: PackedStore, directory: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(directory.parent)
    monkeypatch.setattr(packed_store.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    model = load(gguf_file, store)
    assert list(directory.iterdir()) == []
    assert not is_mapped(model)


def test_nothing_is_mapped_from_the_disks_of_other_machines(
    store: PackedStore, directory: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    line = f"36 35 {os.major(number)}:{os.minor(number)} / /home rw,noatime shared:1 - nfs4 server:/home rw\n"
    mounts.write_text(line)
    monkeypatch.setattr(packed_store, "_MOUNTS", mounts)
    assert not is_mapped(load(gguf_file, store))
    assert list(directory.iterdir()) == []
    mounts.write_text(line.replace("nfs4", "ext4"))
    assert is_mapped(load(gguf_file, store))


@pytest.mark.parametrize(("text", "is_kept"), [("", True), ("0", False), ("0.5", True)])
def test_the_environment_limits_what_is_kept(
    text: str, is_kept: bool, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBENGINE_PACKED_WEIGHTS_GIB", text)
    assert (packed_store.packed_store() is not None) == is_kept


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_no_size_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBENGINE_PACKED_WEIGHTS_GIB", text)
    with pytest.raises(ModelLoadError, match=f"NBENGINE_PACKED_WEIGHTS_GIB .*0 or more.*{text}"):
        packed_store.packed_store()


def test_weights_that_were_dropped_come_back_from_the_mapped_file(
    store: PackedStore, readings: list[int], expert_file: Path
) -> None:
    for _ in range(2):
        model = load(expert_file, store)
        before = bits(model)
        offload = WeightsOffload(model.parameters())
        offload.drop()
        assert offload.num_missing_bytes >= model.weights_bytes
        assert not offload.restore()
        readings.clear()
        reload_weights(model, (expert_file,), Reporter(None, "load"))
        assert readings == [0]
        assert same(bits(model), before)


def test_weights_that_were_dropped_are_read_where_the_files_have_changed(
    store: PackedStore, directory: Path, readings: list[int], gguf_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(gguf_file, path)
    load(path, store)
    model = load(path, store)
    kept = only_file(directory).read_bytes()
    offload = WeightsOffload(model.parameters())
    offload.drop()
    change_content(path)
    offload.restore()
    reload_weights(model, (path,), Reporter(None, "load"))
    assert same(bits(model), bits(load(path, None)))
    # What is written to mapped weights stays in this process.
    (file,) = (each for each in directory.iterdir() if each.read_bytes() == kept)
    assert file.exists()


def test_weights_that_are_about_to_change_are_not_kept(
    store: PackedStore, directory: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = KeptWeights._keep

    def stopped(kept: KeptWeights) -> None:
        kept.stop()
        real(kept)

    monkeypatch.setattr(KeptWeights, "_keep", stopped)
    model = load(gguf_file, store)
    assert not is_mapped(model)
    assert list(directory.iterdir()) == []


def test_steps_go_before_the_writing_of_weights(
    store: PackedStore, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: list[int] = []
    real = PackedStore.write

    def write(*args: Any) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        real(*args)

    monkeypatch.setattr(PackedStore, "write", write)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert is_mapped(load(gguf_file, store))
    assert priorities == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_who_is_about_to_change_weights_waits_for_one_piece_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "_CHUNK", 8192)
    regions = [np.full(20_480, 3, np.uint8), np.full(4096, 5, np.uint8)]
    for pieces in range(4):
        left = iter(range(pieces))

        @contextlib.contextmanager
        def reading(left: Iterator[int] = left) -> Iterator[None]:
            if next(left, None) is None:
                raise NBEngineError("stop")
            yield

        with pytest.raises(NBEngineError, match="stop"):
            packed_file.description_of("key", "source", regions, reading)
    described = packed_file.description_of("key", "source", regions, contextlib.nullcontext)
    assert described.digest == packed_file._digest(regions, 2)


def test_a_worker_that_sleeps_while_its_weights_are_written_keeps_nothing_wrong(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, sleeping = threading.Event(), threading.Event()
    real = PackedStore.write

    def write(*args: Any) -> None:
        begun.set()
        sleeping.wait()
        real(*args)

    monkeypatch.setattr(PackedStore, "write", write)
    model = ModelConfig("random-tiny", device="cpu", quantization="int8")
    worker = Worker(EngineConfig(resolve_model(model)))
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(16)
    assert isinstance(worker.model, DecoderForCausalLM)
    before = bits(worker.model)
    begun.wait()
    worker.sleep(2)
    sleeping.set()
    waited(worker.model)
    assert not is_mapped(worker.model)
    assert list((private_cache / "weights").iterdir()) == []
    worker.wake_up("weights")
    assert same(bits(worker.model), before)


def test_a_worker_that_ends_while_its_weights_are_written_leaves_no_part_of_them(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ending = threading.Event(), threading.Event()
    real_contents, real_stop = packed_store.contents, KeptWeights.stop

    def contents(*args: Any) -> Iterator[Any]:
        for part in real_contents(*args):
            yield part
            begun.set()
            ending.wait()

    def stop(kept: KeptWeights) -> None:
        real_stop(kept)
        ending.set()

    monkeypatch.setattr(packed_store, "contents", contents)
    monkeypatch.setattr(KeptWeights, "stop", stop)
    model = ModelConfig("random-tiny", device="cpu", quantization="int8")
    worker = Worker(EngineConfig(resolve_model(model)))
    worker.init_device()
    worker.load_model()
    begun.wait()
    assert [path.suffix for path in (private_cache / "weights").iterdir()] == [".tmp"]
    worker.shutdown()
    assert list((private_cache / "weights").iterdir()) == []


class Overwriting:
    """A group whose first worker has weights that are all 0."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        assert source == 0
        tensor.zero_()


@pytest.mark.parametrize(("core", "is_written"), [(1, False), (2, True)])
def test_only_a_new_engine_cores_weights_are_written_when_it_joins(
    core: int, is_written: bool, store: PackedStore, gguf_file: Path
) -> None:
    model = load(gguf_file, store)
    before = bits(model)
    layout = replace(of(1, 1)[0].layout, dp_rank=core, dp_size=3)
    group: Any = Overwriting()
    Redivision(2, 3, group, ParallelState(layout)).run(model, lambda slots: None)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    assert same(bits(model), zeros if is_written else before)


def test_weights_in_small_pages_are_copied_to_huge_ones(
    store: PackedStore, readings: list[int], gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_weights, "_are_small", lambda regions: True)
    plain = bits(load(gguf_file, None))
    first = load(gguf_file, store)
    second = load(gguf_file, store)
    assert len(readings) == 2
    assert not is_mapped(first)
    assert not is_mapped(second)
    assert same(bits(second), plain)


def test_the_system_is_not_asked_about_pages_that_cannot_be_huge(
    store: PackedStore, readings: list[int], gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[Region]] = []
    monkeypatch.setattr(kept_weights, "huge_file_bytes", asked.append)
    load(gguf_file, store)
    assert is_mapped(load(gguf_file, store))
    assert len(readings) == 1
    assert not asked


def test_pages_of_a_file_are_exchanged_in_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096) + bytes(range(256)) * 32)
    region = Region(5000)
    address = region.address
    region.tensor.fill_(7)
    read: list[int] = []
    with path.open("rb") as file:
        region.map_file(file.fileno(), 4096)
    region.take_pages(read.append)
    assert sum(read) == region.num_bytes
    assert region.address == address
    assert region.tensor.tolist() == list(range(256)) * 32
    region.tensor[:] = 1
    regions_module.give_up_pages(region.tensor.untyped_storage())
    assert region.tensor.tolist() == list(range(256)) * 32
    region.clear()
    assert not region.tensor.any()
    with path.open("rb") as file:
        region.read_file(file.fileno(), 4096)
        with pytest.raises(OSError, match="cut off"):
            region.read_file(file.fileno(), 8192)
    assert path.read_bytes() == bytes(4096) + bytes(range(256)) * 32
