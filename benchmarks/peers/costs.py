"""The least that a model's work costs a machine: bytes to be read and operations to be done, against its
rates.

Keys and values count with 16 bits. Nothing else counts: no activations, no softmax, no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KV_BYTES = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's work in a second, with the threads used."""

    read: float
    """Bytes."""
    matrix: float
    """Operations, two for a product and its sum: of the fastest dtype."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The sizes of a model that its costs follow from."""

    layer_bytes: int
    """Bytes of the matrices that every token is multiplied with."""
    layer_values: int
    """Numbers in them."""
    output_bytes: int
    output_values: int
    """The output layer, which only tokens that are sampled from need; tied, these are the embeddings."""
    file_bytes: int
    kv_values: int
    """Numbers of keys and values of a token, in all layers."""
    query_values: int
    """Numbers of queries of a token, in all layers."""
    vocabulary: int

    def step_bytes(self, context: int, streams: int = 1) -> int:
        """Return the bytes that a decoding step reads: all weights once, each stream's keys and values."""
        return self.layer_bytes + self.output_bytes + streams * context * self.kv_values * KV_BYTES

    def operations(self, tokens: int, context: int, sampled: int) -> int:
        """Return the operations for `tokens` new tokens, each of which looks at `context` tokens (on
        average)."""
        products = tokens * self.layer_values + sampled * self.output_values
        return 2 * products + 4 * tokens * context * self.query_values

    def prefill_seconds(self, prompt: int, streams: int, rates: Rates) -> float:
        """Return the least time for prompts of `prompt` tokens; a token looks at half of them on average."""
        computing = self.operations(streams * prompt, prompt // 2, streams) / rates.matrix
        return max(computing, self.step_bytes(0) / rates.read)

    def decode_seconds(self, prompt: int, new_tokens: int, streams: int, rates: Rates) -> float:
        """Return the least time for all tokens after the first."""
        seconds = 0.0
        for done in range(1, new_tokens):
            computing = self.operations(streams, prompt + done, streams) / rates.matrix
            reading = self.step_bytes(prompt + done, streams) / rates.read
            seconds += max(computing, reading)
        return seconds


def read_costs(path: Path) -> ModelCosts:
    """Read the sizes from a GGUF file's header."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    output = tensors.get("output.weight", tensors["token_embd.weight"])
    layers = [t for name, t in tensors.items() if name.startswith("blk.") and len(t.shape) > 1]

    def number(key: str) -> int:
        architecture = reader.fields["general.architecture"].contents()
        return int(reader.fields[f"{architecture}.{key}"].contents())

    heads = number("attention.head_count")
    kv_heads = number("attention.head_count_kv")
    head = number("embedding_length") // heads
    if f"{reader.fields['general.architecture'].contents()}.attention.key_length" in reader.fields:
        head = number("attention.key_length")
    return ModelCosts(
        layer_bytes=sum(int(tensor.n_bytes) for tensor in layers),
        layer_values=sum(int(tensor.n_elements) for tensor in layers),
        output_bytes=int(output.n_bytes),
        output_values=int(output.n_elements),
        file_bytes=path.stat().st_size,
        kv_values=2 * number("block_count") * kv_heads * head,
        query_values=number("block_count") * heads * head,
        vocabulary=int(output.shape[1]),
    )
