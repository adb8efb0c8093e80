"""Ranks read all of a checkpoint together, and each its own part only."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import _type_traits
from safetensors.torch import save_file
from torch import Tensor

from nbengine.config import ParallelConfig
from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.layout import layouts
from nbengine.errors import ModelLoadError
from nbengine.ipc.control_messages import Progress
from nbengine.kernels.cpu.quantized import CpuProducts
from nbengine.kernels.quantized import FORMATS, dense
from nbengine.models.checkpoints import gguf_loader, safetensors_loader
from nbengine.models.checkpoints.gguf_loader import GGUFWeights
from nbengine.models.checkpoints.loader import load_decoder, reload_weights
from nbengine.models.checkpoints.safetensors_loader import SafetensorsWeights
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import ALL_DENSE, PackedFormats, WeightSlot
from nbengine.runtime.progress import Reporter
from nbengine.worker.memory.offload import WeightsOffload
from tests.support.thorough import amount, combinations

CPU = torch.device("cpu")
WORLDS = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 3)]
CONFIG = DecoderConfig(
    vocab_size=95,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=True,
    attention_out_bias=True,
)
"""A quarter of the input features of either row-parallel projection is half a block of 256, or less."""
WITH_MLP_BIAS = dataclasses.replace(CONFIG, mlp_bias=True)


def states(tp_size: int, pp_size: int) -> list[ParallelState]:
    parallel = ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)
    return [ParallelState(layout) for layout in layouts(parallel)]


def read(
    path: Path,
    state: ParallelState,
    config: DecoderConfig = CONFIG,
    report: Reporter | None = None,
    packed: PackedFormats = ALL_DENSE,
) -> DecoderForCausalLM:
    return load_decoder(
        config,
        (path,),
        dtype=torch.float32,
        device=CPU,
        max_positions=8,
        report=report or Reporter(None, "load"),
        parallel=state,
        packed=packed,
    )


def part(slot: WeightSlot) -> tuple[slice, ...]:
    index = [slice(None)] * len(slot.full_shape)
    if slot.dim is not None:
        index[slot.dim] = slice(slot.start, slot.start + slot.size)
    return tuple(index)


def assert_parts_make(checkpoint: dict[str, Tensor], models: list[DecoderForCausalLM]) -> None:
    """Check that every rank's part is the checkpoint's, bit for bit, and that nothing of it is on no rank."""
    held = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in checkpoint.items()}
    for model in models:
        for name, slot in model.weight_slots().items():
            values = checkpoint[name]
            assert slot.full_shape == tuple(values.shape)
            found = slot.tensor if slot.form is None else dense(slot.form, slot.tensor, slot.rows)
            torch.testing.assert_close(found, values[part(slot)].float(), rtol=0, atol=0, msg=name)
            held[name][part(slot)] = True
    assert [name for name, places in held.items() if not places.all()] == []


def random_checkpoint(
    dtype: torch.dtype = torch.float32, config: DecoderConfig = CONFIG
) -> dict[str, Tensor]:
    whole = DecoderForCausalLM(config, dtype=dtype, device=torch.device("meta"))
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(slot.full_shape, generator=generator).to(dtype)
        for name, slot in whole.weight_slots().items()
    }


@pytest.mark.parametrize(
    ("sizes", "dtype"), combinations(WORLDS, [torch.float32, torch.bfloat16], together=1)
)
def test_parts_of_safetensors_make_the_checkpoint(
    sizes: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = random_checkpoint(dtype)
    save_file(checkpoint, tmp_path / "model.safetensors")
    models = [read(tmp_path / "model.safetensors", state) for state in states(*sizes)]
    assert_parts_make(checkpoint, models)


def raw_blocks(shape: tuple[int, ...], kind: Kind, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw bytes up to 0x7B, so that each float16 among them is finite."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    return random.integers(0, 0x7C, (*shape[:-1], shape[-1] // block_size * block_bytes), dtype=np.uint8)


def unpermuted(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Put rows in Hugging Face's order: within a head llama.cpp's 0, 1, 2, 3 ... are its 0, half, 1, half + 1
    ..."""
    head_rows = len(values) // num_heads
    out = np.empty_like(values)
    for row, content in enumerate(values):
        head, place = divmod(row, head_rows)
        out[head * head_rows + place // 2 + place % 2 * (head_rows // 2)] = content
    return out


def random_blocks(kind: Kind, config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...], Kind, Any]]:
    """Each weight's name and shape, and random blocks of one type in its matrices."""
    whole = DecoderForCausalLM(config, dtype=torch.float32, device=torch.device("meta"))
    random = np.random.default_rng(kind)
    for name, slot in whole.weight_slots().items():
        shape = tuple(slot.full_shape)
        own_kind = kind if len(shape) == 2 else Kind.F32
        yield name, shape, own_kind, raw_blocks(shape, own_kind, random)


