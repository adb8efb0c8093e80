"""Steps whose tokens arrive on the host late: the same answers, and no waiting where none is needed.

The transfer stands in for a GPU's: until someone waits for it, its copies hold nonsense.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nbengine.engine.core.core import EngineCore
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.ipc.messages import EngineCoreRequest, LogprobsLists
from nbengine.models.checkpoints.tiny import random_tiny
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from nbengine.worker import worker as worker_module
from nbengine.worker.model_runner import ModelRunner
from tests.unit.worker.planted import PLANTER


class LateTransfer:
    """Arrives when it is waited for; `log` has what the worker's thread does, by the number of the transfer."""

    log: list[tuple[str, int]] = []

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sources = [tensor.clone() for tensor in tensors]
        self._copies = [torch.full_like(tensor, -7) for tensor in tensors]
        self.number = sum(kind == "start" for kind, _ in self.log)
        self.is_done = False
        self.log.append(("start", self.number))

    @torch.inference_mode()
    def wait(self) -> Sequence[Tensor]:
        if threading.current_thread().name.startswith("nbengine-worker"):
            self.log.append(("wait", self.number))
        for copy, source in zip(self._copies, self._sources, strict=True):
            copy.copy_(source)
        self.is_done = True
        return self._copies


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("models"), seed=0)


MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCore]:
    cores: list[EngineCore] = []

    def make(
        *, late: bool, num_blocks: int = 64, processors: tuple[str, ...] = (), **scheduler: int
    ) -> EngineCore:
        def runner(*arguments) -> ModelRunner:
            return ModelRunner(*arguments[:4], LateTransfer if late else None)

        monkeypatch.setattr(worker_module, "ModelRunner", runner)
        LateTransfer.log = []
        config = EngineConfig(
            model=ModelConfig(
                "random-tiny",
                device="cpu",
                dtype="float32",
                directory=str(directory),
                weights=(str(directory / "model.safetensors"),),
                max_model_len=96,
                logits_processors=processors,
            ),
            cache=CacheConfig(block_size=16, num_gpu_blocks_override=num_blocks),
            scheduler=SchedulerConfig(**{"max_num_seqs": 6, "async_scheduling": late, **scheduler}),
        )
        cores.append(EngineCore(config, UniProcExecutor))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def test_a_row_without_numbers_ends_its_request_alone_while_its_next_token_is_in_flight(
    make_core: MakeCore,
) -> None:
    prompts = {name: [20 * place] for place, name in enumerate("abcdef", 1)}
    expected = tokens_of(
        make_core(late=False), {name: (prompt, greedy()) for name, prompt in prompts.items()}
    )
    core = make_core(late=True, max_num_seqs=4, processors=(PLANTER,))
    choice = StructuredOutputsParams(choice=["yes", "no"])
    doomed = {
        "nan": greedy(extra_args={"plant": [3, "nan"]}),
        "drawn": SamplingParams(seed=1, max_tokens=8, extra_args={"plant": [0, "nan"]}),
        "nothing": greedy(extra_args={"plant": [1, "nothing"]}),
        "contradiction": SamplingParams(
            temperature=0, structured_outputs=choice, allowed_token_ids=[ord("Q")], eos_token_id=1
        ),
    }
    answers, errors = {}, {}
    for name in "abc":
        add(core, name, prompts[name], greedy())
    for name, params in doomed.items():
        add(core, name, [50, 51], params)
    for name in "def":
        add(core, name, prompts[name], greedy())
    answers = run(core, errors)
    assert {name: answers[name][0] for name in prompts} == expected
    assert errors.keys() == doomed.keys()
    assert "NaN or infinity for token 4 of the output" in errors["nan"]
    assert "NaN or infinity for token 1 of the output" in errors["drawn"]
    assert "no token is left for token 2 of the output" in errors["nothing"]
    assert errors["contradiction"].endswith("structured_outputs and allowed_token_ids forbid every one")
    assert len(answers["nan"][0]) == 3


def test_a_token_that_could_not_be_sampled_is_the_input_of_none_that_counts(make_core: MakeCore) -> None:
    expected = tokens_of(make_core(late=False), {"a": ([20], greedy())})
    core = make_core(late=True)
    errors: dict[str, str] = {}
    add(core, "a", [20], greedy())
    add(core, "doomed", [30], greedy(allowed_token_ids=[81], bad_words_token_ids=[[81]]))
    answers = run(core, errors)
    # The step after the first was executed before anybody saw what the first had sampled.
    assert LateTransfer.log.index(("start", 1)) < LateTransfer.log.index(("wait", 0))
    assert {"a": answers["a"][0], "doomed": answers["doomed"][0]} == {**expected, "doomed": []}
    assert errors["doomed"].endswith("allowed_token_ids and bad_words forbid every one")


