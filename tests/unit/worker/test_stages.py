"""Runners of all ranks, which are threads here, driven by the scheduler with several steps in flight, against one
runner of the whole model with one step at a time."""

from __future__ import annotations

import pickle
import queue
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from parallel_support import ThreadWorld

from nbengine.config import EngineConfig, ParallelConfig
from nbengine.distributed.communicator import ParallelState
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, LogprobsLists
from nbengine.kv_cache.specs import ONE_GROUP
from nbengine.models.checkpoints import tiny
from nbengine.models.loading import load_model
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from nbengine.worker.model_runner import ModelRunner
from tests.support.thorough import amount
from tests.unit.worker.conftest import MAX_MODEL_LEN

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


class Ranks:
    """Runners of all ranks of a model, each in a thread that executes the plans it gets, in their order."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        parallel = config.parallel
        self._config = config
        self._num_blocks = num_blocks
        self._world = ThreadWorld(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        count = parallel.world_size
        self._plans: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._outputs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
        self._sampling = range(count - parallel.tensor_parallel_size, count)
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def running(self) -> Iterator[Ranks]:
        self._thread.start()
        try:
            yield self
        finally:
            for plans in self._plans:
                plans.put(None)
            self._thread.join()

    def execute(self, plan: SchedulerOutput) -> None:
        for plans in self._plans:
            plans.put(pickle.dumps(plan))

    def output(self) -> ModelRunnerOutput:
        """Return the output of the oldest plan that has not been asked for; all ranks that sample have the
        same."""
        outputs = [self._take(rank) for rank in range(len(self._outputs))]
        for rank, output in enumerate(outputs):
            if rank not in self._sampling:
                assert not output.req_ids
        sampled = [outputs[rank] for rank in self._sampling]
        assert all(other.sampled_token_ids == sampled[0].sampled_token_ids for other in sampled)
        assert all(other.logprobs == sampled[0].logprobs for other in sampled)
        assert all(other.faults == sampled[0].faults for other in sampled)
        return sampled[0]

    def _take(self, rank: int) -> ModelRunnerOutput:
        output = self._outputs[rank].get(timeout=60)
        if isinstance(output, BaseException):
            raise output
        assert isinstance(output, ModelRunnerOutput)
        return output

    def _run(self) -> None:
        try:
            self._world.run(self._serve)
        except BaseException as error:  # noqa: BLE001  # the caller that waits for an output gets it
            for outputs in self._outputs:
                outputs.put(error)

    def _serve(self, parallel: ParallelState) -> None:
        config, rank = self._config, parallel.layout.rank
        model = load_model(config.model, CPU, torch.float32, None, parallel)
        runner = ModelRunner(config, model, CPU, torch.float32, parallel=parallel)
        runner.initialize_kv_cache(self._num_blocks, MAX_MODEL_LEN)
        while (plan := self._plans[rank].get()) is not None:
            output: ModelRunnerOutput | AsyncModelRunnerOutput | None
            output = runner.execute_model(pickle.loads(plan))
            self._outputs[rank].put(runner.sample_tokens() if output is None else output)


@dataclass
class Result:
    """The result of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)
    prompt_logprobs: LogprobsLists | None = None
    pooled: Any = None
    error: str | None = None

    def take(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.new_prompt_logprobs is not None:
            self.prompt_logprobs = output.new_prompt_logprobs
        if output.pooling_output is not None:
            self.pooled = output.pooling_output
        self.error = output.error


@dataclass(frozen=True)
class Arrival:
    """A request of one of `KINDS`, and after how many answered steps it comes and is aborted, if it is."""

    name: str
    kind: str
    step: int = 0
    abort_step: int | None = None


class Engine:
    """The loop of an engine core around ranks: at random plans ahead or waits for the oldest step."""

    groups = ONE_GROUP

    def __init__(self, config: EngineConfig, num_blocks: int, seed: int = 0) -> None:
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            num_blocks,
            MAX_MODEL_LEN,
            options=SchedulerOptions(num_stages=config.parallel.pipeline_parallel_size, groups=self.groups),
        )
        self._depth = config.parallel.pipeline_parallel_size
        self._ranks = Ranks(config, num_blocks)
        self._random = random.Random(seed)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._results: dict[str, Result] = {}
        self.most_in_flight = 0

    def run(self, arrivals: list[Arrival]) -> dict[str, Result]:
        pending = deque(sorted(arrivals, key=lambda arrival: arrival.step))
        num_answered = 0
        with self._ranks.running():
            while pending or self._in_flight or self.scheduler.has_requests():
                while pending and (pending[0].step <= num_answered or not self.scheduler.has_requests()):
                    self._add(pending.popleft())
                for arrival in arrivals:
                    if arrival.abort_step is not None and arrival.abort_step <= num_answered:
                        self.scheduler.finish_requests(arrival.name, RequestStatus.FINISHED_ABORTED)
                if not self._plans_ahead():
                    self._answer()
                    num_answered += 1
        return self._results

    def _add(self, arrival: Arrival) -> None:
        wire = request_of(arrival)
        data = None if wire.prompt_embeds is None else memoryview(wire.prompt_embeds.numpy().tobytes())
        hasher = self.scheduler.kv_cache_manager.block_hasher
        self.scheduler.add_request(Request.from_engine_core_request(wire, hasher, data))
        self._results[arrival.name] = Result()

    def _plans_ahead(self) -> bool:
        if len(self._in_flight) == self._depth or (self._in_flight and self._random.random() < 0.2):
            return False
        plan = self.scheduler.schedule()
        self._ranks.execute(plan)
        self._in_flight.append(plan)
        num_computing = sum(1 for step in self._in_flight if step.num_scheduled_tokens)
        self.most_in_flight = max(self.most_in_flight, num_computing)
        return True

    def _answer(self) -> None:
        by_client = self.scheduler.update_from_output(self._in_flight.popleft(), self._ranks.output())
        for outputs in by_client.values():
            for output in outputs.outputs:
                self._results[output.request_id].take(output)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


