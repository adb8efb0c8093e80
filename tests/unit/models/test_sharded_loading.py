"""What ranks read of a checkpoint: together all of it, each its own part only."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
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
from nbengine.models import safetensors_loader
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.gguf_loader import GGUFWeights
from nbengine.models.layers import WeightSlot
from nbengine.models.loader import load_decoder, reload_weights
from nbengine.models.progress import Reporter
from nbengine.models.safetensors_loader import SafetensorsWeights
from nbengine.worker.offload import WeightsOffload

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
    path: Path, state: ParallelState, config: DecoderConfig = CONFIG, report: Reporter | None = None
) -> DecoderForCausalLM:
    return load_decoder(
        config,
        (path,),
        dtype=torch.float32,
        device=CPU,
        max_positions=8,
        report=report or Reporter(None, "load"),
        parallel=state,
    )


def part(slot: WeightSlot) -> tuple[slice, ...]:
    index = [slice(None)] * len(slot.full_shape)
    if slot.dim is not None:
        index[slot.dim] = slice(slot.start, slot.start + slot.tensor.shape[slot.dim])
    return tuple(index)


def assert_parts_make(checkpoint: dict[str, Tensor], models: list[DecoderForCausalLM]) -> None:
    """Every rank's part is the checkpoint's, bit for bit, and nothing of the checkpoint is on no rank."""
    held = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in checkpoint.items()}
    for model in models:
        for name, slot in model.weight_slots().items():
            values = checkpoint[name]
            assert slot.full_shape == tuple(values.shape)
            torch.testing.assert_close(slot.tensor, values[part(slot)].float(), rtol=0, atol=0, msg=name)
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


@pytest.mark.parametrize(("tp_size", "pp_size"), WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_safetensors_make_the_checkpoint(
    tp_size: int, pp_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = random_checkpoint(dtype)
    save_file(checkpoint, tmp_path / "model.safetensors")
    models = [read(tmp_path / "model.safetensors", state) for state in states(tp_size, pp_size)]
    assert_parts_make(checkpoint, models)


def raw_blocks(shape: tuple[int, ...], kind: Kind, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Bytes up to 0x7B, so that whatever is a float16 is finite."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    return random.integers(0, 0x7C, (*shape[:-1], shape[-1] // block_size * block_bytes), dtype=np.uint8)


def unpermuted(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Within a head llama.cpp's rows 0, 1, 2, 3 ... are Hugging Face's 0, half, 1, half + 1 ..."""
    head_rows = len(values) // num_heads
    out = np.empty_like(values)
    for row, content in enumerate(values):
        head, place = divmod(row, head_rows)
        out[head * head_rows + place // 2 + place % 2 * (head_rows // 2)] = content
    return out


def write_blocks(path: Path, arch: str, kind: Kind) -> dict[str, Tensor]:
    """A GGUF file with random blocks of one type in its matrices; gives their values by the reference."""
    random = np.random.default_rng(kind)
    writer = gguf.GGUFWriter(str(path), arch)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], CONFIG.num_layers)
    checkpoint = {}
    for name, values in random_checkpoint().items():
        base, suffix = name.rsplit(".", 1)
        own_kind = kind if values.ndim == 2 else Kind.F32
        blocks = raw_blocks(tuple(values.shape), own_kind, random)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", blocks, raw_dtype=own_kind)
        reference = gguf.dequantize(blocks.reshape(-1, blocks.shape[-1]), own_kind).reshape(values.shape)
        heads = {"q_proj": CONFIG.num_heads, "k_proj": CONFIG.num_kv_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads is not None:
            reference = unpermuted(reference, heads)
        checkpoint[name] = torch.from_numpy(reference.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return checkpoint


@pytest.mark.parametrize("kind", [Kind.F32, *_type_traits], ids=lambda kind: kind.name)
def test_parts_of_every_gguf_type_make_the_checkpoint(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    checkpoint = write_blocks(path, "llama", kind)
    assert_parts_make(checkpoint, [read(path, state) for state in states(4, 2)])


@pytest.mark.parametrize(("tp_size", "pp_size"), WORLDS)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_parts_of_gguf_files_make_the_checkpoint(
    tp_size: int, pp_size: int, arch: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    checkpoint = write_blocks(path, arch, Kind.Q4_0)
    assert_parts_make(checkpoint, [read(path, state) for state in states(tp_size, pp_size)])


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


def ranges_of(weights: GGUFWeights, name: str, slot: WeightSlot) -> list[range]:
    """The bytes of the blocks that hold the slot's values, found value by value."""
    tensor = weights._tensors[name]
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    blocks = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)[part(slot)] // block_size
    return [
        range(tensor.offset + block * block_bytes, tensor.offset + (block + 1) * block_bytes)
        for block in np.unique(blocks).tolist()
    ]


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
        expected = [span for name, slot in slots.items() for span in ranges_of(weights, name, slot)]
        assert sorted(at for span in reads for at in span) == sorted(at for span in expected for at in span)
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
    monkeypatch.setattr("nbengine.models.loader._REPORT_INTERVAL_SECONDS", 0.0)
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
