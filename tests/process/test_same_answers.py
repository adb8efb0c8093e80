"""The default model, quantised and in its default type, answers the same alone and in any circumstances."""

from __future__ import annotations

import pytest

from nbengine import LLM, SamplingParams
from tests.support.thorough import amount

PROMPTS = [
    *(
        f"The instructions are: fill it, switch it on, wait, pour, and clean it once a week. How does {thing} work?"
        for thing in ("a kettle", "a bicycle", "an umbrella")
    ),
    *(f"{word} is a word that people use when they speak about" for word in ("Rain", "Bread", "River")),
    "Once upon a time there was a fox who lived near the sea and",
    "Once upon a time there was a king who lived near the sea and",
]
GREEDY = SamplingParams(temperature=0, max_tokens=amount(12, thorough=24), ignore_eos=True, logprobs=1)
Answer = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]

pytestmark = pytest.mark.timeout(300)


def answers(llm: LLM, prompts: list[str]) -> list[Answer]:
    """The tokens and the log-probabilities, bit by bit."""
    found = []
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        steps = tuple(
            tuple((token, entry.logprob) for token, entry in step.items()) for step in completion.logprobs
        )
        found.append((tuple(completion.token_ids), steps))
    return found


def test_alone_together_in_chunks_after_preemption_and_from_the_prefix_cache() -> None:
    with LLM("smollm2-135m", kv_cache_memory_bytes=128 << 20) as llm:
        alone = []
        for prompt in PROMPTS:
            llm.reset_prefix_cache()
            alone += answers(llm, [prompt])
        llm.reset_prefix_cache()
        assert answers(llm, PROMPTS) == alone
        warm = llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
        assert sum(output.num_cached_tokens or 0 for output in warm) > 0
        assert answers(llm, PROMPTS) == alone
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "num_gpu_blocks_override": 90}
    with LLM("smollm2-135m", multiprocess=False, **chunks) as llm:
        assert answers(llm, PROMPTS) == alone
    with LLM("smollm2-135m", multiprocess=False, num_gpu_blocks_override=14, max_model_len=96) as llm:
        assert answers(llm, PROMPTS) == alone
        assert llm.stats().engines[0].num_preemptions > 0
