"""Batches that a decoder computes in prepared steps and in the eager path, whose bits are compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.kernels.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.kernels.cpu.quantized import CpuProducts
from nbengine.kernels.dispatch import select_kernels, select_recurrent_kernels
from nbengine.kernels.recurrent_metadata import Checkpoints, RecurrentMetadata, build_recurrent_metadata
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.kv_cache.specs import make_groups
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config
from nbengine.models.checkpoints.gguf_loader import GGUFWeights
from nbengine.models.checkpoints.loader import load_decoder
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.gated_delta_net import RecurrentState
from nbengine.models.layers.weights import PackedFormats
from nbengine.models.prepared.program import MOST_LOGITS
from nbengine.models.registry import decoder_config
from nbengine.models.step_output import StepOutput
from nbengine.runtime.progress import Reporter
from nbengine.worker.memory.cache_rows import CacheRows
from nbengine.worker.memory.layer_caches import layer_caches
from tests.support.thorough import amount

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 400
NUM_SLOTS = 140
Load = Callable[..., DecoderForCausalLM]


EXPERTS: dict[str, Any] = {
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def expert_metadata(arch: str) -> dict[str, int]:
    """The metadata of a GGUF file with `EXPERTS`."""
    return {
        f"{arch}.expert_count": EXPERTS["num_experts"],
        f"{arch}.expert_used_count": EXPERTS["num_experts_per_tok"],
        f"{arch}.expert_feed_forward_length": EXPERTS["moe_intermediate_size"],
    }


def load_gguf(
    path: Path, parallel: ParallelState = SINGLE, dtype: torch.dtype = torch.bfloat16
) -> DecoderForCausalLM:
    """A rank's part of the model in a GGUF file, its matrices quantised as they are there, or with 16 bits."""
    config = decoder_config(hf_config(read_header(path)))
    return load_decoder(
        config,
        (path,),
        dtype=dtype,
        device=CPU,
        max_positions=None,
        report=Reporter(None, "load"),
        parallel=parallel,
        packed=PackedFormats(GGUFWeights(path, config).formats, CpuProducts(), is_wide=True),
    )


