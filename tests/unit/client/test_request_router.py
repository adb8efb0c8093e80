"""The router chooses a rank beyond the balance of loads, and knows the ranks, whatever the order of news."""

from __future__ import annotations

import dataclasses

import pytest

from nbengine.client.routing.core_table import CoreTable, Home
from nbengine.client.routing.request_router import RequestRouter
from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from nbengine.errors import RequestLostError
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, PromptRead
from nbengine.sampling_params import SamplingParams

BLOCK = 4


def make_router(
    size: int = 3, *, bound_rank: int | None = None, affinity: bool = False, caching: bool = True
) -> RequestRouter:
    config = dataclasses.replace(
        EngineConfig(model=ModelConfig(model="m")),
        parallel=ParallelConfig(data_parallel_size=size, data_parallel_prefix_affinity=affinity),
        cache=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
    )
    router = RequestRouter(config, bound_rank=bound_rank)
    for rank in range(size):
        router.on_ready(ready(rank))
        router.table.on_connected(rank, 0, 0)
    router.table.set_ranks(range(size))
    router.update()
    return router


def ready(rank: int, incarnation: int = 0) -> EngineReady:
    return EngineReady(rank, 64, BLOCK, 512, 0, 0, "cpu", "float32", [], 1, incarnation=incarnation)


def request(name: str, prompt: list[int] | None = None, **fields: object) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt or [1, 2], SamplingParams(), **fields)  # type: ignore[arg-type]


def test_a_named_rank_is_obeyed_waits_while_it_restarts_and_is_an_error_when_it_has_left() -> None:
    router = make_router()
    assert [router.route(request(f"r{n}", data_parallel_rank=2)) for n in range(5)] == [2] * 5
    router.table.set_ranks([0, 1])
    router.table.on_lost(2, 0, restarting=True)
    router.update()
    assert router.route(request("patient", data_parallel_rank=2)) is None
    assert router.num_waiting == 1
    assert router.abort(["patient"]) == {}
    assert router.num_waiting == 0
    with pytest.raises(RequestLostError, match="engine core 7 has left") as caught:
        router.route(request("gone", data_parallel_rank=7))
    assert caught.value.rank == 7


def test_all_requests_of_a_bound_client_go_to_its_rank() -> None:
    router = make_router(bound_rank=1)
    assert {router.route(request(f"r{n}")) for n in range(9)} == {1}
    router.table.set_ranks([0, 2])
    router.table.on_lost(1, 0, restarting=True)
    router.update()
    assert router.route(request("patient")) is None


def test_completions_of_one_prompt_go_to_one_rank_until_it_is_crowded() -> None:
    router = make_router()
    prompt = list(range(20))
    chosen = [router.route(request(f"{n}", prompt, external_req_id="same")) for n in range(4)]
    assert len(set(chosen)) == 1
    more = [router.route(request(f"more {n}", prompt, external_req_id="same")) for n in range(20)]
    assert set(more) == {0, 1, 2}


@pytest.mark.parametrize(("prompt", "caching"), [([1, 2, 3], True), (list(range(20)), False)])
def test_completions_that_would_share_no_block_are_spread(prompt: list[int], caching: bool) -> None:
    router = make_router(caching=caching)
    chosen = [router.route(request(f"{n}", prompt, external_req_id="same")) for n in range(3)]
    assert set(chosen) == {0, 1, 2}


def test_with_affinity_prompts_that_start_alike_meet_until_their_rank_starts_again() -> None:
    router = make_router(affinity=True)
    shared = list(range(12))
    first = router.route(request("a", [*shared, 1]))
    assert first is not None
    router.route(request("b", [9] * 12))
    assert router.route(request("c", [*shared, 2, 3, 4, 5])) == first
    assert router.route(request("d", [*shared, 2, 3, 4, 5], cache_salt="s")) != first
    others = [rank for rank in range(3) if rank != first]
    router.table.set_ranks(others)
    router.update()
    router.take_begun(Home(first, 0))
    router.take_unbegun(Home(first, 0))
    router.on_ready(ready(first, 1))
    router.table.on_connected(first, 1, 0)
    router.table.set_ranks(range(3))
    router.update()
    assert router._affinity is not None
    hashes = router._affinity.hashes(request("e", shared))
    assert router._affinity.best(hashes, [first]) is None


def test_outputs_of_another_core_or_start_are_left_out() -> None:
    router = make_router()
    router.route(request("mine", data_parallel_rank=1))

    def taken(rank: int, incarnation: int) -> list[str]:
        outputs = EngineCoreOutputs(
            engine_index=rank,
            incarnation=incarnation,
            outputs=[EngineCoreOutput("mine", [5]), EngineCoreOutput("unknown", [6])],
            finished_requests=["unknown"],
            prompts_read=[PromptRead(name, 9, 4, 0, 0.5) for name in ("mine", "unknown")],
        )
        router.take_in(outputs)
        assert not outputs.finished_requests
        assert outputs.prompts_read is not None
        assert [read.request_id for read in outputs.prompts_read] == [
            out.request_id for out in outputs.outputs
        ]
        return [output.request_id for output in outputs.outputs]

    assert (taken(0, 0), taken(1, 1), taken(1, 0)) == ([], [], ["mine"])
    assert router.abort(["mine", "unknown"]) == {1: ["mine"]}
    assert taken(1, 0) == []


def test_a_rank_is_usable_when_listed_ready_and_connected_in_the_same_start() -> None:
    table = CoreTable()
    table.on_connected(0, 1, 0)
    table.on_ready(0, 0)
    table.set_ranks([0])
    assert not table.usable
    assert table.expected == [0]
    table.on_ready(0, 1)
    assert table.usable == {0: Home(0, 1)}
    assert table.all_usable
    table.on_farewell(0, 0)
    assert table.usable
    table.on_farewell(0, 1)
    assert not table.usable
    assert set(table.departed()) == {Home(0, 0)}
    table.set_ranks([])
    assert set(table.departed()) == {Home(0, 0), Home(0, 1)}


def test_a_core_that_left_is_departed_also_when_its_rank_has_come_again() -> None:
    table = CoreTable()
    table.set_ranks([])
    table.on_ready(1, 1)
    table.set_ranks([1])
    # Its good-bye comes on another connection, after all that.
    table.on_farewell(1, 0)
    assert table.departed() == [Home(1, 0)]
    table.forget(Home(1, 0))
    assert table.departed() == []
