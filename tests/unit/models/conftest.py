"""Helpers for model tests: attention kernels that are obviously right, and a way to run the decoder with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers
from torch import Tensor

from nbengine.config import ModelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.latent import LatentOptions
from nbengine.models.checkpoints import gguf_prepare
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.gguf_tokenizer import write_prepared
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.loading import load_model
from nbengine.models.sharding import DecoderShard
from tests.support.shared_kernels import kernels_are_compiled_once
from tests.tools.compared_models import COLUMNS, PROPERTY

__all__ = ["kernels_are_compiled_once"]

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_SIZE = 4


@dataclass
class DenseKernels:
    """Cache write and attention in plain indexing and float32 softmax, one request at a time."""

    name = "dense"

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        blocks, offsets = slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
        kv_cache[0, blocks, :, offsets] = key
        kv_cache[1, blocks, :, offsets] = value

    def paged_attention(
        self, query: Tensor, kv_cache: Tensor, metadata: Batch, options: AttentionOptions
    ) -> Tensor:
        out = torch.empty_like(query)
        group = query.shape[1] // kv_cache.shape[2]
        for index, length in enumerate(metadata.seq_lens):
            rows = slice(metadata.query_start_loc[index], metadata.query_start_loc[index + 1])
            keys, values = (
                cache[metadata.block_table[index]].transpose(1, 2).flatten(0, 1)[:length]
                for cache in kv_cache
            )
            keys, values = (
                part.to(query.dtype).repeat_interleave(group, dim=1).transpose(0, 1)
                for part in (keys, values)
            )
            scores = query[rows].transpose(0, 1) @ keys.transpose(1, 2) * options.scale
            if options.soft_cap is not None:
                scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
            num_new = rows.stop - rows.start
            unseen = torch.ones(num_new, length, dtype=torch.bool).triu(length - num_new + 1)
            at = torch.arange(length - num_new, length)[:, None]
            unseen |= torch.arange(length) < options.first_seen(at)
            scores = scores.masked_fill(unseen, -torch.inf)
            if options.sinks is not None:
                sinks = options.sinks.to(scores.dtype)[:, None, None].expand(-1, num_new, 1)
                scores = torch.cat((scores, sinks), dim=2)
            weights = scores.softmax(-1, dtype=torch.float32)[..., :length]
            out[rows] = (weights.to(values.dtype) @ values).transpose(0, 1)
        return out

    def write_latent(self, rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        cache[0, slot_mapping // BLOCK_SIZE, 0, slot_mapping % BLOCK_SIZE] = rows

    def latent_attention(
        self, query: Tensor, cache: Tensor, metadata: Batch, options: LatentOptions
    ) -> Tensor:
        both = torch.cat((cache, cache))
        plain = AttentionOptions(options.scale)
        return self.paged_attention(query, both, metadata, plain)[..., : options.rank]


@dataclass
class Batch:
    """The facts about a flattened batch that the kernels above need."""

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: list[list[int]]
    slot_mapping: Tensor
    kernels: DenseKernels = field(default_factory=DenseKernels)


class Runner:
    """Runs a rank's part of a decoder on requests of which some tokens are in the cache already."""

    def __init__(
        self, model: DecoderForCausalLM, num_blocks: int = 256, parallel: ParallelState = SINGLE
    ) -> None:
        self.model = model
        self.parallel = parallel
        self.kv_caches: list[Tensor] = []
        for layer in model.shard.layers:
            source, own = model.config.layer(layer).source, model.config.of_layer(layer)
            heads = DecoderShard.of(own, parallel.layout).num_kv_heads
            shape = (own.cache_parts, num_blocks, heads, BLOCK_SIZE, own.head_dim)
            made = torch.full(shape, torch.nan, dtype=model.hidden_dtype)
            self.kv_caches.append(made if source is None else self.kv_caches[source])
        self._free = list(range(num_blocks))[::-1]
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, chunks: dict[str, list[int]]) -> dict[str, Tensor]:
        """Append the tokens of every request; gives the logits [chunk, vocab_size] of all new tokens.

        Only the last stage of a pipeline can; the others run `hidden`.
        """
        with torch.inference_mode():
            return {name: self.model.compute_logits(rows) for name, rows in self.hidden(chunks).items()}

    def hidden(self, chunks: dict[str, list[int]]) -> dict[str, Tensor]:
        """Like `step`, but gives the hidden states [chunk, hidden_size] that `forward` returns."""
        starts, positions, slots = [0], [], []
        for name, tokens in chunks.items():
            table = self._tables.setdefault(name, [])
            before = self._lengths.get(name, 0)
            self._lengths[name] = before + len(tokens)
            while len(table) * BLOCK_SIZE < before + len(tokens):
                table.append(self._free.pop())
            starts.append(starts[-1] + len(tokens))
            new = range(before, before + len(tokens))
            positions += list(new)
            slots += [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in new]
        batch = Batch(
            starts,
            [self._lengths[name] for name in chunks],
            [self._tables[name] for name in chunks],
            torch.tensor(slots),
        )
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        received = None
        if self.parallel.previous is not None:
            shape = (len(ids), self.model.config.hidden_size)
            received = self.parallel.previous.receive(shape, self.model.dtype)
        arguments = (ids, torch.tensor(positions), self.kv_caches, batch, received)
        with torch.inference_mode():
            hidden = self.model.forward(*arguments)  # type: ignore[arg-type]
            if self.parallel.next is not None:
                self.parallel.next.send(hidden)
        return {name: hidden[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and lose much when other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_IN_A_PROCESS = gguf_prepare._convert


@pytest.fixture(scope="module", autouse=True)
def tokenizers_converted_here() -> Iterator[None]:
    """Convert the tokenizers of GGUF files in this process, where transformers is imported already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_prepare, "_convert", write_prepared)
        yield


@pytest.fixture
def tokenizers_converted_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert them as users do: a process of its own imports transformers."""
    monkeypatch.setattr(gguf_prepare, "_convert", _IN_A_PROCESS)


@pytest.fixture
def compared(record_property: Callable[[str, object], None]) -> Compared:
    """Say that models have given what transformers gives, in circumstances that are keys of `COLUMNS`; `make models`
    counts it for docs/models.md."""

    def note(model: PreTrainedModel | str, *circumstances: str) -> None:
        assert set(circumstances) <= set(COLUMNS)
        name = model if isinstance(model, str) else type(model).__name__
        for circumstance in circumstances:
            record_property(PROPERTY, f"{name}/{circumstance}")

    return note


LoadModel = Callable[..., DecoderForCausalLM]
Compared = Callable[..., None]


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def random_model() -> Callable[..., PreTrainedModel]:
    """Make a model of transformers in which every parameter, norms and biases included, matters."""
    import transformers

    def make(kind: str, head: str = "ForCausalLM", **settings: Any) -> PreTrainedModel:
        model_class = getattr(transformers, f"{kind}{head}")
        config = model_class.config_class(**{**SIZES, **settings})
        model = model_class._from_config(config, attn_implementation="eager")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
                parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * scale)
            for name, buffer in model.named_buffers():
                if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                    noise = 0.3 * torch.randn(buffer.shape, generator=generator)
                    buffer.copy_(1 + noise if "scalar" in name else noise)
        return model.float().eval()

    return make


@dataclass
class GGUFVariant:
    """A way to write a model to a GGUF file; `permute` undoes what HF's converter did to Meta's q and k
    rows."""

    arch: str
    weight_type: GGMLQuantizationType = GGMLQuantizationType.F32
    permute: bool = False
    vocabulary: int = 96
    first_token: str = "<|endoftext|>"
    extra_tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    dense: str = "no matrix"
    """Matrices whose names contain this are float32, whatever the type is."""
    lengths: tuple[int, int] | None = None
    """The sizes of keys and values, where they are not those of a head."""
    splits_latents: bool = False
    """The projection from latents is one tensor for keys, transposed, and one for values."""


@pytest.fixture(scope="session")
def write_gguf() -> Callable[[Path, PreTrainedModel, GGUFVariant], Path]:
    """Write a model of transformers as llama.cpp's converter would; gives the path."""
    return _write_gguf


def _write_gguf(path: Path, model: PreTrainedModel, variant: GGUFVariant) -> Path:
    config, arch = model.config, variant.arch
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_length, value_length = variant.lengths or (head_dim, head_dim)
    writer.add_key_length(key_length)
    writer.add_value_length(value_length)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    _write_vocabulary(writer, variant.vocabulary, variant.first_token)
    for key, value in variant.metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](key, value)
    archs = {name: member for member, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], config.num_hidden_layers)
    split = (config.num_attention_heads, config.qk_nope_head_dim) if variant.splits_latents else None
    for name, weight in _one_a_projection(model.state_dict(), split):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = weight.numpy()
        if variant.permute and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2)
            data = data.reshape(weight.shape)
        base, suffix = name.rsplit(".", 1)
        is_dense = data.ndim == 1 or suffix == "bias" or variant.dense in name
        kind = GGMLQuantizationType.F32 if is_dense else variant.weight_type
        if data.dtype == np.uint8:  # Blocks as they are.
            kind = GGMLQuantizationType.MXFP4
        else:
            data = gguf.quantize(data, kind)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", data, raw_dtype=kind)
    for name, data in variant.extra_tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _one_a_projection(
    weights: dict[str, torch.Tensor], latents: tuple[int, int] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with the experts' gates apart from their other projections, and perhaps keys apart from values:
    `latents` are the heads, and the rows of a key."""
    for name, weight in weights.items():
        if latents is not None and name.endswith("kv_b_proj.weight"):
            heads, keys = latents
            by_head = weight.view(heads, -1, weight.shape[1])
            yield name.replace("kv_b", "k_b"), by_head[:, :keys].transpose(1, 2).contiguous()
            yield name.replace("kv_b", "v_b"), by_head[:, keys:].contiguous()
            continue
        if name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), weight
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, rows in zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True):
                yield f"{name.replace('gate_up_proj', part)}.weight", rows.contiguous()
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith("shared_expert_gate.weight"):
            yield name, weight[0]
        else:
            yield name, weight


def _write_vocabulary(writer: gguf.GGUFWriter, size: int, first_token: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [first_token, "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list((special + alphabet + ["he"])[:size])
    writer.add_token_types([3, 3, 3] + [1] * (size - 3))
    writer.add_token_merges(["h e"] if size == 260 else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.fixture(scope="session")
def gguf_variant() -> type[GGUFVariant]:
    """The class `GGUFVariant`."""
    return GGUFVariant


@pytest.fixture(scope="session")
def load() -> LoadModel:
    """Load a model by name with our loader, on the CPU; quantised weights stay so unless float32 is `asked` for."""

    def load(
        name: str | Path,
        dtype: torch.dtype = torch.float32,
        parallel: ParallelState = SINGLE,
        asked: str = "auto",
        **settings: Any,
    ) -> DecoderForCausalLM:
        config = resolve_model(ModelConfig(model=str(name), tokenizer="none", dtype=asked, **settings))
        return load_model(config, torch.device("cpu"), dtype, parallel=parallel)

    return load


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def make_runner() -> type[Runner]:
    """The class `Runner`."""
    return Runner


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model cache of the test's own."""
    path = tmp_path / "cache"
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(path))
    return path