class Batches:
    """Caches of random keys and values, random states, and steps of some requests.

    Layers of different cache groups share tensors, and each group has blocks of its own. Where the model has windows,
    blocks that no query sees have the number of a block of NaNs.
    """

    def __init__(self, model: DecoderForCausalLM, kv_dtype: torch.dtype | None = None) -> None:
        self.model = model
        kv_dtype = kv_dtype or model.dtype
        self.kernels = select_kernels(CPU, kv_dtype, model.hidden_dtype)
        self.groups = make_groups(model.config.cache_rules())
        self.states_go_on = False
        """Tell whether each request's state is in its own slot, and nothing of it is kept."""
        self.chance = torch.Generator().manual_seed(7)
        self.rows = CacheRows.of(model.config, model.layout, kv_dtype, self.groups)
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_slots": NUM_SLOTS}
        self.caches: list[Any] = layer_caches(model, self.groups, self.rows, kv_dtype, **sizes)
        self._fill()

    def _fill(self) -> None:
        """Give states random numbers, and each piece of memory those of its widest layer, the last block of which are
        NaN."""
        filled = set()
        for cache in self.caches:
            if not isinstance(cache, Tensor):
                for part in (cache.conv, cache.state):
                    part.copy_(self._random(*part.shape))
            elif cache.shape[1] == NUM_BLOCKS and cache.data_ptr() not in filled:
                filled.add(cache.data_ptr())
                width = cache.shape[4] if cache.dtype is not torch.int8 else self.model.config.head_dim
                shape = (NUM_BLOCKS * BLOCK_SIZE, cache.shape[2], width)
                key, value = (self._random(*shape).to(self.model.hidden_dtype) for _ in range(2))
                key[-BLOCK_SIZE:] = value[-BLOCK_SIZE:] = torch.nan
                if self.model.config.latent is not None:
                    self.kernels.write_latent(key[:, 0], cache, torch.arange(len(key)))
                else:
                    self.kernels.write_kv(key, value, cache, torch.arange(len(key)))

    def attention(
        self, lengths: list[int], query_lens: list[int] | None = None, most: int = 0
    ) -> AttentionMetadata | StepMetadata:
        """The metadata of a step; each request has at least `most` blocks."""
        counts = np.array(query_lens or [1] * len(lengths), np.int32)
        most = max(most, -(-max(lengths) // BLOCK_SIZE))
        groups: list[Any] = []
        for spec in self.groups.attention:
            table = np.arange(len(lengths) * most, dtype=np.int32).reshape(len(lengths), most)
            table += len(groups) * table.size
            assert table.max() < NUM_BLOCKS - 1
            for row, length, count in zip(table, lengths, counts, strict=True):
                row[: spec.first_needed(length - count) // BLOCK_SIZE] = NUM_BLOCKS - 1
            table *= self.rows.spreads[len(groups)]
            groups.append(
                build_attention_metadata(
                    counts,
                    np.array(lengths, np.int32),
                    table,
                    block_size=BLOCK_SIZE,
                    kernels=self.kernels,
                    device=CPU,
                )
            )
        if self.groups.recurrent is not None:
            groups.append(self._recurrent(counts))
        return groups[0] if len(groups) == 1 else StepMetadata(tuple(groups))

    def step(
        self,
        lengths: list[int],
        queries: list[int] | None = None,
        *,
        seed: int,
        prepared: bool,
        given: bool = False,
    ) -> tuple[StepOutput, list[Tensor]]:
        """The outcome of a step, and the caches after it; its embeddings are `given`, or looked up.

        Requests have `lengths` tokens, of which the last `queries` (default: one) are new.
        """
        queries = queries or [1] * len(lengths)
        chance = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.model.config.vocab_size, (sum(queries),), generator=chance)
        pairs = zip(lengths, queries, strict=True)
        positions = torch.cat([torch.arange(length - count, length) for length, count in pairs])
        caches = copies_of(self.caches)
        steps, self.model._prepared = self.model._prepared, self.model._prepared if prepared else None
        try:
            with torch.inference_mode():
                embeds = self.model.embed(ids) if given else None
                attention = self.attention(lengths, queries)
                output = self.model.step(ids, positions, caches, attention, embeds)
        finally:
            self.model._prepared = steps
        parts = [(each,) if isinstance(each, Tensor) else (each.conv, each.state) for each in caches]
        return output, [tensor for each in parts for tensor in each]

    def _recurrent(self, counts: NDArray[np.int32]) -> RecurrentMetadata:
        """The states of requests in slots that are in no order: some begin from zeros, some from another's state; the
        last keeps its state in the middle of its tokens, too."""
        number = len(counts)
        slots = np.arange(number, dtype=np.int32)[::-1] * 2
        sources = slots.copy()
        last = counts[-1:]
        if self.states_go_on:
            checkpoints = Checkpoints.none()
        else:
            sources[::3], sources[1::3] = slots[::3] + 1, -1
            checkpoints = Checkpoints(np.array([number - 1], np.int32), last - last // 2, slots[:1] + 3)
        return build_recurrent_metadata(
            counts,
            np.ascontiguousarray(slots),
            sources,
            checkpoints,
            num_slots=NUM_SLOTS,
            kernels=select_recurrent_kernels(CPU, self.model.hidden_dtype),
            device=CPU,
        )

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.chance)


def copies_of(caches: list[Any]) -> list[Any]:
    """Copies of the caches of layers, those in one memory in one copy of it."""
    pages = {cache.data_ptr(): cache.clone() for cache in caches if isinstance(cache, Tensor)}
    return [
        pages[cache.data_ptr()].view(cache.shape)
        if isinstance(cache, Tensor)
        else RecurrentState(cache.conv.clone(), cache.state.clone())
        for cache in caches
    ]


def is_same(one: Tensor, other: Tensor) -> bool:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


def assert_same_bits(
    batches: Batches, lengths: list[int], seed: int, queries: list[int] | None = None
) -> None:
    output, caches = batches.step(lengths, queries, seed=seed, prepared=True)
    expected, expected_caches = batches.step(lengths, queries, seed=seed, prepared=False)
    assert is_same(output.hidden, expected.hidden)
    assert all(map(is_same, caches, expected_caches))
    assert expected.logits is None
    assert not output.hidden.isnan().any()
    if queries is not None or len(lengths) > MOST_LOGITS:
        assert output.logits is None
        return
    with torch.inference_mode():
        logits = batches.model.compute_logits(expected.hidden)
    assert output.logits is not None
    assert is_same(output.logits, logits)
    assert output.largest is not None
    places, values = output.largest
    assert places.tolist() == logits.numpy().argmax(-1).tolist()
    assert torch.equal(values, logits.amax(-1))


STEPS: list[tuple[list[int], list[int] | None]] = [
    ([1], None),
    ([200], None),
    ([3, 90], None),
    ([40], [40]),
    ([17, 1, 33, 40, 250], None),
    ([140, 9, 33, 40, 250], [1, 1, 20, 40, 3]),
    (list(range(1, 41)), None),
    ([9], None),
    ([250, 70], [150, 70]),
    ([2] * (MOST_LOGITS + 3), None),
    ([128, 129], None),
]


AGAIN = amount(STEPS[::3], thorough=STEPS)
"""One request's token, one prompt, and more requests than have logits at once, among others."""


def assert_same_bits_of_all_steps(batches: Batches) -> None:
    """Compare all steps, and then steps for which the program is there already, and which it serves."""
    assert batches.model._prepared is not None
    programs = []
    for steps in (STEPS, AGAIN):
        for seed, (lengths, queries) in enumerate(steps):
            assert_same_bits(batches, lengths, seed, queries)
        programs.append(batches.model._prepared._program)
    assert programs[0] is not None
    assert programs[0] is programs[1]