def add(core: EngineCore, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    core.add_request(*core.preprocess_add_request(EngineCoreRequest(request_id, prompt, params)))


Answers = dict[str, tuple[list[int], list[LogprobsLists], list[LogprobsLists]]]


def run(core: EngineCore, errors: dict[str, str] | None = None) -> Answers:
    """Step until everything has ended; `errors` gets those of requests that fail."""
    answers: Answers = {}
    while core.has_work():
        outputs, executed = core.step_fn()
        core.post_step(executed)
        for batch in outputs.values():
            for output in batch.outputs:
                tokens, logprobs, prompt_logprobs = answers.setdefault(output.request_id, ([], [], []))
                tokens += output.new_token_ids
                if errors is not None and output.error is not None:
                    errors[output.request_id] = output.error
                logprobs += [output.new_logprobs] if output.new_logprobs is not None else []
                prompt_logprobs += (
                    [output.new_prompt_logprobs] if output.new_prompt_logprobs is not None else []
                )
    assert core.stats().num_free_blocks == core.num_blocks
    return answers


def mixed_requests(core: EngineCore) -> None:
    """Requests that come, go, move and grow at different times, with everything that reads earlier tokens."""
    rng = random.Random(3)
    for number in range(20):
        prompt = [rng.randrange(4, 250) for _ in range(rng.randrange(1, 50))]
        options = [
            {},
            {"temperature": 0.8, "seed": number, "logprobs": 2},
            {"repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"bad_words_token_ids": [[5, 6], [9]]} if number > 9 else {"prompt_logprobs": 1},
            {"stop_token_ids": list(range(0, 250, 9)), "min_tokens": 3},
        ][number % 5]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 30), ignore_eos=True)
        for name, value in options.items():
            setattr(params, name, value)
        add(core, f"r{number}", prompt, params)


@pytest.mark.parametrize(
    "limits",
    [{}, {"num_blocks": 9, "max_num_batched_tokens": 20}],
    ids=["roomy", "tight"],
)
def test_answers_are_the_same_as_when_tokens_are_there_at_once(
    make_core: MakeCore, limits: dict[str, int]
) -> None:
    expected_core = make_core(late=False, **limits)
    mixed_requests(expected_core)
    expected = run(expected_core)
    core = make_core(late=True, **limits)
    mixed_requests(core)
    found = run(core)
    assert {name: answer[0] for name, answer in found.items()} == {
        name: answer[0] for name, answer in expected.items()
    }
    for name, (_, *logprobs) in found.items():
        for rows, others in zip(logprobs, expected[name][1:], strict=True):
            assert [row.logprob_token_ids for row in rows] == [row.logprob_token_ids for row in others]
            for row, other in zip(rows, others, strict=True):
                assert np.allclose(row.logprobs, other.logprobs, atol=1e-5)
    assert (core.scheduler.num_preemptions > 0) == ("num_blocks" in limits)


def test_the_next_step_is_executed_before_the_tokens_of_one_are_waited_for(make_core: MakeCore) -> None:
    core = make_core(late=True)
    for number in range(3):
        add(core, f"r{number}", [10 + number], SamplingParams(temperature=0.0, max_tokens=5 + number))
    run(core)
    log = LateTransfer.log
    assert ("wait", 4) in log
    for number in range(log[-1][1]):
        assert log.index(("start", number + 1)) < log.index(("wait", number))


def test_a_request_that_takes_over_an_id_does_not_get_tokens_in_flight(make_core: MakeCore) -> None:
    core = make_core(late=True)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    add(core, "r", [30, 31], params)
    add(core, "other", [40], params)
    core.step_fn()
    core.abort_for_client(0, ["r"])
    add(core, "r", [50, 51, 52], params)
    answers = run(core)
    alone = make_core(late=False)
    add(alone, "r", [50, 51, 52], params)
    assert answers["r"] == run(alone)["r"]


def tokens_of(
    core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]]
) -> dict[str, list[int]]:
    for name, (prompt, params) in requests.items():
        add(core, name, prompt, params)
    return {name: answer[0] for name, answer in run(core).items()}


def greedy(**more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **more)


def test_rows_that_change_places_keep_their_tokens_in_flight(make_core: MakeCore) -> None:
    prompts = {name: [20 * place] for place, name in enumerate("abcdef", 1)}
    free = tokens_of(make_core(late=False), {name: (prompt, greedy()) for name, prompt in prompts.items()})
    stops = {"a": [free["a"][2]], "b": [free["b"][4]]}
    requests = {name: (p, greedy(stop_token_ids=stops.get(name, []))) for name, p in prompts.items()}
    expected = tokens_of(make_core(late=False, max_num_seqs=3), requests)
    assert len(expected["a"]) <= 3
    assert tokens_of(make_core(late=True, max_num_seqs=3), requests) == expected


def test_a_bad_word_is_held_back_when_its_beginning_was_in_flight(make_core: MakeCore) -> None:
    free = tokens_of(make_core(late=False), {"r": ([20], greedy())})["r"]
    params = greedy()
    params.bad_words_token_ids = [free[:2]]
    kept = tokens_of(make_core(late=True), {"r": ([20], params)})["r"]
    assert kept == tokens_of(make_core(late=False), {"r": ([20], params)})["r"]
    assert kept[0] == free[0]
    assert kept[1] != free[1]
