"""Log probabilities of sampled and of prompt tokens against transformers, however prompts are cut into chunks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from torch import Tensor

from nbengine.ipc.messages import LogprobsLists
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.batch import prompt_logprobs

TOLERANCE = 1e-4


def check(logits: Tensor, tokens: list[int], top: int, found: LogprobsLists) -> None:
    """Compare with log_softmax of transformers' logits [N, V], which come before `tokens`."""
    expected = logits.double().log_softmax(-1)
    assert (
        len(found.logprob_token_ids) == len(found.logprobs) == len(found.sampled_token_ranks) == len(tokens)
    )
    for row, (token, ids, values, rank) in enumerate(
        zip(tokens, found.logprob_token_ids, found.logprobs, found.sampled_token_ranks, strict=True)
    ):
        assert len(ids) == len(values) == top + 1
        assert ids[0] == token
        best = expected[row].sort(descending=True).values
        for place, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            assert abs(value - expected[row, token_id]) < TOLERANCE
            if place:
                assert abs(value - best[place - 1]) < TOLERANCE
        better = (expected[row] > expected[row, token] + TOLERANCE).sum()
        assert better < rank <= (expected[row] >= expected[row, token] - TOLERANCE).sum()


def random_prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(256) for _ in range(length)]


@pytest.mark.parametrize(
    ("chunk", "chaos"), [(1, 0), (1, 0.1), (3, 0), (3, 0.3), (7, 0), (7, 0.6), (64, 0), (64, 1)]
)
def test_logprobs_are_those_of_transformers(
    driver: Callable, oracle: Callable, chunk: int, chaos: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of five rows, so that a chunk takes several.
    monkeypatch.setattr(prompt_logprobs, "PIECE_BYTES", 5 * 4 * 258)
    random = Random(chunk)
    run = driver(seed=chunk, chaos=chaos, chunk=chunk)
    given = {}
    for index, (length, sampled, of_prompt) in enumerate(
        [(1, 0, 0), (2, None, 3), (40, 5, 20), (33, 20, None), (17, None, 0), (25, None, None), (9, 2, 1)]
    ):
        temperature = 0.0 if index % 2 else 1.3
        params = SamplingParams(
            temperature=temperature,
            seed=index,
            logprobs=sampled,
            prompt_logprobs=of_prompt,
            # They say what the model thinks, whatever is done to the logits.
            presence_penalty=index / 4,
            logit_bias={5: 3.0} if index % 3 else None,
        )
        given[str(index)] = random_prompt(random, length), params
        run.add(str(index), *given[str(index)])
    outputs = run.run()
    assert bool(run.num_preemptions) == bool(chaos)
    for req_id, (prompt, params) in given.items():
        logits = oracle(prompt + outputs[req_id])
        if params.prompt_logprobs is None:
            assert req_id not in run.prompt_logprobs
        else:
            check(logits[: len(prompt) - 1], prompt[1:], params.prompt_logprobs, run.prompt_logprobs[req_id])
        if params.logprobs is not None:
            parts = run.logprobs[req_id]
            joined = LogprobsLists(
                [row for part in parts for row in part.logprob_token_ids],
                [row for part in parts for row in part.logprobs],
                [rank for part in parts for rank in part.sampled_token_ranks],
            )
            check(logits[len(prompt) - 1 : -1], outputs[req_id], params.logprobs, joined)
    assert not run.runner._prompt_logprobs._gatherings


def test_a_preempted_prompt_is_not_looked_at_again(new_runner: Callable, oracle: Callable) -> None:
    runner = new_runner()
    prompt = random_prompt(Random(0), 12)
    seen = []
    compute = runner._prompt_logprobs._compute_logits
    runner._prompt_logprobs._compute_logits = lambda hidden: seen.append(len(hidden)) or compute(hidden)

    def step(count: int, computed: int | None, *, resumed: bool = False) -> LogprobsLists | None:
        cached = CachedRequestData()
        new = []
        if computed is None:
            params = SamplingParams(temperature=0, prompt_logprobs=2)
            new = [NewRequestData("a", prompt, params, [0, 1, 2, 3], 0)]
        else:
            blocks = [0, 1, 2, 3] if resumed else None
            cached = CachedRequestData(["a"], {"a"} if resumed else set(), [blocks], [computed])
        plan = SchedulerOutput(new, cached, {"a": count}, count, set())
        runner.execute_model(plan)
        return (runner.sample_tokens().prompt_logprobs or {}).get("a")

    assert step(5, None) is None
    runner.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, set(), {"a"}))
    assert step(3, 0, resumed=True) is None
    assert step(4, 3) is None
    found = step(5, 7)
    assert seen == [5, 2, 4]
    check(oracle(prompt)[:-1], prompt[1:], 2, found)
    runner.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, set(), {"a"}))
    assert step(13, 0, resumed=True) is None


def test_an_aborted_prompt_is_forgotten(new_runner: Callable) -> None:
    runner = new_runner()
    params = SamplingParams(prompt_logprobs=2)
    new = NewRequestData("a", [1, 2, 3, 4], params, [0], 0)
    runner.execute_model(SchedulerOutput([new], CachedRequestData(), {"a": 2}, 2, set()))
    runner.sample_tokens()
    runner.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, {"a"}))
    assert not runner._prompt_logprobs._gatherings


def test_an_id_that_is_used_again_gets_the_log_probabilities_of_its_own_prompt(
    new_runner: Callable, oracle: Callable
) -> None:
    runner, params = new_runner(), SamplingParams(temperature=0, prompt_logprobs=2)
    first, second = (random_prompt(Random(seed), 9) for seed in (1, 2))
    begun = NewRequestData("a", first, params, [0, 1, 2], 0)
    runner.execute_model(SchedulerOutput([begun], CachedRequestData(), {"a": 4}, 4, set(), set(), {"a"}))
    runner.sample_tokens()
    again = NewRequestData("a", second, params, [3, 4, 5], 0)
    runner.execute_model(SchedulerOutput([again], CachedRequestData(), {"a": 9}, 9, {"a"}))
    check(oracle(second)[:-1], second[1:], 2, runner.sample_tokens().prompt_logprobs["a"])
