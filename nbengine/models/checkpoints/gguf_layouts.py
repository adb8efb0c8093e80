"""The places of the model's weights in a GGUF file, where llama.cpp's converter has them in another order than
Hugging Face; free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gguf.constants import GGML_QUANT_SIZES

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFTensor
from nbengine.models.configs.decoder_config import DecoderConfig, DeltaRuleConfig

Run = tuple[int, int]
"""The first of some neighbouring rows, and their number."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The places of rows in a file: our rows from i * unit on, `unit` of them, begin with the file's row `firsts[i]`.

    With `interleaved` the file has the first and the second half of such rows by turns, as its RoPE pairs neighbours.
    """

    unit: int
    firsts: tuple[int, ...]
    interleaved: bool = False

    def runs(self, rows: range) -> tuple[Run, ...]:
        """Return the file's rows for our `rows`, in our order; of interleaved ones for whole units."""
        found: list[Run] = []
        row = rows.start
        while row < rows.stop:
            index, inside = divmod(row, self.unit)
            first, count = self.firsts[index] + inside, min(self.unit - inside, rows.stop - row)
            if found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], found[-1][1] + count)
            else:
                found.append((first, count))
            row += count
        return tuple(found)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A weight of the model in a file: the rows of `tensor`, in the order `rows` where that is not the file's.

    Columns lie in `column_runs` runs of equal length, and a rank's share has its part of each of them. `is_decay`:
    the file has minus the exponentials of the numbers.
    """

    tensor: GGUFTensor
    shape: tuple[int, ...]
    rows: RowOrder | None = None
    column_runs: int = 1
    is_decay: bool = False

    @property
    def head_rows(self) -> int | None:
        """Return the rows of a head where they are interleaved; None: they are not."""
        return self.rows.unit if self.rows is not None and self.rows.interleaved else None


def placed(
    ours: str, tensor: GGUFTensor, config: DecoderConfig, order: RowOrder | None, *, permuted: bool
) -> StoredPart:
    """Return the place of the weight `ours`, to which all rows of `tensor` belong; `order` is theirs where the file
    mixes them with others'. With `permuted` the rows of queries and keys are interleaved by heads.

    Raises:
        ModelLoadError: a vector that is in another order is quantised.
    """
    block, name, kind = ("", "", *ours.split("."))[-3:]
    block, name = (name, kind) if kind in ("A_log", "dt_bias", "D") else (block, name)
    shape, column_runs = tensor.shape, 1
    if order is not None:
        shape = (order.unit * len(order.firsts), *shape[1:])
    elif permuted and name in ("q_proj", "k_proj"):
        heads = config.num_heads if name == "q_proj" else config.num_kv_heads
        unit = shape[0] // heads
        order = RowOrder(unit, tuple(range(0, unit * heads, unit)), interleaved=True)
    elif block == "linear_attn" and config.delta_rule is not None and config.delta_rule.tiled:
        order = _tiled(name, config.delta_rule)
        column_runs = config.delta_rule.group if name == "out_proj" else 1
    if order is not None and len(shape) == 1:
        tensor = _as_column(tensor)
    return StoredPart(tensor, shape, order, column_runs, is_decay=name == "A_log")


def _tiled(name: str, rule: DeltaRuleConfig) -> RowOrder | None:
    """Return the order of the rows that belong to value heads. A file has the first value heads of all key heads, then
    their second ones, and so on."""
    sizes = {"in_proj_v": rule.value_dim, "in_proj_z": rule.value_dim, "conv1d_v": rule.value_dim}
    sizes |= dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), 1)
    unit = sizes.get(name)
    if unit is None:
        return None
    heads = range(rule.value_heads)
    firsts = [unit * (head % rule.group * rule.key_heads + head // rule.group) for head in heads]
    return RowOrder(unit, tuple(firsts))


def _as_column(tensor: GGUFTensor) -> GGUFTensor:
    """Return a vector as a matrix of one column."""
    if GGML_QUANT_SIZES[tensor.type][0] != 1:
        raise ModelLoadError(
            f"tensor {tensor.name} is of the type {tensor.type.name}; vectors are read as F32, F16 and BF16"
        )
    return replace(tensor, shape=(*tensor.shape, 1))


def as_in_checkpoints(name: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield a tensor with the shape that it has under Hugging Face's `name`, or the matrices or biases of all experts in it.

    In a file the gate of the shared expert is a vector, not a matrix of one row; convolutions lack the dimension of
    length 1, and the vectors of a state space have one or are matrices.
    """
    before, experts, projection = name.partition(".experts.")
    if experts and len(tensor.shape) == (2 if projection.endswith(".bias") else 3):
        size = tensor.num_bytes // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            offset = tensor.offset + expert * size
            matrix = replace(tensor, shape=tensor.shape[1:], offset=offset, num_bytes=size)
            for part, rows in _halves(projection, matrix):
                yield f"{before}.experts.{expert}.{part}", rows
        return
    block, last, _ = ("", "", *name.split("."))[-3:]
    shape = tensor.shape
    if last == "shared_expert_gate" and len(shape) == 1:
        shape = (1, *shape)
    elif last in ("conv1d", "conv") and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    elif (block in ("mamba", "mixer") and last == "norm") or name.endswith((".A_log", ".D")):
        shape = (tensor.num_elements,)
    yield name, replace(tensor, shape=shape)


def _halves(projection: str, matrix: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield an expert's matrix, or the gate and the other projection that it has."""
    if projection != "gate_up_proj.weight":
        yield projection, matrix
        return
    rows = matrix.shape[0] // 2
    for first, part in ((0, "gate_proj.weight"), (rows, "up_proj.weight")):
        yield part, rows_of(matrix, first, (rows, *matrix.shape[1:]))


def rows_of(tensor: GGUFTensor, first_row: int, shape: tuple[int, ...]) -> GGUFTensor:
    """Return the rows from `first_row` on that a part of this shape has; rows consist of whole blocks."""
    if shape == tensor.shape:
        return tensor
    row_bytes = tensor.num_bytes // tensor.shape[0]
    offset = tensor.offset + first_row * row_bytes
    return replace(tensor, shape=shape, offset=offset, num_bytes=shape[0] * row_bytes)
