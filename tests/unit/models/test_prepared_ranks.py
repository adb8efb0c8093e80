"""A prepared step of a rank among others gives the bits of the eager path; the ranks are threads that share
memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from nbengine.config import ParallelConfig
from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.layout import layouts
from nbengine.distributed.peer_waits import peer_waits
from nbengine.distributed.shared_memory import Peers, SharedMemory, patience, unlink
from nbengine.distributed.shm_communicator import ShmCommunicator
from nbengine.distributed.shm_operations import ShmOperations
from nbengine.errors import QueueClosedError
from nbengine.kernels.cpu.flags import Patience
from nbengine.models.prepared.steps import PreparedSteps
from tests.support.parallel_support import ThreadWorld
from tests.support.thorough import in_turn
from tests.unit.models.prepared_batches import (
    EXPERTS,
    Batches,
    assert_same_bits_of_all_steps,
    expert_metadata,
    is_same,
    load_gguf,
)
from tests.unit.models.test_prepared_groups import MODELS as GROUPED

T = TypeVar("T")

MODELS: dict[str, tuple[str, Kind, dict[str, Any]]] = {
    "llama": ("Llama", Kind.Q4_1, {"head_dim": 32}),
    "biases": ("Qwen2", Kind.Q8_0, {"hidden_size": 128}),
    "tied, vocabulary that the ranks do not divide": (
        "Llama",
        Kind.Q5_0,
        {"head_dim": 32, "tie_word_embeddings": True, "vocab_size": 97},
    ),
    "16 bits": ("Qwen2", Kind.BF16, {"hidden_size": 128, "vocab_size": 97}),
    "biases of feed-forward blocks": ("Llama", Kind.Q5_1, {"head_dim": 32, "mlp_bias": True}),
    "experts": ("Qwen3Moe", Kind.Q4_1, EXPERTS),
    "blocks and logits times numbers": (
        "Granite",
        Kind.Q4_0,
        {
            "head_dim": 32,
            "vocab_size": 97,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
        },
    ),
}
SCALES = {"embedding_scale": 6.0, "residual_scale": 0.4, "attention.scale": 0.1, "logit_scale": 3.0}
"""The names of such numbers in a GGUF file."""


@pytest.fixture
def path_of(tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any) -> Callable[[str], Path]:
    def path_of(name: str) -> Path:
        kind, weight_type, settings = MODELS[name]
        vocabulary = settings.get("vocab_size", 96)
        arch = kind.lower()
        metadata: dict[str, Any] = expert_metadata(arch) if kind.endswith("Moe") else {}
        if kind == "Granite":
            metadata = {f"{arch}.{key}": value for key, value in SCALES.items()}
        variant = gguf_variant(
            arch=arch, weight_type=weight_type, vocabulary=vocabulary, metadata=metadata, dense="mlp.gate."
        )
        path: Path = write_gguf(tmp_path / "model.gguf", random_model(kind, **settings), variant)
        return path

    return path_of


def ranks(
    directory: Path, size: int, looks: tuple[int, int] | None = None, *, expert_parallel: bool = False
) -> list[ParallelState]:
    """The places of `size` ranks that share memory. They wait as usual, or look some times, with and without
    giving the processor away, and give up for now without having slept."""
    handle = ShmCommunicator.reserve(str(directory), size)
    parallel = ParallelConfig(tensor_parallel_size=size, enable_expert_parallel=expert_parallel)
    memories = [SharedMemory(handle) for _ in range(size)]
    unlink(handle)

    def how(memory: SharedMemory) -> Patience:
        return patience(memory, short=False) if looks is None else Patience(*looks, memory.address, 0, 0)

    return [
        ParallelState(layout, ShmCommunicator(memory, rank, size, how(memory), Peers({})))
        for rank, (memory, layout) in enumerate(zip(memories, layouts(parallel), strict=True))
    ]


def on_threads(states: list[ParallelState], body: Callable[[ParallelState], T]) -> list[T]:
    """Return what `body` gives for each rank; when one raises, the others are told."""

    def guarded(state: ParallelState) -> T:
        try:
            return body(state)
        except BaseException:
            state.close()
            raise

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(guarded, states))


@pytest.mark.parametrize(("name", "size", "num_threads"), in_turn(MODELS, [2, 4], [1, 2]))
def test_a_prepared_step_of_ranks_has_the_bits_of_the_eager_path(
    name: str, size: int, num_threads: int, path_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path, expert_parallel = path_of(name), (name, size) == ("experts", 4)

    def body(state: ParallelState) -> None:
        torch.set_num_threads(num_threads)
        model = load_gguf(path, state)
        assert model._prepared is not None
        batches = Batches(model)
        assert_same_bits_of_all_steps(batches)

    on_threads(ranks(tmp_path, size, expert_parallel=expert_parallel), body)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("deepseek 3 moe", "int4"),
        ("deepseek 3 that turns halves", None),
        ("gemma4", "int4"),
        ("gemma4 of few heads", None),
        ("gemma4 moe", "int4"),
    ],
)
def test_ranks_divide_heads_of_latent_attention_and_of_several_sizes(
    name: str, quantization: str | None, tmp_path: Path, random_model: Any, load: Any
) -> None:
    kind, settings = GROUPED[name]
    random_model(kind, **{**settings, "num_attention_heads": 4}).save_pretrained(tmp_path / "model")

    def body(state: ParallelState) -> None:
        torch.set_num_threads(1)
        model = load(tmp_path / "model", torch.bfloat16, state, quantization=quantization)
        assert model._prepared is not None
        assert_same_bits_of_all_steps(Batches(model))

    on_threads(ranks(tmp_path, 2), body)


def test_a_step_that_waits_in_vain_goes_on_where_it_stopped(
    path_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, finish = path_of("llama"), ShmOperations.finish
    stopped: list[int] = []
    stops = threading.Semaphore(0)

    def recorded(operations: ShmOperations, arguments: int) -> None:
        stopped.append(arguments)
        stops.release()
        finish(operations, arguments)

    def late(exchange: Callable[..., Tensor], communicator: ShmCommunicator, x: Tensor) -> Tensor:
        # The first rank comes when the other one has given up for now.
        if communicator.rank == 0:
            assert stops.acquire(timeout=60)
        return exchange(communicator, x)

    monkeypatch.setattr(ShmOperations, "finish", recorded)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(
            ShmCommunicator, name, partialmethod(partial(late, getattr(ShmCommunicator, name)))
        )

    def body(state: ParallelState) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(2)
        batches, is_prepared = Batches(load_gguf(path, state)), state.layout.tp_rank == 1
        output, _ = batches.step([8, 90, 3], seed=1, prepared=is_prepared)
        if output.logits is not None:
            return output.hidden, output.logits
        with torch.inference_mode():
            return output.hidden, batches.model.compute_logits(output.hidden)

    eager, prepared = on_threads(ranks(tmp_path, 2, (0, 0)), body)
    assert all(map(is_same, eager, prepared))
    exchanges = 1 + 2 * 3 + 1
    assert len(stopped) == len(set(stopped)) == exchanges


def test_a_rank_in_the_midst_of_a_step_learns_that_another_has_left(
    path_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waits, begins = path_of("llama"), threading.Event(), threading.Event()
    monkeypatch.setattr(peer_waits, "tell", lambda is_waiting: is_waiting and waits.set())

    def body(state: ParallelState) -> None:
        torch.set_num_threads(2)
        batches = Batches(load_gguf(path, state))
        batches.step([8, 9], seed=1, prepared=True)
        if state.layout.tp_rank == 0:
            # The other one is in its step, and waits for this one.
            assert begins.wait(60)
            assert waits.wait(60)
            state.close()
            return
        waits.clear()
        begins.set()
        began = time.monotonic()
        with pytest.raises(QueueClosedError, match="does not exchange tensors anymore"):
            batches.step([8, 9], seed=2, prepared=True)
        assert time.monotonic() - began < 60

    on_threads(ranks(tmp_path, 2), body)


def test_ranks_without_shared_memory_are_not_covered(path_of: Callable[[str], Path]) -> None:
    path = path_of("llama")
    assert not any(ThreadWorld(tp_size=2).run(lambda state: PreparedSteps.covers(load_gguf(path, state))))
