"""The memory that a full batch may ask for beside the weights is counted before the KV cache gets its
blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nbengine.config import EngineConfig
from nbengine.distributed.layout import ALONE
from nbengine.errors import EngineStartError
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.loading import Precision
from nbengine.sampling import penalties
from nbengine.sampling.penalties import PenaltyTable, table_bytes
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.batch import prompt_logprobs
from nbengine.worker.batch.pooler import Pooler
from nbengine.worker.memory.budget import cpu_kv_cache_bytes, uncounted_extras
from nbengine.worker.memory.extras import GATHERED_BYTES, decoder_extras, pooling_extras
from nbengine.worker.memory.footprint import Footprint
from nbengine.worker.memory.limits import check_kv_cache_fits
from nbengine.worker.model_runner import ModelRunner
from tests.unit.worker.conftest import MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_TOKENS

CPU = torch.device("cpu")
EVERYTHING: dict[str, Any] = {
    "logprobs": 20,
    "prompt_logprobs": 20,
    "repetition_penalty": 1.2,
    "top_p": 0.9,
    "allowed_token_ids": list(range(200)),
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that torch has made since, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._live = {at: (ref, size) for at, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute penalties, as where no compiled kernels are."""
    monkeypatch.setattr(penalties, "select_penalties", lambda device: None)


VOCAB, LONGEST = 8192, 8000


@pytest.fixture
def wide_runner(tiny_config: EngineConfig, as_on_a_device: None) -> ModelRunner:
    """Make the runner of a model that is nearly all vocabulary, so that sampling takes more than anything
    else."""
    model = DecoderForCausalLM(
        DecoderConfig(VOCAB, 16, 16, 1, 1, 1, 16, 1e-5, 1e4, None, LONGEST, tie_word_embeddings=True),
        dtype=torch.float32,
        device=CPU,
    )
    for weight in model.parameters():
        weight.fill_(0.01)
    runner = ModelRunner(tiny_config, model, CPU, torch.float32)
    runner.initialize_kv_cache(2000, LONGEST)
    return runner


def measured(work: Callable[[], object]) -> int:
    with LiveBytes() as live:
        work()
    return live.peak


def full_batch(first: int, others: int, extras: dict[str, Any]) -> SchedulerOutput:
    """A step of `MAX_TOKENS` of new requests with `extras`: the first has a prompt of `first` tokens, the others of `others`.
    If the first's is longer, one token of it is computed, and the prompt is no part of its log probabilities."""
    is_long = first > others
    share = (MAX_TOKENS - is_long) // (MAX_NUM_SEQS - is_long)
    news, counts = [], {}
    for n in range(MAX_NUM_SEQS):
        is_first = n == 0 and is_long
        params = SamplingParams(seed=n, **{**extras, "prompt_logprobs": None} if is_first else extras)
        prompt = list(range(others if n else first))
        news.append(NewRequestData(str(n), prompt, params, [3 * n, 3 * n + 1, 3 * n + 2], 0))
        counts[str(n)] = 1 if is_first else share
    return SchedulerOutput(news, CachedRequestData(), counts, MAX_TOKENS, set())


