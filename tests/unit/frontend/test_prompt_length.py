"""Prompts that cannot fit are refused before anything expensive is done with them, and no others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nbengine.errors import InvalidArgumentError
from nbengine.frontend.requests.beside_loop import beside_loop
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.prompt_length import LONG_TEXT, PromptLimit, TextEncoder, most_bytes_of_token
from nbengine.frontend.text.chat import render_chat
from nbengine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_STOP_STRINGS,
    MAX_TEXT_CHARACTERS,
    MAX_TOKEN_IDS,
    SamplingParams,
)
from tests.support.thorough import amount
from tests.unit.frontend.conftest import MAX_MODEL_LEN, byte_fallback_tokenizer, byte_level_tokenizer

HUGE = "the quick brown fox " * 500_000


class NoTokens(Exception):
    """A text is tokenized that should not be."""


@pytest.fixture
def blind(input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> InputProcessor:
    """An input processor that fails where it tokenizes."""

    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise NoTokens(name)

    monkeypatch.setattr(input_processor.encoder, "tokenizer", Untouchable())
    return input_processor


@pytest.mark.parametrize("prompt", [HUGE, {"prompt": HUGE}])
def test_ten_megabytes_are_refused_without_being_tokenized(blind: InputProcessor, prompt: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"prompt must be at most 63 tokens long .*, got at least \d+$"
    ):
        blind.process_inputs("r", prompt, SamplingParams())


def test_ten_million_token_ids_are_refused_without_a_look_at_them(input_processor: InputProcessor) -> None:
    class Unseen(list[int]):
        def __len__(self) -> int:
            return 10**7

        def __iter__(self) -> Any:
            raise NoTokens

    for prompt in (Unseen(), {"prompt_token_ids": Unseen()}):
        with pytest.raises(InvalidArgumentError, match=r"at most 63 tokens long .*, got 10000000"):
            input_processor.process_inputs("r", prompt, SamplingParams())


def test_what_is_to_be_cut_may_be_of_any_length(input_processor: InputProcessor) -> None:
    text = HUGE[:200_000]
    whole = input_processor.encoder.encode(text)
    request = input_processor.process_inputs("r", text, SamplingParams(truncate_prompt_tokens=5))
    assert request.prompt_token_ids == whole[-5:]


def test_a_conversation_that_cannot_fit_is_refused_like_a_prompt(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [{"role": "user", "content": HUGE}]
    limit = PromptLimit(MAX_MODEL_LEN, "short")
    with pytest.raises(InvalidArgumentError, match="prompt must be short, got at least"):
        render_chat(tokenizer, messages, limit=limit)


TOKENIZERS = {"byte level": byte_level_tokenizer(), "byte fallback": byte_fallback_tokenizer()}


@settings(max_examples=amount(15, thorough=600))
@given(
    text=st.text(max_size=200)
    | st.sampled_from(["the ", "🙂", " ", "\x00", "東京", "dog"]).map(lambda s: s * 50)
)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_text_has_fewer_tokens_than_it_is_said_to_have_at_least(kind: str, text: str) -> None:
    encoder = TextEncoder(TOKENIZERS[kind])
    assert encoder._most_bytes is not None
    assert encoder.least_tokens(text) <= len(encoder.encode(text))


def _stripping(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def _normalizing(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def _splitting(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@pytest.mark.parametrize("change", [_stripping, _normalizing, _splitting])
def test_nothing_is_known_of_a_tokenizer_that_may_lose_text(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level_tokenizer()
    assert most_bytes_of_token(tokenizer)
    change(tokenizer)
    assert most_bytes_of_token(tokenizer) is None


def test_nothing_is_known_of_words_that_may_be_of_any_length() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert most_bytes_of_token(tokenizer) is None
    assert TextEncoder(tokenizer).encode("b" * 10**5, PromptLimit(5, "short")) == [0]


def test_long_texts_have_the_same_tokens_as_short_ones() -> None:
    tokenizer = byte_level_tokenizer()
    text = HUGE[: 2 * LONG_TEXT]
    assert TextEncoder(tokenizer).encode(text) == tokenizer.encode(text).ids


def test_work_on_a_long_text_leaves_the_loop_to_others_and_short_texts_do_not_wait() -> None:
    async def main() -> None:
        goes_on = threading.Event()
        asyncio.get_running_loop().call_soon(goes_on.set)
        # Only the loop can end this wait.
        assert await beside_loop("x" * LONG_TEXT, lambda: goes_on.wait(60))
        here = await beside_loop({"prompt": "short"}, threading.current_thread)
        assert here is threading.current_thread()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        ("stop", MAX_STOP_STRINGS, ["a"] * 10**5),
        ("bad_words", MAX_BAD_WORDS, ["a"] * 10**5),
        ("stop_token_ids", MAX_TOKEN_IDS, [1] * (MAX_TOKEN_IDS + 1)),
        ("allowed_token_ids", MAX_TOKEN_IDS, [1] * (MAX_TOKEN_IDS + 1)),
        ("logit_bias", MAX_TOKEN_IDS, dict.fromkeys(range(MAX_TOKEN_IDS + 1), 1.0)),
    ],
)
def test_lists_have_a_limit_that_is_checked_first(name: str, most: int, more: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} must be at most {most} .*, got {len(more)}"):
        SamplingParams(**{name: more})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_have_a_limit_together(name: str) -> None:
    SamplingParams(**{name: ["x" * MAX_TEXT_CHARACTERS]})
    with pytest.raises(
        InvalidArgumentError, match=f"{name} must be of at most {MAX_TEXT_CHARACTERS} characters"
    ):
        SamplingParams(**{name: ["x" * MAX_TEXT_CHARACTERS, "y"]})
