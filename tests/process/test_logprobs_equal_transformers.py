"""Log probabilities, of prompts and of n completions, are those of transformers in float32, whatever the chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nbengine import LLM, Logprob, SamplingParams
from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOLERANCE = 1e-4
PROMPTS = [
    "The quick brown fox jumps over the lazy dog, and then it does it again and again, until the evening comes",
    "naïve café, 東京, 🙂",
    "Once upon a time",
]
PARAMS = SamplingParams(
    n=2, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=3
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def random_tiny_oracle() -> PreTrainedModel:
    """random-tiny in transformers, float32, from the same files."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = resolve_model(ModelConfig("random-tiny")).directory
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def reference(oracle: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Compute log probabilities, float32 [tokens - 1, vocabulary]: row p is the distribution of token p +
    1."""
    import torch

    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)


def check_entry(entry: dict[int, Logprob], token_id: int, count: int, expected: torch.Tensor) -> None:
    """Check one place: the token itself, then the likeliest ones by rank."""
    tokens = list(entry)
    assert tokens[0] == token_id
    assert all(abs(found.logprob - float(expected[token])) < TOLERANCE for token, found in entry.items())
    own = entry[token_id]
    surely, perhaps = (int((expected > own.logprob + slack).sum()) for slack in (TOLERANCE, -TOLERANCE))
    assert surely + 1 <= (own.rank or 0) <= perhaps
    likeliest = expected.topk(count).values.tolist()
    by_rank = {found.rank: found.logprob for found in entry.values() if (found.rank or 0) <= count}
    assert [by_rank[rank] for rank in range(1, count + 1)] == pytest.approx(likeliest, abs=TOLERANCE)


def check(llm: LLM, oracle: PreTrainedModel) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    outputs = llm.generate(prompts, [PARAMS, plain] * len(PROMPTS), use_tqdm=False)
    for output in outputs[1::2]:
        assert (output.prompt_logprobs, output.outputs[0].logprobs) == (None, None)
        assert output.outputs[0].cumulative_logprob is None
    for output in outputs[::2]:
        prompt_ids, entries = output.prompt_token_ids, output.prompt_logprobs
        assert prompt_ids is not None
        assert entries is not None
        assert (len(entries), entries[0]) == (len(prompt_ids), None)
        for completion in output.outputs:
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids) == 12
            expected = reference(oracle, prompt_ids + completion.token_ids)
            for place, token_id in enumerate(prompt_ids[1:]):
                check_entry(entries[place + 1] or {}, token_id, 3, expected[place])
            sampled = expected[len(prompt_ids) - 1 :]
            for entry, token_id, row in zip(completion.logprobs, completion.token_ids, sampled, strict=True):
                check_entry(entry, token_id, 5, row)
            total = sum(
                entry[t].logprob for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)
            )
            assert completion.cumulative_logprob == pytest.approx(total)
    stats = llm.stats().engines[0]
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 2048},
        {"num_gpu_blocks_override": 9, "max_model_len": 144},
    ],
    ids=["tokens-one-by-one", "chunks-of-7-without-prefix-cache", "whole-prompts", "preemption"],
)
def test_random_tinys_log_probabilities_are_those_of_transformers(
    options: dict[str, Any], random_tiny_oracle: PreTrainedModel
) -> None:
    own_processes = "max_model_len" in options
    options = {"num_gpu_blocks_override": 64, "multiprocess": own_processes, **options}
    with LLM("random-tiny", dtype="float32", **options) as llm:
        check(llm, random_tiny_oracle)
        check(llm, random_tiny_oracle)
        if own_processes:
            assert llm.stats().engines[0].num_preemptions > 0


def test_the_default_models_log_probabilities_in_chunks_are_those_of_transformers(
    smollm2_oracle: PreTrainedModel,
) -> None:
    with LLM(
        "smollm2-135m",
        dtype="float32",
        max_num_batched_tokens=16,
        max_num_seqs=16,
        kv_cache_memory_bytes=256 << 20,
        multiprocess=False,
    ) as llm:
        check(llm, smollm2_oracle)


def test_each_completion_is_what_its_seed_gives_alone() -> None:
    with LLM("random-tiny", num_gpu_blocks_override=64, multiprocess=False) as llm:
        together = llm.generate(PROMPTS, SamplingParams(n=3, seed=11, max_tokens=12), use_tqdm=False)
        for index in range(3):
            alone = llm.generate(PROMPTS, SamplingParams(seed=11 + index, max_tokens=12), use_tqdm=False)
            assert [o.outputs[index].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
        free = llm.generate(PROMPTS[0], SamplingParams(n=3, max_tokens=12), use_tqdm=False)
        assert len({tuple(completion.token_ids) for completion in free[0].outputs}) == 3