SHARED = prompt_of(17, 99)
POOLED = PoolingParams(task="embed", pooling="mean", normalize=True)
KINDS: dict[str, tuple[list[int] | None, SamplingParams | None]] = {
    "greedy": (prompt_of(7, 0), GREEDY),
    "long": (prompt_of(60, 1), GREEDY),
    "one token": (prompt_of(5, 2), SamplingParams(temperature=0, max_tokens=1)),
    "prefix": ([*SHARED, 1, 2, 3], GREEDY),
    "same prefix": ([*SHARED, 4, 5, 6], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)),
    "seeded": (prompt_of(9, 3), SamplingParams(seed=5, max_tokens=16, top_p=0.9)),
    "unseeded": (prompt_of(4, 4), SamplingParams(temperature=1.5, max_tokens=9, top_k=40)),
    "penalties": (
        prompt_of(6, 5),
        SamplingParams(
            temperature=0, max_tokens=24, repetition_penalty=1.4, frequency_penalty=0.6, ignore_eos=True
        ),
    ),
    "logprobs": (
        prompt_of(30, 6),
        SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    ),
    "constraints": (
        prompt_of(5, 7),
        SamplingParams(
            seed=8,
            max_tokens=12,
            min_tokens=4,
            allowed_token_ids=list(range(9)),
            logit_bias={3: 2.0},
            bad_words_token_ids=[[3], [1, 2]],
        ),
    ),
    "embeds": (None, GREEDY),
    "pooled": (prompt_of(21, 8), None),
    "aborted": (prompt_of(8, 9), SamplingParams(seed=1, max_tokens=60, ignore_eos=True)),
}
EVERYTHING = [Arrival(kind, kind, step) for step, kind in enumerate(KINDS) if kind != "aborted"]


