"""Ranks that are threads, on which the tests of layers and runner stand, do what processes would."""

from __future__ import annotations

import pytest
import torch
from parallel_support import ThreadWorld


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_reduce_in_rank_order_and_gather_along_the_last_dimension(dtype):
    parts = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)

    def rank(state):
        mine = parts[state.tp.rank].clone()
        gathered = state.tp.all_gather(mine)
        state.tp.barrier()
        return gathered, state.tp.all_reduce(mine)

    total = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    for gathered, reduced in ThreadWorld(tp_size=3).run(rank):
        assert torch.equal(gathered, torch.cat(list(parts), dim=-1))
        assert torch.equal(reduced, total)


def test_links_join_the_same_place_of_neighbouring_stages():
    def rank(state):
        trail = torch.tensor([float(state.layout.rank)])
        if state.previous is not None:
            before = state.previous.receive((state.layout.pp_rank,), torch.float32)
            trail = torch.cat([before, trail])
        if state.next is not None:
            state.next.send(trail)
        return trail.tolist()

    results = ThreadWorld(tp_size=2, pp_size=3).run(rank)
    assert results[4:] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("waits_at", ["all_reduce", "receive"])
def test_a_rank_that_raises_ends_the_others(waits_at):
    def rank(state):
        if state.layout.rank == 0:
            raise ValueError("first")
        if waits_at == "receive" and state.previous is not None:
            state.previous.receive((1,), torch.float32)
        state.tp.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="first"):
        ThreadWorld(tp_size=2, pp_size=2).run(rank)


def test_different_calls_are_an_error():
    def rank(state):
        state.tp.all_reduce(torch.ones(1 + state.tp.rank))

    with pytest.raises(AssertionError, match="different calls"):
        ThreadWorld(tp_size=2).run(rank)


def test_what_was_received_is_overwritten_by_the_next_call():
    def rank(state):
        if state.next is not None:
            state.next.send(torch.ones(1))
            state.next.send(torch.ones(1))
            return []
        first = state.previous.receive((1,), torch.float32)
        state.previous.receive((1,), torch.float32)
        return first.tolist()

    assert ThreadWorld(pp_size=2).run(rank)[1] != [1.0]
