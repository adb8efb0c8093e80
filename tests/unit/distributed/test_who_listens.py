"""A worker listens on TCP ports only where it must, and on the right interface."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nbengine.distributed import data_parallel, init, torch_data_parallel
from nbengine.distributed.data_parallel import join_data_parallel
from nbengine.distributed.init import TorchWorld, init_parallel
from nbengine.distributed.layout import ALONE, RankLayout
from nbengine.distributed.rendezvous import Party, Rendezvous
from nbengine.distributed.row_counts import Word
from nbengine.errors import EngineStartError

CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")
"""Stands for a GPU."""


@pytest.fixture
def no_interfaces(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        # So that what the test's body sets is taken back, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_nccl_listens_on_the_loopback_alone_where_all_ranks_are_on_one_machine(tmp_path, no_interfaces):
    calls = []
    no_interfaces.setattr(init.dist, "init_process_group", lambda *args, **named: calls.append(args[0]))
    meeting = Rendezvous(f"file://{tmp_path}/place", Party.of_workers(ALONE), "engine", 5.0)
    TorchWorld(ALONE, torch.device("cuda", 0), meeting)
    assert calls == ["nccl"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_interface_that_the_user_has_chosen_stays(tmp_path, no_interfaces):
    no_interfaces.setattr(init.dist, "init_process_group", lambda *args, **named: None)
    no_interfaces.setenv("NCCL_SOCKET_IFNAME", "eth7")
    meeting = Rendezvous(f"file://{tmp_path}/place", Party.of_workers(ALONE), "engine", 5.0)
    TorchWorld(ALONE, torch.device("cuda", 0), meeting)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_engine_cores_on_gpus_tell_each_other_numbers_through_memory(tmp_path, no_interfaces):
    made = []

    class Group:
        def __init__(self, store, rank, size, device, address, timeout, words):
            self.rank, self.words = rank, words
            made.append(self)

        def begin_step(self, num_tokens):
            assert self.words.share(Word.ROWS, self.rank + 5) == [5, 6]

        def gather(self, x):
            return x

        reduce_scatter = gather

    no_interfaces.setattr(torch_data_parallel, "TorchDataParallelGroup", Group)

    def join(rank):
        return join_data_parallel(
            RankLayout(dp_rank=rank, dp_size=2),
            ELSEWHERE,
            init_method=f"file://{tmp_path}/cores",
            engine="engine",
            directory=str(tmp_path),
            max_tensor_bytes=1 << 40,
            dtype=torch.float32,
            timeout=30.0,
        )

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(join, range(2)))
    assert sorted(made, key=lambda group: group.rank) == groups
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tensors-")]
    for group in groups:
        group.words.close()


def join_workers(tmp_path, rank):
    return init_parallel(
        RankLayout(rank, 2),
        CPU,
        init_method=f"file://{tmp_path}/place",
        directory=str(tmp_path),
        max_tensor_bytes=1,
        timeout=30.0,
    )


def join_cores(tmp_path, rank):
    return join_data_parallel(
        RankLayout(dp_rank=rank, dp_size=2),
        CPU,
        init_method=f"file://{tmp_path}/place",
        engine="engine",
        directory=str(tmp_path),
        max_tensor_bytes=1,
        dtype=torch.float32,
        timeout=30.0,
    )


@pytest.mark.parametrize("join", [join_workers, join_cores])
def test_gloo_is_used_only_where_the_engine_may_listen(tmp_path, monkeypatch, join):
    for module in (init, data_parallel):
        monkeypatch.setattr(module, "shares_memory", lambda: False)

    def refusal(rank):
        with pytest.raises(EngineStartError) as raised:
            join(tmp_path, rank)
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(refusal, range(2)):
            assert "llvmlite is not installed" in said
            assert "set data_parallel_address='127.0.0.1' if they may" in said
    assert not torch.distributed.is_initialized()


def test_a_worker_without_others_needs_neither(tmp_path, monkeypatch):
    monkeypatch.setattr(init, "shares_memory", lambda: False)
    init_parallel(
        ALONE,
        CPU,
        init_method=f"file://{tmp_path}/place",
        directory=str(tmp_path),
        max_tensor_bytes=1,
    ).close()
    assert not torch.distributed.is_initialized()
