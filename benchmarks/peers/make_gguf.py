"""GGUF files of a model's shape with seeded random weights, for measuring time and rounding without a
download.

    python -m peers.make_gguf PATH [--shape 8b] [--types Q4_K_M] [--layers N] [--seed 0]

The blocks are made as bytes: no weight is ever held as a number, and an 8B file takes a minute and the memory
of one matrix. Time and memory do not depend on the values; an answer of such a model is noise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama, or of a Qwen 3 with norms of heads."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    """The embeddings are the output layer, too."""
    architecture: str = "llama"
    head_dim: int = 0
    """Numbers in a head; 0: the heads divide `hidden`."""

    @property
    def head(self) -> int:
        """Return the numbers in a head."""
        return self.head_dim or self.hidden // self.heads


SHAPES = {
    "tiny": Shape(4, 256, 512, 4, 2, 2048, True),
    "135m": Shape(30, 576, 1536, 9, 3, 49152, True),
    "0.6b": Shape(28, 1024, 3072, 16, 8, 151936, True, "qwen3", 128),
    "8b": Shape(32, 4096, 14336, 32, 8, 128256, False),
}
SMALL_BLOCKS = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}
"""The types that take the place of one whose blocks are longer than a matrix's rows, as in llama.cpp."""
MIXED = "Q4_K_M"
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
CHUNK_ROWS = 8192
SCALE_LEVELS = (40, 64)
"""The six-bit scales of a K block lie in this range, as those of weights without outliers do."""


def kind_of(name: str, types: str, shape: Shape, columns: int) -> Kind:
    """Return the block type of a matrix: the file's, or what llama.cpp's Q4_K_M gives it."""
    if types != MIXED:
        kind = Kind[types]
    elif name == "output.weight":
        kind = Kind.Q6_K
    elif name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer = int(name.split(".")[1])
        eighth = shape.layers // 8
        more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        kind = Kind.Q6_K if more else Kind.Q4_K
    elif shape.tied and name == "token_embd.weight":
        kind = Kind.Q6_K
    else:
        kind = Kind.Q4_K
    return kind if columns % gguf.GGML_QUANT_SIZES[kind][0] == 0 else SMALL_BLOCKS[kind]


def random_blocks(kind: Kind, count: int, deviation: float, rng: np.random.Generator) -> Bytes:
    """Make blocks [count, bytes of a block] whose values have mean 0 and about this standard deviation."""
    sample = _blocks(kind, 256, 1.0, np.random.default_rng(0))
    unit = float(gguf.dequantize(sample, kind).astype(np.float64).std())
    return _blocks(kind, count, deviation / unit, rng)


