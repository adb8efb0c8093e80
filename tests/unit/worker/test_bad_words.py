"""Bad words of several tokens against transformers, in texts of few different tokens, so that words come up."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from nbengine.worker.batch.bad_words import BadWords
from tests.support.thorough import amount

VOCAB, MAX_LEN = 3, 14
texts = st.lists(st.integers(0, VOCAB - 1), max_size=7)
words = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=5), max_size=4)


@settings(max_examples=amount(25, thorough=3000), deadline=None)
@given(rows=st.lists(st.tuples(texts, texts, words, st.booleans()), min_size=1, max_size=5))
def test_a_word_is_completed_by_the_tokens_that_transformers_forbids(
    rows: list[tuple[list[int], list[int], list[list[int]], bool]],
) -> None:
    table = BadWords()
    token_ids = np.full((2 * len(rows), MAX_LEN), 1, np.int32)
    num_tokens, num_prompt = np.zeros((2, 2 * len(rows)), np.int64)
    expected = set()
    for row, (prompt, output, own, moves) in enumerate(rows):
        if own:
            table.add(row, own)
        target = row
        if moves:
            target = row + len(rows)
            table.move(row, target)
        token_ids[target, : len(prompt + output)] = prompt + output
        num_tokens[target], num_prompt[target] = len(prompt + output), len(prompt)
        if own:
            scores = NoBadWordsLogitsProcessor(own)(
                torch.tensor([output], dtype=torch.int64), torch.zeros(1, VOCAB)
            )
            expected |= {(target, token) for token in (scores[0] == -torch.inf).nonzero()[:, 0].tolist()}
    found = table.banned(token_ids, num_tokens, num_prompt)
    assert set(zip(*(column.tolist() for column in found), strict=True)) == expected
    for row in range(2 * len(rows)):
        table.remove(row)
    assert len(table) == 0