def request_of(arrival: Arrival) -> EngineCoreRequest:
    prompt, params = KINDS[arrival.kind]
    wire = EngineCoreRequest(arrival.name, prompt, params, arrival_time=0.0)
    if prompt is None:
        wire.prompt_embeds = torch.randn(19, 64, generator=torch.Generator().manual_seed(1))
    if params is None:
        wire.pooling_params = POOLED
    return wire


@pytest.fixture(scope="module")
def five_layers(tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model of 4 heads, 2 KV heads and 5 layers: stages of two have 3 and 2, those of four 2, 1, 1 and 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny._CONFIG, "num_hidden_layers", 5)
        directory = tiny.random_tiny(tmp_path_factory.mktemp("models"), seed=3)
    weights = (str(directory / "model.safetensors"),)
    model = replace(tiny_config.model, directory=str(directory), weights=weights)
    return replace(tiny_config, model=model)


@pytest.fixture(scope="module")
def expected(five_layers: EngineConfig) -> dict[str, Result]:
    """Compute the results of one rank, one step at a time, with room for all."""
    engine = Engine(five_layers, 400)
    results = engine.run(EVERYTHING)
    assert engine.most_in_flight == 1
    return results


def check(found: dict[str, Result], expected: dict[str, Result]) -> None:
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        assert found[name].tokens == result.tokens, name
        for rows, others in zip(found[name].logprobs, result.logprobs, strict=True):
            assert rows.logprob_token_ids == others.logprob_token_ids
            np.testing.assert_allclose(rows.logprobs, others.logprobs, atol=1e-4)
        assert (found[name].prompt_logprobs is None) == (result.prompt_logprobs is None)
        if result.prompt_logprobs is not None and (rows := found[name].prompt_logprobs) is not None:
            assert rows.logprob_token_ids == result.prompt_logprobs.logprob_token_ids
            np.testing.assert_allclose(rows.logprobs, result.prompt_logprobs.logprobs, atol=1e-4)
        if result.pooled is not None:
            np.testing.assert_allclose(found[name].pooled, result.pooled, atol=1e-5)


def divided(config: EngineConfig, tp_size: int, pp_size: int, **scheduler: Any) -> EngineConfig:
    return replace(
        config,
        parallel=ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size),
        scheduler=replace(config.scheduler, **scheduler),
    )


@pytest.mark.parametrize(
    ("tp_size", "pp_size"),
    amount([(4, 1), (2, 2), (1, 5)], thorough=[(2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (1, 5)]),
)
def test_divided_runners_give_what_one_runner_gives(
    five_layers: EngineConfig, expected: dict[str, Result], tp_size: int, pp_size: int
) -> None:
    """Every kind of request, in chunks, with preemptions and prefix hits, and as many steps in flight as stages."""
    config = divided(five_layers, tp_size, pp_size, max_num_batched_tokens=24, max_num_seqs=6)
    engine = Engine(config, 24, seed=tp_size * pp_size)
    check(engine.run(EVERYTHING), expected)
    assert engine.most_in_flight == pp_size
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.make_stats().prefix_cache_hits > 0


@pytest.mark.parametrize("seed", range(amount(2, thorough=4)))
def test_requests_that_are_aborted_with_steps_in_flight_do_not_disturb_the_others(
    five_layers: EngineConfig, expected: dict[str, Result], seed: int
) -> None:
    rng = random.Random(seed)
    doomed = []
    for number in range(12):
        begin = rng.randrange(20)
        doomed.append(Arrival(f"doomed {number}", "aborted", begin, begin + rng.randrange(12)))
    config = divided(five_layers, 1, 3, max_num_batched_tokens=rng.choice([5, 30]))
    engine = Engine(config, rng.choice([30, 60]), seed)
    found = engine.run([*EVERYTHING, *doomed])
    check({name: result for name, result in found.items() if name in expected}, expected)
