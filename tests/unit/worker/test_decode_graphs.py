"""Decode steps that are recorded and computed again. There is no GPU: a graph here calls the step again, with what lies
at the places that the step has read when it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from random_models import assert_greedy, random_tokens, save_random

from nbengine import LLM, SamplingParams
from nbengine.config import EngineConfig
from nbengine.models.loading import load_model
from nbengine.models.step_output import StepOutput
from nbengine.worker import decode_graphs
from nbengine.worker import worker as worker_module
from nbengine.worker.batch import static_inputs
from nbengine.worker.batch.static_inputs import MOST_ROWS, padded_rows, padded_tokens
from nbengine.worker.decode_graphs import CudaGraphs, Graph, graph_recorder
from nbengine.worker.memory import budget
from nbengine.worker.model_runner import ModelRunner
from tests.support.thorough import some
from tests.unit.worker.conftest import MAX_MODEL_LEN, NUM_BLOCKS, Driver, Runner

CPU = torch.device("cpu")


class Again:
    """A graph that calls the step again. Its outcome lies where the recording has put it, and is nonsense before."""

    def __init__(self, step: Callable[[], StepOutput]) -> None:
        self._step = step
        self.output = step()
        self.num_replays = 0
        for tensor in self._tensors(self.output):
            tensor.fill_(-7)

    def replay(self) -> None:
        self.num_replays += 1
        for old, new in zip(self._tensors(self.output), self._tensors(self._step()), strict=True):
            old.copy_(new)

    @staticmethod
    def _tensors(output: StepOutput) -> list[torch.Tensor]:
        assert output.logits is not None
        assert output.largest is not None
        return [output.hidden, output.logits, *output.largest]


class Recorder:
    def __init__(self) -> None:
        self.graphs: list[Again] = []
        self.num_forgotten = 0
        self.fails_with: RuntimeError | None = None
        self.num_attempts = 0

    def record(self, step: Callable[[], StepOutput]) -> Graph:
        self.num_attempts += 1
        if self.fails_with is not None:
            raise self.fails_with
        self.graphs.append(Again(step))
        return self.graphs[-1]

    def forget(self) -> None:
        self.num_forgotten += 1

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def runner(tiny_config: EngineConfig, recorder: Recorder) -> ModelRunner:
    model = load_model(tiny_config.model, CPU, torch.float32)
    runner = ModelRunner(tiny_config, model, CPU, torch.float32, recorder=recorder)
    runner.initialize_kv_cache(NUM_BLOCKS, MAX_MODEL_LEN)
    return runner


def requests_to(driver: Driver, num_requests: int = 7) -> dict[str, list[int]]:
    for number in range(num_requests):
        params = SamplingParams(temperature=0, logprobs=2 if number == 3 else None)
        driver.add(f"r{number}", [7 * number + 1, 5, 9 + number][: 1 + number % 3], params, 4 + 2 * number)
    return driver.run()


@pytest.mark.parametrize("seed", some(range(4), ordinary=2))
def test_tokens_are_those_of_steps_that_are_not_recorded(
    runner: ModelRunner, recorder: Recorder, new_runner: Runner, seed: int
) -> None:
    chaos = 0.3 if seed else 0.0
    plain, graphs = Driver(new_runner(), seed, chaos), Driver(runner, seed, chaos)
    assert requests_to(graphs) == requests_to(plain)
    # Products of another number of rows may differ in the last bits.
    for own, other in zip(graphs.logprobs["r3"], plain.logprobs["r3"], strict=True):
        assert own.logprob_token_ids == other.logprob_token_ids
        assert own.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-4)
    assert recorder.num_replays > recorder.num_attempts > 0


def test_a_shape_is_recorded_at_its_second_step_and_once(runner: ModelRunner, recorder: Recorder) -> None:
    driver = Driver(runner)
    driver.add("alone", [1, 2, 3], SamplingParams(temperature=0), 6)
    attempts = []
    for _ in range(6):
        driver.step()
        attempts.append(recorder.num_attempts)
    # The prompt, a first step that is computed as always, and four of one graph.
    assert attempts == [0, 0, 1, 1, 1, 1]
    assert recorder.num_replays == 4


def test_what_cannot_be_recorded_is_computed_as_always_and_said_once(
    runner: ModelRunner, recorder: Recorder, new_runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fails_with = RuntimeError("no room for it")
    expected = requests_to(Driver(new_runner()), 2)
    assert requests_to(Driver(runner), 2) == expected
    assert recorder.num_attempts == 2
    messages = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert len(messages) == 2
    assert all("no room for it" in message for message in messages)


def test_the_graph_that_was_not_used_for_longest_goes(
    runner: ModelRunner, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "MOST_GRAPHS", 2)
    driver, recorded = Driver(runner), []
    # One and two requests are recorded, one is used again, four take the place of two.
    for turn, count in enumerate((1, 2, 1, 4, 1, 2)):
        before = recorder.num_attempts
        for number in range(count):
            driver.add(f"{turn} {number}", [3, 4], SamplingParams(temperature=0), 4)
        driver.run()
        recorded.append(recorder.num_attempts - before)
    assert recorded == [1, 1, 0, 1, 0, 1]
    assert len({tuple(request.output) for request in driver.done.values()}) == 1


def test_steps_are_recorded_on_a_gpu_unless_eager_ones_are_asked_for() -> None:
    gpu = torch.device("cuda", 0)
    assert isinstance(graph_recorder(gpu, enforce_eager=False), CudaGraphs)
    assert graph_recorder(gpu, enforce_eager=True) is None
    assert graph_recorder(CPU, enforce_eager=False) is None


def test_what_graphs_take_is_counted_at_the_start(
    runner: ModelRunner, recorder: Recorder, tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_inputs, "_FEWEST_TOKENS", 16)
    driver = Driver(runner)
    # More shapes than there are, each at least twice: requests of all numbers and lengths.
    for count in range(1, tiny_config.scheduler.max_num_seqs + 1):
        for length in (3, 17, 20):
            for number in range(count):
                driver.add(f"{count} {length} {number}", [3] * length, SamplingParams(temperature=0), 6)
            driver.run()
    taken = sum(tensor.nbytes for graph in recorder.graphs for tensor in graph._tensors(graph.output))
    assert len({graph.output.hidden.shape for graph in recorder.graphs}) > 2
    assert taken <= runner.graph_bytes(MAX_MODEL_LEN, 0) < 4 * taken


def test_the_widest_graph_needs_its_share_of_what_the_largest_step_takes(
    runner: ModelRunner, new_runner: Runner, tiny_config: EngineConfig
) -> None:
    scheduler = tiny_config.scheduler
    share = padded_rows(scheduler.max_num_seqs) / scheduler.max_num_batched_tokens
    between = runner.graph_bytes(MAX_MODEL_LEN, 10**9) - runner.graph_bytes(MAX_MODEL_LEN, 0)
    assert between == pytest.approx(min(1.0, share) * 10**9, abs=1)
    assert new_runner().graph_bytes(MAX_MODEL_LEN, 10**9) == 0


def test_a_gpus_kv_cache_leaves_room_for_graphs(
    runner: ModelRunner, tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "memory_allocated": 1000,
        "max_memory_allocated": 5000,
        "memory_reserved": 6000,
        "mem_get_info": (93_000, 100_000),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    profile = budget.profile_gpu(tiny_config, "GPU 0", runner, torch.device("cuda"), MAX_MODEL_LEN)
    graphs = runner.graph_bytes(MAX_MODEL_LEN, 4000)
    assert graphs > 0
    assert profile == budget.GPUProfile(total=100_000, peak=5000 + graphs, others=1000)


@given(st.integers(1, 400), st.integers(1, 20_000), st.data())
def test_every_step_has_one_of_the_shapes_that_are_counted(
    most_requests: int, most_tokens: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, min(most_requests, MOST_ROWS)))
    longest = data.draw(st.integers(1, most_tokens))
    shapes = static_inputs.padded_shapes(most_requests, most_tokens)
    assert (padded_rows(count), padded_tokens(longest, most_tokens)) in shapes


def test_graphs_are_forgotten_when_the_kv_cache_moves(runner: ModelRunner, recorder: Recorder) -> None:
    driver = Driver(runner)
    driver.add("before", [1, 2, 3], SamplingParams(temperature=0), 6)
    driver.run()
    attempts = recorder.num_attempts
    runner.release_kv_cache()
    assert recorder.num_forgotten == 1
    runner.restore_kv_cache()
    driver.add("after", [1, 2, 3], SamplingParams(temperature=0), 6)
    answers = driver.run()
    assert answers["after"] == answers["before"]
    assert recorder.num_attempts == attempts + 1


@pytest.mark.parametrize("name", ["qwen3 window", "deepseek v2"])
def test_layers_in_several_groups_read_their_own_blocks(
    name: str, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runner(*arguments) -> ModelRunner:
        return ModelRunner(*arguments[:4], recorder=recorder)

    monkeypatch.setattr(worker_module, "ModelRunner", runner)
    case = CASES[name]
    # All three layers are without experts.
    is_dense = {"first_k_dense_replace": 3} if case.kind.startswith("Deepseek") else {}
    settings = case.settings | is_dense
    oracle = save_random(case.kind, settings, tmp_path)
    prompts = [random_tokens(length) for length in (34, 21, 9)]
    sizes = {"dtype": "float32", "max_model_len": 64, "block_size": 8, "kv_cache_memory_bytes": 4 << 20}
    with LLM(str(tmp_path), multiprocess=False, **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(oracle, prompt, output.outputs[0].token_ids)
    assert recorder.num_replays > 4


@given(st.integers(1, MOST_ROWS))
def test_padding_is_less_than_the_requests(count: int) -> None:
    rows = padded_rows(count)
    assert count <= rows < max(2 * count, 2)
    assert padded_rows(rows) == rows
    assert rows >= padded_rows(max(count - 1, 1))


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_tokens_are_padded_to_few_numbers_that_hold_them(longest: int, most: int) -> None:
    longest = min(longest, most)
    tokens = padded_tokens(longest, most)
    assert longest <= tokens <= most
    assert tokens < max(2 * longest, 513)


def test_the_number_of_shapes_is_small() -> None:
    assert len({padded_rows(count) for count in range(1, MOST_ROWS + 1)}) == 17
    assert len({padded_tokens(longest, 1 << 17) for longest in range(1, (1 << 17) + 1, 7)}) <= 9