def write_blocks(path: Path, arch: str, kind: Kind, config: DecoderConfig = CONFIG) -> None:
    """Write a GGUF file with `random_blocks`."""
    writer = gguf.GGUFWriter(str(path), arch)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_layers)
    for name, _, own_kind, blocks in random_blocks(kind, config):
        base, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", blocks, raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@lru_cache(maxsize=4)
def values_of_blocks(arch: str, kind: Kind, config: DecoderConfig = CONFIG) -> dict[str, Tensor]:
    """The values of what `write_blocks` writes, by the reference; nobody changes them."""
    checkpoint = {}
    for name, shape, own_kind, blocks in random_blocks(kind, config):
        reference = gguf.dequantize(blocks.reshape(-1, blocks.shape[-1]), own_kind).reshape(shape)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads is not None:
            reference = unpermuted(reference, heads)
        checkpoint[name] = torch.from_numpy(reference.copy())
    return checkpoint


@pytest.mark.parametrize("kind", [Kind.F32, *_type_traits], ids=lambda kind: kind.name)
def test_parts_of_every_gguf_type_make_the_checkpoint(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # One layer a stage; stages have whole matrices, whatever their type.
    num_stages = amount(1, thorough=2)
    config = dataclasses.replace(CONFIG, num_layers=num_stages)
    write_blocks(path, "llama", kind, config)
    checkpoint = values_of_blocks("llama", kind, config)
    assert_parts_make(checkpoint, [read(path, state, config) for state in states(4, num_stages)])


@pytest.mark.parametrize(("sizes", "arch"), combinations(WORLDS, ["llama", "qwen2"], together=1))
def test_parts_of_gguf_files_make_the_checkpoint(sizes: tuple[int, int], arch: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, arch, Kind.Q4_0)
    checkpoint = values_of_blocks(arch, Kind.Q4_0)
    assert_parts_make(checkpoint, [read(path, state) for state in states(*sizes)])


@pytest.mark.parametrize(("arch", "name"), combinations(["llama", "qwen2"], FORMATS, together=1))
def test_parts_of_matrices_that_stay_quantised_make_the_checkpoint(
    arch: str, name: str, tmp_path: Path
) -> None:
    # A layer a stage.
    path, config = tmp_path / "model.gguf", dataclasses.replace(CONFIG, num_layers=2)
    write_blocks(path, arch, Kind[name.upper()], config)
    checkpoint = values_of_blocks(arch, Kind[name.upper()], config)
    packed = PackedFormats(GGUFWeights(path, config).formats, CpuProducts())
    for sizes in amount([(4, 2)], thorough=[(1, 1), (4, 2)]):
        models = [read(path, state, config, packed=packed) for state in states(*sizes)]
        assert_parts_make(checkpoint, models)
        for model in models:
            for of, slot in model.weight_slots().items():
                # Of a row-parallel matrix, a quarter of the columns may be no whole number of cells.
                whole = len(slot.full_shape) == 2 and (slot.dim == 0 or slot.full_shape[1] // 4 % 256 == 0)
                if whole or (len(slot.full_shape) == 2 and not FORMATS[name].is_super):
                    assert slot.form is FORMATS[name], of


@pytest.mark.parametrize(
    ("piece_bytes", "has_packer", "kind", "is_packed", "sizes"),
    combinations([1, 3000, 20_000], [True, False], [Kind.Q5_1, Kind.Q4_K], [True, False], [(1, 1), (2, 1)]),
)
def test_weights_are_the_same_in_pieces_of_any_size(
    piece_bytes: int,
    has_packer: bool,
    kind: Kind,
    is_packed: bool,
    sizes: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Heads of 24 rows begin and end within tiles, and the vocabulary's last tile is not full.
    config = dataclasses.replace(CONFIG, head_dim=24, num_heads=32, num_kv_heads=4, num_layers=1)
    path = tmp_path / "model.gguf"
    write_blocks(path, "llama", kind, config)
    checkpoint = values_of_blocks("llama", kind, config)
    formats = PackedFormats(GGUFWeights(path, config).formats, CpuProducts())
    monkeypatch.setattr(gguf_loader, "_PIECE_BYTES", piece_bytes)
    if not has_packer:
        monkeypatch.setattr(gguf_loader, "select_block_packer", lambda device: None)
    packed = formats if is_packed else ALL_DENSE
    assert_parts_make(checkpoint, [read(path, state, config, packed=packed) for state in states(*sizes)])


def test_a_file_is_read_from_front_to_back_and_no_more_than_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, "llama", Kind.Q4_0)
    monkeypatch.setattr(gguf_loader, "_PIECE_BYTES", 4608)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for packed in (ALL_DENSE, PackedFormats(GGUFWeights(path, CONFIG).formats, CpuProducts())):
            reads: list[range] = []
            slots = read(path, states(1, 1)[0], packed=packed).weight_slots()
            weights = GGUFWeights(watched_path(path, reads), CONFIG)
            with torch.inference_mode():
                weights.load(dict(reversed(slots.items())), lambda num_bytes: None)
            starts = [span.start for span in reads]
            assert starts == sorted(starts)
            # A head of 64 rows is the most that cannot be cut.
            assert max(map(len, reads)) == 64 * 256 // 32 * 18
    finally:
        torch.set_num_threads(before)


def test_a_matrix_that_has_become_another_type_is_not_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, "llama", Kind.Q4_0)
    packed = PackedFormats(GGUFWeights(path, CONFIG).formats, CpuProducts())
    model = read(path, states(1, 1)[0], packed=packed)
    write_blocks(path, "llama", Kind.Q8_0)
    with pytest.raises(ModelLoadError, match=r"tensor .*has the type Q8_0, q4_0 was loaded"):
        reload_weights(model, (path,), Reporter(None, "load"))


@pytest.mark.parametrize("way", ["packed", "packed without a kernel", "as numbers"])
@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "q4_k", "q6_k"])
def test_a_scale_that_is_not_finite_is_named(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "packed without a kernel":
        monkeypatch.setattr(gguf_loader, "select_block_packer", lambda device: None)
    path = tmp_path / "model.gguf"
    kind = Kind[name.upper()]
    write_blocks(path, "llama", kind)
    weights = GGUFWeights(path, CONFIG)
    _, block_bytes = GGML_QUANT_SIZES[kind]
    content = bytearray(path.read_bytes())
    # Q6_K has its scale at the end of a block, the others at its beginning.
    place = weights._parts["model.layers.1.mlp.up_proj.weight"].tensor.offset + 3 * block_bytes
    place += block_bytes - 2 if name == "q6_k" else 0
    content[place : place + 2] = b"\x00\x7e"
    path.write_bytes(content)
    packed = ALL_DENSE if way == "as numbers" else PackedFormats(weights.formats, CpuProducts())
    with pytest.raises(
        ModelLoadError, match=r"model.layers.1.mlp.up_proj.weight has a scale that is not finite"
    ):
        read(path, states(1, 1)[0], packed=packed)


class WatchedFile(io.FileIO):
    """Notes where it is read."""

    def __init__(self, path: Path, reads: list[range]) -> None:
        super().__init__(path)
        self._reads = reads

    def readinto(self, buffer: Any) -> int:
        start = self.tell()
        count = super().readinto(buffer) or 0
        self._reads.append(range(start, start + count))
        return count


def watched_path(path: Path, reads: list[range]) -> Path:
    """The path, whose unbuffered files note their reads; headers are read with a buffer."""

    class WatchedPath(type(path)):  # type: ignore[misc]
        def open(self, mode: str = "r", buffering: int = -1, **rest: Any) -> Any:
            return WatchedFile(path, reads) if buffering == 0 else super().open(mode, buffering, **rest)

    return WatchedPath(path)


def needed_bytes(weights: GGUFWeights, name: str, slot: WeightSlot) -> tuple[int, np.ndarray[Any, Any]]:
    """Find value by value where a tensor begins in its file, and for each of its bytes whether its block holds values
    of the slot."""
    tensor = weights._parts[name].tensor
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    values = np.zeros(tensor.shape, bool)
    values[part(slot)] = True
    return tensor.offset, np.repeat(values.reshape(-1, block_size).any(1), block_bytes)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_of_a_gguf_file_a_rank_reads_the_blocks_of_its_part_once_and_nothing_else(
    kind: Kind, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, "llama", kind)
    for state in states(4, 2):
        reads: list[range] = []
        model = read(watched_path(path, reads), state)
        slots = model.weight_slots()
        weights = GGUFWeights(path, CONFIG)
        expected, found = np.zeros((2, path.stat().st_size), int)
        for name, slot in slots.items():
            start, needed = needed_bytes(weights, name, slot)
            expected[start : start + len(needed)] += needed
        for span in reads:
            found[span.start : span.stop] += 1
        assert np.array_equal(found, expected)
        assert weights.num_bytes(slots) == sum(map(len, reads))


class WatchedSafetensors:
    """`safe_open` that notes the slices taken, and gives no whole tensors."""

    def __init__(self, taken: dict[str, list[int]]) -> None:
        self._taken = taken

    def __call__(self, path: str, framework: str) -> Any:
        return _WatchedHandle(original_safe_open(path, framework=framework), self._taken)


original_safe_open = safetensors_loader.safe_open


class _WatchedHandle:
    def __init__(self, file: Any, taken: dict[str, list[int]]) -> None:
        self._file, self._taken = file, taken

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> Any:
        taken, inner = self._taken, self._file.get_slice(name)

        class Slice:
            get_shape, get_dtype = inner.get_shape, inner.get_dtype

            def __getitem__(self, index: Any) -> Tensor:
                values: Tensor = inner[index]
                taken.setdefault(name, []).append(values.nbytes)
                return values

        return Slice()


def test_of_safetensors_a_rank_takes_its_slices_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = random_checkpoint(torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_file(checkpoint, path)
    for state in states(4, 2):
        taken: dict[str, list[int]] = {}
        monkeypatch.setattr(safetensors_loader, "safe_open", WatchedSafetensors(taken))
        slots = read(path, state).weight_slots()
        assert taken == {name: [2 * slot.tensor.numel()] for name, slot in slots.items()}
        assert SafetensorsWeights((path,)).num_bytes(slots) == sum(map(sum, taken.values()))


def test_weights_freed_by_sleep_are_read_again_whatever_is_outside_the_ranks_part(tmp_path: Path) -> None:
    checkpoint, path = random_checkpoint(), tmp_path / "model.safetensors"
    for state in states(2, 2):
        save_file(checkpoint, path)
        model = read(path, state)
        slots = model.weight_slots()
        spoiled = {name: torch.full_like(values, torch.nan) for name, values in checkpoint.items()}
        for name, slot in slots.items():
            spoiled[name][part(slot)] = checkpoint[name][part(slot)]
        save_file(spoiled, path)
        offload = WeightsOffload(model.parameters())
        offload.drop()
        assert not offload.restore()
        reload_weights(model, (path,), Reporter(None, "load"))
        for name, slot in slots.items():
            assert torch.equal(slot.tensor, checkpoint[name][part(slot)])


WRITERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": lambda path: save_file(random_checkpoint(), path),
    "model.gguf": lambda path: write_blocks(path, "llama", Kind.Q8_0),
}


@pytest.mark.parametrize("name", WRITERS)
def test_progress_is_of_the_ranks_own_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbengine.models.checkpoints.loader._REPORT_INTERVAL_SECONDS", 0.0)
    path = tmp_path / name
    WRITERS[name](path)
    for state in states(2, 2):
        messages: list[Progress] = []
        read(path, state, report=Reporter(messages.append, "load"))
        seen = [message.fraction or 0.0 for message in messages]
        assert seen == sorted(seen)
        assert seen[0] == 0.0
        assert seen[-2:] == [1.0, 1.0]
        assert len(seen) > len(set(seen)) > 10


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.bias", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_all_ranks_refuse_a_checkpoint_that_lacks_what_one_of_them_needs(name: str, tmp_path: Path) -> None:
    checkpoint, path = random_checkpoint(config=WITH_MLP_BIAS), tmp_path / "model.safetensors"
    save_file({key: values for key, values in checkpoint.items() if key != name}, path)
    for state in states(2, 2):
        with pytest.raises(ModelLoadError, match=f"lacks {name}"):
            read(path, state, WITH_MLP_BIAS)
