"""Parameters of the sampler through the whole engine, in this process, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nbengine import LLM, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = ["Once upon a time", "aaaa", "The quick brown fox jumps over the lazy dog", "1 2 3 4 5 6 7"]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Few blocks, so that requests are preempted.
    with LLM(
        "random-tiny",
        multiprocess=False,
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=10,
        max_num_batched_tokens=24,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(llm: LLM) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    directory = llm.llm_engine.config.model.directory
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def generate(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        (
            {"logit_bias": {65: 4.0, 66: -2.0}, "repetition_penalty": 1.1},
            {"sequence_bias": [[[65], 4.0], [[66], -2.0]], "repetition_penalty": 1.1},
        ),
        (
            {"allowed_token_ids": list(range(97, 123))},
            {"suppress_tokens": [*range(97), *range(123, 258)]},
        ),
    ],
    ids=["repetition", "favouring repetition", "bias", "allowed"],
)
def test_greedy_tokens_are_those_of_generate(
    llm: LLM, model: PreTrainedModel, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **ours)
    before = llm.stats().engines[0].num_preemptions
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.stats().engines[0].num_preemptions > before
    for output in outputs:
        assert output.prompt_token_ids is not None
        assert output.outputs[0].token_ids == generate(model, output.prompt_token_ids, **theirs)


def test_bad_words_do_not_come_up(llm: LLM) -> None:
    # Tokens are bytes: a pair of letters that the model would write is a bad word of two tokens.
    alphabet = llm.get_tokenizer().encode("abcdefghijklmnopqrstuvwxyz")
    letters: dict[str, Any] = {"allowed_token_ids": alphabet, "ignore_eos": True}
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **letters)
    free = llm.generate(PROMPTS, greedy, use_tqdm=False)
    words = sorted({output.outputs[0].text[place : place + 2] for output in free for place in (0, 5)})
    assert len(words) > 3
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, bad_words=words, **letters)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert len(output.outputs[0].text) == MAX_TOKENS
        assert not any(word in output.outputs[0].text for word in words)