@pytest.mark.parametrize(
    ("first", "others", "longest", "piece_bytes"),
    [(8, 8, 64, 1), (LONGEST - 50, 9, LONGEST, 1), (LONGEST - 50, 12, LONGEST, 1 << 30)],
    ids=["logits count", "penalties count", "prompt logprobs count"],
)
@pytest.mark.parametrize("extras", [{}, EVERYTHING], ids=["plain", "everything"])
def test_no_full_batch_takes_more_than_the_profile_run(
    wide_runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    extras: dict[str, Any],
    first: int,
    others: int,
    longest: int,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(prompt_logprobs, "PIECE_BYTES", piece_bytes)
    plan = full_batch(first, others, extras)

    def step() -> None:
        assert wide_runner.execute_model(plan) is None
        assert wide_runner.sample_tokens().faults is None

    taken = measured(step)
    assert taken > MAX_TOKENS * 16 * 4, "it measures something"
    assert taken <= measured(lambda: wide_runner.profile_run(longest))


def test_a_table_of_penalties_never_outgrows_what_was_counted(as_on_a_device: None) -> None:
    table = PenaltyTable(2, 100, CPU, max_num_tokens=1000)
    rows = penalties.PenaltyRows.build(table, np.arange(1), np.arange(1), 1, CPU)
    words = np.arange(100, dtype=np.int32)
    table.add(0, SamplingParams(repetition_penalty=1.5), words, words[:0])
    for step in range(900):
        table.expect(rows)
        table.make_room(rows)
        table.append(rows, torch.tensor([step % 100]))
        if step % 7 == 0:
            table.remove(1)
            table.add(1, SamplingParams(repetition_penalty=1.5), words[: step % 100], words[:0])
    assert sum(part.nbytes for part in table._lists()) <= table_bytes(2, 100, 1000)


def test_a_devices_table_gets_all_its_columns_at_once_and_a_cpus_grows() -> None:
    widths = []
    for kind in ("cpu", "cuda"):
        table = PenaltyTable(2, 5000, CPU, max_num_tokens=3000)
        # What grows lies on the CPU all the same.
        table._device = torch.device(kind)
        table._num_entries[0] = 20
        table._fit_width()
        widths.append(table._index.shape[1])
    assert widths[0] < 100
    assert widths[1] == table_bytes(1, 5000, 3000) // 20


def test_long_lists_are_penalised_piece_by_piece_with_the_same_outcome(
    as_on_a_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> torch.Tensor:
        table = PenaltyTable(5, 64, CPU)
        for row in range(5):
            words = np.arange(9 * row, dtype=np.int32)
            table.add(row, SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3), words, words[:2])
        rows = penalties.PenaltyRows.build(table, np.arange(5), np.array([3, 0, 1, 4, 2]), 5, CPU)
        for token in (3, 60, 60):
            table.expect(rows)
            table.make_room(rows)
            table.append(rows, torch.full((5,), token))
        logits = torch.linspace(-2, 2, 5 * 64).view(5, 64).clone()
        table.apply(logits, rows)
        return logits

    whole = outcome()
    monkeypatch.setattr(penalties, "_PIECE_BYTES", 1)
    assert torch.equal(outcome(), whole)


@pytest.fixture
def footprint(tiny_config: EngineConfig) -> Footprint:
    return Footprint(
        tiny_config, load_hf_config(tiny_config.model), CPU, Precision(torch.float32, torch.float32), ALONE
    )


def test_a_cpus_kv_cache_leaves_what_a_full_batch_may_ask_for(
    tiny_config: EngineConfig, footprint: Footprint
) -> None:
    extras = footprint.extras_bytes(MAX_MODEL_LEN)
    page = footprint.shared_page_size_bytes
    for left in (0, 100_000, 200_000):
        pages = cpu_kv_cache_bytes(tiny_config, footprint, MAX_MODEL_LEN, extras + left) // page
        gathered = tiny_config.cache.block_size * GATHERED_BYTES
        assert pages * (page + gathered) <= left
        assert (pages + 1) * (page + gathered) > left
    plenty = cpu_kv_cache_bytes(tiny_config, footprint, MAX_MODEL_LEN, 1 << 40)
    assert plenty == MAX_NUM_SEQS * MAX_MODEL_LEN // tiny_config.cache.block_size * page


def test_what_is_worked_out_has_room_for_lists_of_penalties_that_grow(tiny_config: EngineConfig) -> None:
    def grow(longest: int) -> None:
        table = PenaltyTable(MAX_NUM_SEQS, VOCAB, CPU, longest)
        words = np.arange(longest, dtype=np.int32)
        for row in range(MAX_NUM_SEQS):
            table.add(row, SamplingParams(repetition_penalty=1.5), words, words[:0])

    short, long = (decoder_extras(tiny_config.scheduler, VOCAB, 1, longest) for longest in (1, LONGEST))
    taken = measured(lambda: grow(LONGEST)) - measured(lambda: grow(1))
    assert taken > MAX_NUM_SEQS * LONGEST
    assert taken <= long - short


def test_what_is_worked_out_has_room_for_pooling(tiny_config: EngineConfig) -> None:
    scheduler, width = tiny_config.scheduler, 4096
    states = torch.zeros(MAX_TOKENS, width, dtype=torch.bfloat16)
    # Views of the states, which are the step's own, are measured, too.
    taken = measured(lambda: Pooler(MAX_NUM_SEQS, width, CPU, None).rehearse(states)) - states.nbytes
    assert taken > MAX_NUM_SEQS * width * 4
    narrow, wide = (decoder_extras(scheduler, VOCAB, size, MAX_TOKENS) for size in (0, width))
    assert taken <= wide - narrow == pooling_extras(scheduler, width, MAX_TOKENS)


def test_a_kv_cache_of_a_given_size_must_leave_it_too(
    tiny_config: EngineConfig, footprint: Footprint
) -> None:
    given = replace(tiny_config, cache=replace(tiny_config.cache, num_gpu_blocks_override=10))
    extras = uncounted_extras(given, footprint, MAX_MODEL_LEN, 10)
    page = footprint.shared_page_size_bytes
    assert uncounted_extras(tiny_config, footprint, MAX_MODEL_LEN, 10) == 0
    # No request is longer than the cache.
    assert 0 < extras < footprint.extras_bytes(MAX_MODEL_LEN)
    check_kv_cache_fits(10, page, 10 * page + extras, "cpu", extras)
    with pytest.raises(EngineStartError, match=r"a full batch may ask for .* lower .*max_num_seqs"):
        check_kv_cache_fits(10, page, 10 * page + extras - 1, "cpu", extras)
