"""AWQ and GPTQ checkpoints with random levels, and their values by the definitions of the formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of a word AutoAWQ's packer puts eight neighbours: it takes them as 0 2 4 6 1 3 5 7."""


@dataclass(frozen=True)
class Variant:
    """A way to quantise: as config.json describes it, and what stands in the tensors."""

    method: str
    bits: int = 4
    group: int = 32
    v2: bool = False
    act_order: bool = False
    has_g_idx: bool = True
    scales: torch.dtype = torch.float16

    @property
    def entry(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**common, "zero_point": True, "version": "gemm"}
        form = {"checkpoint_format": "gptq_v2"} if self.v2 else {}
        return {**common, "desc_act": self.act_order, "sym": False, **form}


VARIANTS = {
    "awq 32": Variant("awq"),
    "awq 64": Variant("awq", group=64),
    "awq 128": Variant("awq", group=128),
    "awq rows": Variant("awq", group=-1),
    "gptq 4": Variant("gptq", group=64),
    "gptq 4 v2": Variant("gptq", group=32, v2=True),
    "gptq 8": Variant("gptq", bits=8, group=128),
    "gptq 8 rows": Variant("gptq", bits=8, group=-1, act_order=True),
    "gptq without g_idx": Variant("gptq", group=64, has_g_idx=False),
}
"""Variants that stay quantised."""
DENSE_VARIANTS = {
    "act-order": Variant("gptq", act_order=True),
    "act-order 8": Variant("gptq", bits=8, group=64, act_order=True),
    "groups of 16": Variant("gptq", group=16),
    "awq in groups of 8": Variant("awq", group=8),
    "bfloat16 scales": Variant("awq", scales=torch.bfloat16),
}
"""Variants that no packed format holds."""


def random_matrix(
    variant: Variant, rows: int, columns: int, seed: int
) -> tuple[dict[str, Tensor], NDArray[np.float64]]:
    """The tensors of a matrix, by their endings, and its values [rows, columns]."""
    chance = np.random.default_rng(seed)
    per_word, most = 32 // variant.bits, 2**variant.bits
    group = columns if variant.group == -1 else variant.group
    num_groups = -(-columns // group)
    levels = chance.integers(0, most, (rows, columns))
    # GPTQ's first format cannot store the zero point 0: it stores one less.
    zeros = chance.integers(most // 4, most - most // 4, (num_groups, rows))
    spread = columns**-0.5 / most * 3
    scales = torch.from_numpy(chance.uniform(0.2, 1.0, (num_groups, rows)) * spread).to(variant.scales)
    groups = np.arange(columns) // group
    if variant.act_order:
        groups = chance.permutation(groups)
    values = scales.double().numpy()[groups].T * (levels - zeros[groups].T)

    def words_of(fields: NDArray[np.int64]) -> Tensor:
        """Packs fields [m, n] along n."""
        places = AWQ_PLACES if variant.method == "awq" else range(per_word)
        padded = np.zeros((len(fields), -(-fields.shape[1] // per_word) * per_word), np.int64)
        padded[:, : fields.shape[1]] = fields
        words = np.zeros((len(fields), padded.shape[1] // per_word), np.int64)
        for number, place in enumerate(places):
            words |= padded[:, number::per_word] << (place * variant.bits)
        return torch.from_numpy(words.astype(np.uint32).view(np.int32))

    if variant.method == "awq":
        tensors = {"qweight": words_of(levels.T), "qzeros": words_of(zeros)}
    else:
        stored = zeros if variant.v2 else zeros - 1
        tensors = {"qweight": words_of(levels).t().contiguous(), "qzeros": words_of(stored)}
        if variant.has_g_idx:
            tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return {**tensors, "scales": scales}, values


def is_quantized(name: str) -> bool:
    """Tells whether such checkpoints quantise a matrix: embedding, output projection and routers stay."""
    parts = name.split(".")
    return "layers" in parts and name.endswith("_proj.weight")


def write_checkpoint(directory: Path, model: Any, variant: Variant, shards: int = 1) -> dict[str, Tensor]:
    """Writes a model of transformers with random quantised matrices, which it is given, too; gives the values
    of all its weights."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for seed, (name, parameter) in enumerate(sorted(model.state_dict().items())):
        if is_quantized(name):
            parts, exact = random_matrix(variant, *parameter.shape, seed=seed)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            values[name] = torch.from_numpy(exact).float()
            parameter.copy_(values[name])
        else:
            values[name] = tensors[name] = parameter.clone()
    directory.mkdir(exist_ok=True)
    names = sorted(tensors)
    for shard in range(shards):
        # A matrix's tensors lie in different files.
        held = {name: tensors[name] for name in names[shard::shards]}
        save_file(held, directory / ("model.safetensors" if shards == 1 else f"model-{shard}.safetensors"))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config["quantization_config"] = variant.entry
    (directory / "config.json").write_text(json.dumps(config))
    return values
