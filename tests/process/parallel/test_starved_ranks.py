"""A rank among several has too little memory for what some requests ask for: they end, and all others go on. Where the
forward pass lacks memory, the engine ends, and says which worker it was."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from process_support.engine_under_test import SUPPORT_PATH, wait_for
from process_support.starved_worker import (
    BEGUN,
    COLUMNS,
    COMPUTED,
    FATAL,
    LOGPROBS,
    POOR,
    STARVED_WORKERS,
    STATES,
)

from nbengine import LLM, AsyncLLM, PoolingParams, RequestOutput, SamplingParams
from nbengine.client.engines.processes import session_processes
from nbengine.errors import EngineDeadError, RequestError, RequestLostError
from nbengine.sampling_params import RequestOutputKind
from tests.support.thorough import amount

DEADLINE = 120.0
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "num_gpu_blocks_override": 120,
    "max_num_batched_tokens": 128,
}

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Topology:
    """The sizes of an engine, its model, and the worker that lacks memory."""

    sizes: dict[str, Any]
    poor: str
    """The worker, as "engine core:rank"."""
    named: str
    """The name that the error of the engine's end has for the worker."""
    model: str = "random-tiny"

    @property
    def core(self) -> int:
        """The engine core of the worker."""
        return int(self.poor.partition(":")[0])

    @property
    def num_cores(self) -> int:
        """The number of engine cores."""
        return int(self.sizes.get("data_parallel_size", 1))

    @property
    def is_dense(self) -> bool:
        """Return whether there are several engine cores, which are independent of each other."""
        return self.num_cores > 1 and self.model == "random-tiny"


FEW_TOPOLOGIES = {
    "tp2": Topology({"tensor_parallel_size": 2}, "0:1", "worker 1 (TP1)"),
    "dp2-tp2-ep": Topology(
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
        "1:0",
        "worker 0 (TP0)",
        "random-tiny-moe",
    ),
}
TOPOLOGIES = amount(
    FEW_TOPOLOGIES,
    thorough={
        **FEW_TOPOLOGIES,
        "pp2": Topology({"pipeline_parallel_size": 2}, "0:1", "worker 1 (PP1)"),
        "dense-dp2": Topology({"data_parallel_size": 2}, "1:0", "engine core 1"),
        "tp2-first": Topology({"tensor_parallel_size": 2, "async_scheduling": True}, "0:0", "worker 0 (TP0)"),
        "tp2-pp2": Topology(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "0:3", "worker 3 (TP1 PP1)"
        ),
        "dp2": Topology({"data_parallel_size": 2}, "0:0", "engine core 0", "random-tiny-moe"),
    },
)


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> Topology:
    return TOPOLOGIES[request.param]


@pytest.fixture
def engine(topology: Topology, no_leftovers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)
    monkeypatch.setenv(POOR, topology.poor)
    options = {**OPTIONS, **topology.sizes}
    made = AsyncLLM(topology.model, name="starved", distributed_executor_backend=STARVED_WORKERS, **options)
    yield made
    made.shutdown()


def prompt(length: int, seed: int) -> dict[str, Any]:
    chooser = random.Random(seed)
    return {"prompt_token_ids": [chooser.randrange(256) for _ in range(length)]}


def asking(max_tokens: int = 24, temperature: float = 0, **extras: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **extras,
    )


OTHERS = [
    (prompt(7, 1), asking()),
    (prompt(50, 2), asking(60)),
    (prompt(9, 3), asking(30, temperature=0.9, top_p=0.9)),
    (prompt(20, 4), asking(logprobs=3, prompt_logprobs=2)),
    (prompt(8, 5), asking(12, repetition_penalty=1.3)),
    (prompt(5, 6), asking(40, min_tokens=30, logit_bias={3: 2.0})),
]
DOOMED = {
    f"prompt_logprobs={BEGUN}": (prompt(40, 11), asking(prompt_logprobs=BEGUN)),
    f"prompt_logprobs={COMPUTED}": (prompt(40, 12), asking(prompt_logprobs=COMPUTED)),
    f"logprobs={LOGPROBS}": (prompt(9, 13), asking(logprobs=LOGPROBS)),
    "repetition_penalty=1.5": (
        {"prompt_token_ids": list(range(COLUMNS + 16))},
        asking(repetition_penalty=1.5),
    ),
    "repetition_penalty=1.2": (prompt(30, 14), asking(90, temperature=3.0, repetition_penalty=1.2)),
}


