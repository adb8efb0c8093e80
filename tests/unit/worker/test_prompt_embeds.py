"""Prompts given as embeddings, in the model runner: against transformers, whatever the plans look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from nbengine.sampling_params import SamplingParams
from tests.support.thorough import some

GREEDY = SamplingParams(temperature=0)
Generate = Callable[..., list[int]]


@pytest.fixture(scope="session")
def generate(tiny_directory: Path) -> Generate:
    """transformers' greedy generation from embeddings."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tiny_directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None

    def run(embeds: Tensor, count: int, **options: float) -> list[int]:
        mask = torch.ones(1, len(embeds), dtype=torch.int64)
        tokens = model.generate(
            inputs_embeds=embeds[None],
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=count,
            **options,
        )
        return tokens[0].tolist()

    return run


def random_embeds(count: int, seed: int = 0) -> list[Tensor]:
    generator, random = torch.Generator().manual_seed(seed), Random(seed)
    return [torch.randn(random.randint(1, 40), 64, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("seed", some(range(4), ordinary=2))
def test_greedy_tokens_are_those_of_transformers_in_chunks_mixed_and_preempted(
    driver, oracle, generate: Generate, seed: int
) -> None:
    run = driver(seed, chaos=1.0)
    given = dict(enumerate(random_embeds(7, seed)))
    random = Random(seed)
    prompts = {f"t{i}": [random.randrange(256) for _ in range(random.randint(1, 40))] for i in range(7)}
    for (index, embeds), (req_id, prompt) in zip(given.items(), prompts.items(), strict=True):
        run.add_embeds(str(index), embeds, GREEDY)
        run.add(req_id, prompt, GREEDY)
    outputs = run.run()
    assert run.num_preemptions > 5
    assert run.max_batch > 3
    for index, embeds in given.items():
        assert outputs[str(index)] == generate(embeds, 8)
    for req_id, prompt in prompts.items():
        tokens = outputs[req_id]
        logits = oracle(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()


def test_the_models_own_embeddings_give_the_tokens_that_the_token_ids_give(driver, new_runner) -> None:
    runner = new_runner()
    table = runner._model.embed_tokens.weight.tensor
    prompts = [[Random(i).randrange(256) for _ in range(5 * i + 1)] for i in range(6)]
    outputs = {}
    for kind in ("tokens", "embeds"):
        run = driver(1, chaos=1.0, runner=runner)
        for index, prompt in enumerate(prompts):
            if kind == "tokens":
                run.add(str(index), prompt, GREEDY)
            else:
                run.add_embeds(str(index), table[prompt], GREEDY)
        outputs[kind] = run.run()
        run.step()
    assert outputs["tokens"] == outputs["embeds"]


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`:UserWarning")
def test_penalties_see_no_tokens_in_a_prompt_of_embeddings(driver, generate: Generate) -> None:
    """A row of zeros would make token 0, which stands in for all of them, less likely."""
    run = driver(2, chaos=1.0)
    bias = dict.fromkeys(range(3), 100.0)
    given = random_embeds(6, seed=5)
    for index, embeds in enumerate(given):
        run.add_embeds(str(index), embeds, SamplingParams(temperature=0, repetition_penalty=1.7), 12)
        limited = SamplingParams(temperature=0, repetition_penalty=1.7, logit_bias=bias)
        run.add_embeds(f"limited {index}", embeds, limited, 1)
    outputs = run.run()
    for index, embeds in enumerate(given):
        assert outputs[str(index)] == generate(embeds, 12, repetition_penalty=1.7)
        biased = {(token,): 100.0 for token in range(3)}
        assert outputs[f"limited {index}"] == generate(embeds, 1, sequence_bias=biased)


def test_embeddings_are_forgotten_with_their_request_and_not_changed_before(driver) -> None:
    run = driver(3, chaos=1.0)
    embeds = random_embeds(8)
    copies = [rows.clone() for rows in embeds]
    for index, rows in enumerate(embeds):
        run.add_embeds(str(index), rows, GREEDY, max_tokens=30)
    batch = run.runner._batch
    for _ in range(25):
        run.step()
        assert batch.prompt_embeds.keys() == batch.row_of.keys() | batch._preempted.keys()
    assert run.num_preemptions
    for req_id in list(run.requests):
        run.abort(req_id)
    run.step()
    assert batch.prompt_embeds == {}
    assert all(map(torch.equal, embeds, copies))


def test_only_steps_that_compute_a_prompt_of_embeddings_build_any(driver) -> None:
    run = driver()
    run.runner._stage._model = spy = _Spy(run.runner._model)
    run.add_embeds("embeds", random_embeds(1)[0], GREEDY)
    run.add("tokens", [1, 2, 3], GREEDY)
    run.run()
    assert spy.given == [True] + [False] * 7


class _Spy:
    """A model that notes whether it is given embeddings."""

    def __init__(self, model) -> None:
        self.model = model
        self.given: list[bool] = []
        self.compute_logits, self.embed, self.config = model.compute_logits, model.embed, model.config

    def step(self, input_ids, positions, kv_caches, attn, inputs_embeds=None, further=None):
        self.given.append(inputs_embeds is not None)
        return self.model.step(input_ids, positions, kv_caches, attn, inputs_embeds, further)
