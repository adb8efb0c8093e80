"""With async scheduling a model says token by token what it says without."""

from __future__ import annotations

from typing import Any

import pytest

from nbengine import LLM, RequestOutput, SamplingParams
from tests.support.thorough import amount

NUM_REQUESTS = amount(12, thorough=16)
PROMPTS = [
    f"Once upon a time there were {number} small" + " and quiet" * number for number in range(NUM_REQUESTS)
]
ROOMY = {"num_gpu_blocks_override": 400}
TIGHT = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 24, "max_model_len": 256}
"""A few requests fit at a time, so that they are preempted; prompts take several steps."""

STOPS = list(range(32, 48))
"""A model that writes noise soon writes one of them."""

pytestmark = pytest.mark.timeout(300)


def params_of(number: int) -> SamplingParams:
    """Greedy and seeded random requests of different lengths; some end by a stop string or a token."""
    return SamplingParams(
        temperature=0.0 if number % 2 else 0.9,
        top_p=0.95 if number % 3 else 1.0,
        seed=number,
        max_tokens=4 + number,
        min_tokens=3 if number % 4 == 0 else 0,
        stop=[","] if number % 5 == 0 else None,
        stop_token_ids=STOPS if number % 3 == 0 else None,
    )


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, [params_of(number) for number in range(NUM_REQUESTS)], use_tqdm=False)


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (o.prompt, *((c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.outputs))
        for o in outputs
    ]


def start(*, async_scheduling: bool, **options: Any) -> LLM:
    return LLM(
        "random-tiny",
        dtype="float32",
        max_num_seqs=NUM_REQUESTS,
        multiprocess=False,
        async_scheduling=async_scheduling,
        **options,
    )


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with start(async_scheduling=False, **ROOMY) as llm:
        outputs = generate(llm)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}
    return told(outputs)


@pytest.mark.parametrize("options", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_tokens_are_the_same_cold_and_warm_also_after_aborts(
    expected: list[Any], options: dict[str, Any]
) -> None:
    with start(async_scheduling=True, **options) as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        assert core.batch_queue_size == 2
        assert told(generate(llm)) == expected
        cold = core.stats()
        assert (cold.num_preemptions > 0) == (options is TIGHT)
        for number in range(6):
            llm.llm_engine.add_request(
                str(number), PROMPTS[number], SamplingParams(max_tokens=40, ignore_eos=True)
            )
        for _ in range(4):
            llm.llm_engine.step()
        llm.llm_engine.abort_request([str(number) for number in range(6)])
        assert told(generate(llm)) == expected
        warm = core.stats()
        assert warm.prefix_cache_hits > cold.prefix_cache_hits
        assert warm.num_free_blocks == warm.num_blocks
