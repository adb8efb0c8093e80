"""With limits of one token, one block or one request, every request is refused with a reason or comes to its end."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import RequestError
from nbengine.ipc.messages import EngineCoreRequest, FinishReason
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler

TINY = st.integers(1, 3)
LIMITS = st.fixed_dictionaries(
    {
        "max_model_len": st.sampled_from([1, 2, 3, 7]),
        "num_blocks": TINY,
        "block_size": st.sampled_from([1, 2, 16]),
        "max_num_batched_tokens": st.sampled_from([1, 2, 9]),
        "max_num_seqs": TINY,
        "chunked": st.booleans(),
        "threshold": st.sampled_from([0, 1]),
        "caching": st.booleans(),
        "ahead": st.booleans(),
        "stages": st.sampled_from([1, 1, 2, 3]),
    }
)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 8), st.sampled_from([None, 1, 2, 5]), st.booleans()), min_size=1, max_size=6
)


def scheduler_of(limits: dict[str, int]) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            enable_chunked_prefill=bool(limits["chunked"]),
            long_prefill_token_threshold=limits["threshold"],
        ),
        CacheConfig(block_size=limits["block_size"], enable_prefix_caching=bool(limits["caching"])),
        limits["num_blocks"],
        limits["max_model_len"],
        options=SchedulerOptions(async_scheduling=bool(limits["ahead"]), num_stages=limits["stages"]),
    )


def answer(scheduler: Scheduler, plan: SchedulerOutput) -> list[tuple[str, FinishReason | None]]:
    """Answer a plan as a model runner would, and return which requests have ended with it."""
    req_ids = list(plan.num_scheduled_tokens)
    done = [req_id for req_id in req_ids if req_id not in plan.incomplete_req_ids]
    pooled = [req_id for req_id in done if req_id.startswith("p")]
    sampled = [[7] if req_id in done and req_id not in pooled else [] for req_id in req_ids]
    output = ModelRunnerOutput(req_ids, sampled, pooler_output=dict.fromkeys(pooled, 0))  # type: ignore[arg-type]
    batches = scheduler.update_from_output(plan, output).values()
    return [(o.request_id, o.finish_reason) for batch in batches for o in batch.outputs if o.finished]


@given(limits=LIMITS, requests=REQUESTS)
def test_every_request_is_refused_or_ends(limits: dict[str, int], requests: list) -> None:
    scheduler = scheduler_of(limits)
    taken = {}
    for number, (length, max_tokens, is_pooling) in enumerate(requests):
        name = f"{'p' if is_pooling else 'g'}{number}"
        params = None if is_pooling else SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        pooling = PoolingParams(task="embed", pooling="mean") if is_pooling else None
        wire = EngineCoreRequest(name, [number + 1] * length, params, pooling_params=pooling)
        request = Request.from_engine_core_request(wire, scheduler.kv_cache_manager.block_hasher)
        try:
            scheduler.add_request(request)
        except RequestError as error:
            assert name in str(error)  # noqa: PT017
            continue
        taken[name] = request
    if limits["max_model_len"] == 1:
        assert all(name.startswith("p") for name in taken)
    in_flight: deque[SchedulerOutput] = deque()
    ended: dict[str, FinishReason | None] = {}
    depth = max(limits["stages"], 2 if limits["ahead"] else 1)
    # Every step has a token of some request, and no request is computed from its beginning more often than others end.
    steps = 40 * depth * (1 + sum(length + 8 for length, *_ in requests)) * (1 + len(taken))
    while scheduler.has_requests() or in_flight:
        steps -= 1
        assert steps, f"the requests do not end: {limits}"
        if scheduler.has_requests() and len(in_flight) < depth:
            in_flight.append(scheduler.schedule())
        else:
            ended |= dict(answer(scheduler, in_flight.popleft()))
    assert ended.keys() == taken.keys()
    assert all(reason is not FinishReason.ERROR for reason in ended.values())
    scheduler.check_integrity()
    assert scheduler.make_stats().num_free_blocks == limits["num_blocks"]