def _blocks(kind: Kind, count: int, scale: float, rng: np.random.Generator) -> Bytes:
    """Make blocks of random levels. Types without a minimum get scales of either sign, for a mean of 0."""
    blocks = np.frombuffer(rng.bytes(count * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    blocks = blocks.reshape(count, -1).copy()
    scales = rng.uniform(0.7, 1.3, (count, 1)) * scale
    if kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K):
        middle = 7.5 if kind in (Kind.Q4_1, Kind.Q4_K) else 15.5
        is_k = kind in (Kind.Q4_K, Kind.Q5_K)
        blocks[:, 0:2] = scales.astype(np.float16).view(np.uint8)
        # A K block subtracts its minimum, the others add theirs.
        blocks[:, 2:4] = (scales * (middle if is_k else -middle)).astype(np.float16).view(np.uint8)
        if is_k:
            blocks[:, 4:16] = _six_bit_scales(count, rng)
    else:
        signed = (scales * rng.choice((-1.0, 1.0), (count, 1))).astype(np.float16).view(np.uint8)
        place = slice(-2, None) if kind is Kind.Q6_K else slice(0, 2)
        blocks[:, place] = signed
    return blocks


def _six_bit_scales(count: int, rng: np.random.Generator) -> Bytes:
    """Pack 8 scales and 8 minima of 6 bits into 12 bytes, as K blocks have them."""
    scales, minima = rng.integers(*SCALE_LEVELS, (2, count, 8), np.uint8)
    packed = np.empty((count, 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:12] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return packed


def matrices(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Give name, rows and columns of every matrix."""
    yield "token_embd.weight", shape.vocabulary, shape.hidden
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_q.weight", shape.heads * shape.head, shape.hidden
        yield f"blk.{layer}.attn_k.weight", shape.kv_heads * shape.head, shape.hidden
        yield f"blk.{layer}.attn_v.weight", shape.kv_heads * shape.head, shape.hidden
        yield f"blk.{layer}.attn_output.weight", shape.hidden, shape.heads * shape.head
        yield f"blk.{layer}.ffn_gate.weight", shape.inner, shape.hidden
        yield f"blk.{layer}.ffn_up.weight", shape.inner, shape.hidden
        yield f"blk.{layer}.ffn_down.weight", shape.hidden, shape.inner
    if not shape.tied:
        yield "output.weight", shape.vocabulary, shape.hidden


def norms(shape: Shape) -> Iterator[tuple[str, int]]:
    """Give name and length of every vector."""
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_norm.weight", shape.hidden
        yield f"blk.{layer}.ffn_norm.weight", shape.hidden
        if shape.architecture == "qwen3":
            yield f"blk.{layer}.attn_q_norm.weight", shape.head
            yield f"blk.{layer}.attn_k_norm.weight", shape.head
    yield "output_norm.weight", shape.hidden


def write(path: Path, shape: Shape, types: str, seed: int = 0) -> Path:
    """Write a file; `types` is the name of a block type, or Q4_K_M."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), shape.architecture)
    _write_settings(writer, shape)
    _write_vocabulary(writer, shape.vocabulary)
    planned = [
        (name, rows, columns, kind_of(name, types, shape, columns)) for name, rows, columns in matrices(shape)
    ]
    for name, rows, columns, kind in planned:
        length, size = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = columns // length * size
        writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, kind)
    for name, length in norms(shape):
        writer.add_tensor_info(name, (length,), np.dtype(np.float32), length * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, rows, columns, kind in planned:
        length, size = gguf.GGML_QUANT_SIZES[kind]
        row_blocks = columns // length
        # One call for a matrix pads it; its rows come from one stream of random numbers whatever the chunks.
        data = np.empty((rows, row_blocks * size), np.uint8)
        for begin in range(0, rows, CHUNK_ROWS):
            part = data[begin : begin + CHUNK_ROWS]
            part[:] = random_blocks(kind, len(part) * row_blocks, columns**-0.5, rng).reshape(part.shape)
        writer.write_tensor_data(data)
    for _, length in norms(shape):
        writer.write_tensor_data(np.ones(length, np.float32))
    writer.close()
    return path


def _write_settings(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(shape.vocabulary)


def _write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Write bytes, and names that no text has for the rest."""
    special = ["<|endoftext|>", "<s>", "</s>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["he"]
    tokens += [f"<|unused{number}|>" for number in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (size - len(special)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def file_name(shape: str, types: str, layers: int | None, seed: int) -> str:
    """Return a name that says all that a file depends on."""
    cut = f"-{layers}layers" if layers is not None else ""
    return f"random-{shape}{cut}-{types.lower()}-seed{seed}.gguf"


def make(folder: Path, shape: str, types: str, layers: int | None = None, seed: int = 0) -> Path:
    """Make the file in a folder, unless it is there already; a file that is cut off never has its name."""
    path = folder / file_name(shape, types, layers, seed)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sizes = SHAPES[shape] if layers is None else replace(SHAPES[shape], layers=layers)
        partial = path.with_suffix(".partial")
        write(partial, sizes, types, seed)
        partial.rename(path)
    return path


def expected_bytes(shape: Shape, types: str) -> int:
    """Return the bytes of all matrices."""
    total = 0
    for name, rows, columns in matrices(shape):
        length, size = gguf.GGML_QUANT_SIZES[kind_of(name, types, shape, columns)]
        total += math.ceil(columns / length) * size * rows
    return total


def add_arguments(parser: Any) -> None:
    """Add the arguments that say which file is wanted."""
    parser.add_argument("--shape", choices=SHAPES, help="make a file of this shape, with random weights")
    parser.add_argument("--types", choices=(MIXED, *TYPES), default=MIXED, help="of its blocks")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for small disks")
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """Make one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    add_arguments(parser)
    arguments = parser.parse_args()
    print(
        make(arguments.folder, arguments.shape or "135m", arguments.types, arguments.layers, arguments.seed)
    )


if __name__ == "__main__":
    main()