async def answer(engine: AsyncLLM, asked: tuple[dict[str, Any], SamplingParams], core: int) -> RequestOutput:
    async for output in engine.generate(*asked, data_parallel_rank=core):
        last = output
    return last


async def embedding(engine: AsyncLLM, length: int) -> Any:
    async for output in engine.encode(prompt(length, 15), PoolingParams(task="embed", pooling="mean")):
        last = output
    return last


async def everything(engine: AsyncLLM, topology: Topology) -> list[RequestOutput]:
    """Ask for all at once; return the outputs of the others, of each engine core's."""
    others = [answer(engine, asked, core) for core in range(topology.num_cores) for asked in OTHERS]
    doomed = {name: answer(engine, asked, topology.core) for name, asked in DOOMED.items()}
    # Nobody can say which engine core is to pool.
    if topology.num_cores == 1:
        doomed["the task embed"] = embedding(engine, STATES + 10)
    outcome = await asyncio.wait_for(
        asyncio.gather(*others, *doomed.values(), return_exceptions=True), DEADLINE
    )
    found, errors = outcome[: len(others)], outcome[len(others) :]
    for asked, error in zip(doomed, errors, strict=True):
        assert isinstance(error, RequestError), (asked, error)
        assert f"does not have enough memory for {asked} with " in str(error)
    assert not any(isinstance(output, BaseException) for output in found), found
    return found


async def check_nothing_is_held(engine: AsyncLLM) -> None:
    async def poll() -> None:
        while any(core.num_running_reqs or core.engines_running for core in (await engine.stats()).engines):
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), DEADLINE)
    for stats in (await engine.stats()).engines:
        assert stats.num_waiting_reqs == 0
        assert stats.num_free_blocks == stats.num_blocks


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


async def test_who_asks_one_rank_for_too_much_ends_alone_and_the_forward_pass_ends_the_engine(
    engine: AsyncLLM, topology: Topology
) -> None:
    with LLM(topology.model, multiprocess=False, **OPTIONS) as alone:
        prompts, params = zip(*OTHERS, strict=True)
        expected = tokens_of(alone.generate(list(prompts), list(params), use_tqdm=False))
    for _ in range(2):
        assert tokens_of(await everything(engine, topology)) == expected * topology.num_cores
        await check_nothing_is_held(engine)
    await check_end(engine, topology)


async def check_end(engine: AsyncLLM, topology: Topology) -> None:
    """Let memory run out in the middle of a forward pass, when other ranks wait for this one's tensors."""
    # It is asked first: asked later, it may come when the others have ended.
    fatal = asyncio.create_task(answer(engine, (prompt(FATAL, 16), asking()), topology.core))
    others = [
        asyncio.create_task(answer(engine, (prompt(50, 2), asking(100)), core))
        for core in range(topology.num_cores)
    ]
    began = time.monotonic()
    with pytest.raises(RequestLostError if topology.is_dense else EngineDeadError) as caught:
        await asyncio.wait_for(fatal, DEADLINE)
    assert time.monotonic() - began < DEADLINE
    assert topology.named in str(caught.value)
    assert "out of memory" in str(caught.value)
    outcome = await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), DEADLINE)
    if topology.is_dense:
        # The other engine core knows nothing of it.
        assert outcome[1 - topology.core].outputs[0].finish_reason == "length"
        return
    assert all(isinstance(error, EngineDeadError) for error in outcome), outcome
    info = engine.connection
    wait_for(lambda: not session_processes(info), "the end of the engine's processes")
    wait_for(lambda: not Path(info.run_dir).exists(), "the end of the run directory")
