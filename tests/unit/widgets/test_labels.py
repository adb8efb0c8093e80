"""A request is known by the end of what was asked, whatever the template around it."""

from __future__ import annotations

import pytest

from nbengine.widgets.dashboard.labels import MOST_LABEL, last_words, tail


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy is it blue?<|im_end|>\n<|im_start|>assistant\n",
         "Why is it blue?"),
        ("<s>[INST] Name a river [/INST]", "Name a river"),
        ("<bos><start_of_turn>user\nName a sea<end_of_turn>\n<start_of_turn>model\n", "Name a sea"),
        ("<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "Count"),
        ("Once upon a time", "Once upon a time"),
        ("first line\nlast   line\n", "last line"),
        ("a < b and c > d", "a < b and c > d"),
        ("", ""),
        ("<|im_start|>assistant\n", ""),
    ],
)  # fmt: skip
def test_the_last_words_are_the_users(prompt: str, words: str) -> None:
    assert last_words(prompt) == words


def test_only_the_end_of_a_long_text_is_kept() -> None:
    text = " ".join(str(number) for number in range(1000))
    kept = tail(text)
    assert len(kept) == MOST_LABEL
    assert kept.startswith("…")
    assert text.endswith(kept[1:])
    assert tail("a\n b\tc") == "a b c"
