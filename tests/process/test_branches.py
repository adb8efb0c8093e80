"""Branches of a real answer: what the model says behind their token, with what stood before from the prefix cache."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from nbengine import AsyncLLM, RequestOutput, SamplingParams
from nbengine.config import ModelConfig
from nbengine.errors import NBEngineError
from nbengine.magics.tokens.branch import Branch
from nbengine.magics.tokens.branching import BranchTree
from nbengine.models.checkpoints.files import resolve_model

PROMPT = "The capital of France is a city that is known for its museums"
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5)
BLOCK = 16
TOLERANCE = 1e-4

IsGreedy = Callable[[list[int], list[int]], bool]


@pytest.fixture(scope="module")
def is_greedy() -> IsGreedy:
    """Return a check that tokens are what greedy decoding with transformers gives behind others, up to
    rounding."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = resolve_model(ModelConfig("random-tiny")).directory
    oracle = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def check(before: list[int], token_ids: list[int]) -> bool:
        with torch.inference_mode():
            logits = oracle(torch.tensor([before + token_ids])).logits[0, len(before) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
        return bool((chosen >= logits.max(-1).values - TOLERANCE).all())

    return check


async def whole(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """Return the whole text of an answer."""
    outputs = [output async for output in llm.generate(prompt, params)]
    return outputs[-1]


async def ended(branch: Branch) -> Branch:
    async with asyncio.timeout(60):
        return await branch


def second_choice(branch: Branch, position: int) -> int:
    """The alternative that was not taken."""
    assert branch.logprobs is not None
    return list(branch.logprobs[position])[1 if position % 2 else 2]


async def test_a_branch_is_what_greedy_decoding_gives_behind_its_token(is_greedy: IsGreedy) -> None:
    llm = AsyncLLM("random-tiny", dtype="float32", num_gpu_blocks_override=256)
    try:
        output = await whole(llm, PROMPT, PARAMS)
        prompt_ids = output.prompt_token_ids or []
        tree = BranchTree.of(llm, output, PARAMS)
        root = tree[0]
        assert is_greedy(prompt_ids, root.token_ids)
        assert not is_greedy(prompt_ids, [root.token_ids[0], root.token_ids[1] ^ 1])

        # All at once, and one branch of a branch.
        branches = [root.branch(position, second_choice(root, position)) for position in (0, 5, 24, 39)]
        branches = [await ended(branch) for branch in branches]
        branches.append(await ended(branches[1].branch(20, second_choice(branches[1], 20))))
        for branch in branches:
            position, parent = branch.position or 0, branch.parent
            assert parent is not None
            assert branch.token_ids[: position + 1] == [*parent.token_ids[:position], branch.token_id]
            assert branch.token_id != parent.token_ids[position]
            assert (len(branch.token_ids), branch.finish_reason) == (40, "length")
            before = [*prompt_ids, *branch.token_ids[: position + 1]]
            if position < 39:
                assert is_greedy(before, branch.token_ids[position + 1 :])
                # Every full block before the new token was computed by others: the prompt's and the parent's.
                assert branch.num_cached_tokens == (len(before) - 1) // BLOCK * BLOCK
            # Its tokens are bytes, so that most of these cuts are within a character.
            assert branch.text == llm.get_tokenizer().decode(branch.token_ids, skip_special_tokens=True)
            assert branch.logprobs is not None
            assert [next(iter(entry)) for entry in branch.logprobs] == branch.token_ids
            assert not any(math.isnan(next(iter(entry.values())).logprob) for entry in branch.logprobs)
        assert branches[-1].path == [root, branches[1], branches[-1]]
        assert len(tree.leaves) == 4

        eos = llm.get_tokenizer().eos_token_id
        stopping = BranchTree.of(llm, output, SamplingParams(temperature=0, max_tokens=40))
        stopped = await ended(stopping.branch(10, eos))
        assert (stopped.finish_reason, stopped.token_ids[10:]) == ("stop", [eos])

        # The engine is paused, so that the branch cannot have ended when it is cancelled.
        await llm.pause_generation("keep", clear_cache=False)
        cancelled = BranchTree.of(llm, output, PARAMS).branch(1, 99)
        cancelled.cancel()
        assert (await ended(cancelled)).finish_reason == "abort"
        await llm.resume_generation()

        salted = await whole(llm, {"prompt": PROMPT[::-1], "cache_salt": "s"}, PARAMS)
        reused = [
            (
                await ended(BranchTree.of(llm, salted, PARAMS, cache_salt=salt).branch(30, 99))
            ).num_cached_tokens
            for salt in ("s", None)
        ]
        assert reused == [(len(PROMPT) + 30) // BLOCK * BLOCK, 0]
        stats = await llm.stats()
        assert stats.engines[0].num_free_blocks == stats.engines[0].num_blocks
    finally:
        llm.shutdown()
    with pytest.raises(NBEngineError):
        root.branch(1, 98)
