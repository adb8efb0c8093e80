"""Log probabilities: rows of the engine core to what callers see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nbengine.frontend.outputs.logprobs import LogprobsProcessor, TokenTexts
from nbengine.ipc.messages import LogprobsLists
from nbengine.outputs import Logprob
from nbengine.sampling_params import SamplingParams

valid_text = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), min_size=1, max_size=30
)


def sampled_rows(token_ids: list[int], others: list[int] | None = None) -> LogprobsLists:
    return LogprobsLists(
        [[token_id, *(others or ())] for token_id in token_ids],
        [[-0.5 * position for position in range(1 + len(others or ()))] for _ in token_ids],
        [1] * len(token_ids),
    )


def decoded(entries: list[dict[int, Logprob] | None]) -> list[str | None]:
    """The decoded tokens in whose places the entries are."""
    return [next(iter(entry.values())).decoded_token for entry in entries if entry is not None]


def test_an_entry_begins_with_the_token_and_its_own_rank_then_come_the_likeliest_by_rank() -> None:
    processor = LogprobsProcessor(None, SamplingParams(logprobs=3))
    rows = LogprobsLists(
        [[7, 4, 5, 6], [5, 4, 5, 6]], [[-9.0, -1.0, -2.0, -3.0], [-2.0, -1.0, -2.0, -3.0]], [12, 3]
    )
    processor.update(rows, 2)
    far, near = processor.take() or []
    assert list(far.items()) == [
        (7, Logprob(-9.0, 12)),
        (4, Logprob(-1.0, 1)),
        (5, Logprob(-2.0, 2)),
        (6, Logprob(-3.0, 3)),
    ]
    # Among the likeliest itself, but with as many at least as likely as its own rank says.
    assert list(near.items()) == [(5, Logprob(-2.0, 3)), (4, Logprob(-1.0, 1)), (6, Logprob(-3.0, 3))]
    assert processor.cumulative_logprob == -11.0


def test_what_was_taken_is_not_taken_again_and_the_sum_goes_on() -> None:
    processor = LogprobsProcessor(None, SamplingParams(logprobs=0))
    processor.update(LogprobsLists([[1], [2]], [[-1.0], [-2.0]], [1, 1]), 2)
    assert processor.take() == [{1: Logprob(-1.0, 1)}, {2: Logprob(-2.0, 1)}]
    assert processor.take() == []
    processor.update(LogprobsLists([[3], [4]], [[-4.0], [-8.0]], [2, 2]), 1)
    assert processor.take() == [{3: Logprob(-4.0, 2)}]
    assert processor.cumulative_logprob == -7.0


def test_only_what_was_asked_for_is_given() -> None:
    only_prompt = LogprobsProcessor(None, SamplingParams(prompt_logprobs=0))
    only_prompt.update_prompt(LogprobsLists([[2]], [[-1.0]], [4]), [1, 2])
    assert only_prompt.take() is None
    assert only_prompt.cumulative_logprob is None
    assert only_prompt.take_prompt() == [None, {2: Logprob(-1.0, 4)}]
    assert only_prompt.take_prompt() is None
    only_samples = LogprobsProcessor(None, SamplingParams(logprobs=0))
    assert only_samples.take_prompt() is None
    assert only_samples.take() == []
    assert only_samples.cumulative_logprob == 0.0


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=valid_text)
def test_decoded_tokens_join_to_the_text_whatever_lies_between_their_characters(
    kind: str, text: str, byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    tokenizer = {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind]
    ids = tokenizer.encode(text).ids
    processor = LogprobsProcessor(TokenTexts(tokenizer), SamplingParams(logprobs=0, prompt_logprobs=0))
    processor.update(sampled_rows(ids), len(ids))
    joined = "".join(token or "" for token in decoded(list(processor.take() or [])))
    # The first token of a text has a space in its place, which that decoder drops.
    whole = joined.removeprefix(" ") if kind == "byte_fallback" else joined
    assert whole == tokenizer.decode(ids, skip_special_tokens=False)
    processor.update_prompt(sampled_rows(ids[1:]), ids)
    prompt = processor.take_prompt()
    assert prompt is not None
    assert joined.endswith("".join(token or "" for token in decoded(prompt)))


def test_an_alternative_stands_in_the_place_of_the_token(byte_level: Tokenizer) -> None:
    first, second, last = (byte_level.token_to_id(piece) for piece in ("å", "Ľ", "½"))
    whole, end = (byte_level.token_to_id(piece) for piece in ("fo", "<|end|>"))
    processor = LogprobsProcessor(TokenTexts(byte_level), SamplingParams(logprobs=3))
    for token_id in (first, second, last):
        processor.update(sampled_rows([token_id], [last, whole, end]), 1)
    texts = [
        {token_id: entry.decoded_token for token_id, entry in place.items()}
        for place in processor.take() or []
    ]
    # A byte that begins no character has no text; behind two others it completes one.
    assert [place[last] for place in texts] == ["", "", byte_level.decode([first, second, last])]
    assert all(place[whole] == "fo" for place in texts)
    assert all(place[end] == "<|end|>" for place in texts)


def test_a_run_of_bytes_that_make_no_character_does_not_grow_the_context(byte_level: Tokenizer) -> None:
    stray = byte_level.token_to_id("½")
    decoded_lengths = []

    class Counting:
        """The tokenizer, with a note of how much it is asked to decode."""

        encode = byte_level.encode

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            decoded_lengths.append(len(ids))
            return byte_level.decode(ids, skip_special_tokens=skip_special_tokens)

    processor = LogprobsProcessor(TokenTexts(Counting()), SamplingParams(logprobs=0))  # type: ignore[arg-type]
    processor.update(sampled_rows([stray] * 100), 100)
    assert max(decoded_lengths) <= 5
    assert set(decoded(list(processor.take() or []))) == {""}


def test_without_a_tokenizer_there_is_no_text() -> None:
    processor = LogprobsProcessor(None, SamplingParams(logprobs=1))
    processor.update(sampled_rows([3], [4]), 1)
    assert processor.take() == [{3: Logprob(0.0, 1, None), 4: Logprob(-0.5, 1, None)}]
