"""Incremental detokenization against decoding everything at once."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Decoder, Fuse, Replace, Sequence
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer
from nbengine.ipc.messages import FinishReason
from nbengine.sampling_params import SamplingParams
from tests.support.thorough import amount, some
from tests.unit.frontend.stop_reference import chunkings, first_stop

LENGTH = FinishReason.LENGTH
STOP = FinishReason.STOP


def stream(
    tokenizer: Tokenizer, steps: list[list[int]], params: SamplingParams, finish: FinishReason = LENGTH
) -> tuple[list[str], str | None, IncrementalDetokenizer]:
    """The deltas of a request whose engine core returned `steps`, the stop string, and the detokenizer."""
    detokenizer = IncrementalDetokenizer.from_new_request(TextDecoding(tokenizer), params)
    deltas = []
    for index, new_ids in enumerate(steps):
        reason = finish if index == len(steps) - 1 else None
        stop = detokenizer.update(new_ids, reason)
        deltas.append(detokenizer.take_text(reason is not None or stop is not None))
        if stop is not None:
            return deltas, stop, detokenizer
    return deltas, None, detokenizer


def random_steps(rng: random.Random, vocabulary: int) -> list[list[int]]:
    ids = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 30))]
    steps = []
    while ids:
        size = rng.choice((1, 1, 1, 2, 5))
        steps.append(ids[:size])
        ids = ids[size:]
    return steps


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_deltas_of_random_tokens_join_to_the_text_of_all_tokens(
    kind: str, skip_special_tokens: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    rng = random.Random(7)
    for _ in range(amount(100, thorough=400)):
        steps = random_steps(rng, tokenizer.get_vocab_size())
        deltas, _, detokenizer = stream(tokenizer, steps, params)
        ids = [token_id for step in steps for token_id in step]
        assert detokenizer.token_ids == ids
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@given(text=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30))
def test_valid_text_in_byte_fallback_tokens_streams_exactly(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text).ids
    deltas, _, _ = stream(byte_fallback, [[token_id] for token_id in ids], SamplingParams())
    assert "".join(deltas) == byte_fallback.decode(ids)


@given(text=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40))
def test_no_delta_of_valid_text_shows_a_replacement_character(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text).ids
    deltas, _, _ = stream(
        byte_level, [[token_id] for token_id in ids], SamplingParams(skip_special_tokens=False)
    )
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def test_a_character_of_several_tokens_is_held_until_it_is_complete(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("𓀀").ids
    assert len(ids) == 4
    deltas, _, _ = stream(byte_level, [[token_id] for token_id in ids], SamplingParams())
    assert deltas == ["", "", "", "𓀀"]


def test_an_incomplete_character_is_flushed_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a𓀀").ids[:-1]
    deltas, _, _ = stream(byte_level, [[token_id] for token_id in ids], SamplingParams())
    assert "".join(deltas) == byte_level.decode(ids) == "a\ufffd"


def test_a_stream_goes_on_after_its_decoder_has_rewritten_what_it_had_given_out() -> None:
    tokenizer = Tokenizer(WordPiece({"a": 0, "b": 1, "c": 2, "d": 3}, unk_token="a"))
    # No tokenizer in use replaces text across the borders of tokens; the library's stream refuses it.
    tokenizer.decoder = Sequence([Fuse(), Replace("ab", "X")])
    deltas, _, detokenizer = stream(tokenizer, [[0], [1], [2], [3]], SamplingParams())
    assert tokenizer.decode([0, 1, 2, 3]) == "Xcd"
    assert deltas == ["a", "", "c", "d"]
    assert isinstance(detokenizer, FastIncrementalDetokenizer)
    assert detokenizer._step == detokenizer._decode_again


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", some(range(20), ordinary=4))
def test_stop_strings_give_the_same_text_for_every_split_of_the_tokens(
    byte_level: Tokenizer, seed: int, include: bool
) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(["fox", " ", "é", "🙂", "the", "o", "\n"], k=14))
    begin = rng.randrange(len(text) - 3)
    params = SamplingParams(
        stop=[text[begin : begin + rng.randint(1, 3)]], include_stop_str_in_output=include
    )
    ids = byte_level.encode(text).ids
    end = text.index(params.stop[0]) + (len(params.stop[0]) if include else 0)
    for _ in range(20):
        remaining, steps = ids, []
        while remaining:
            size = rng.randint(1, 4)
            steps.append(remaining[:size])
            remaining = remaining[size:]
        deltas, stop, _ = stream(byte_level, steps, params)
        assert stop == params.stop[0]
        assert "".join(deltas) == text[:end]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", some(range(12), ordinary=3))
def test_overlapping_stop_strings_mean_the_same_for_every_chunking_of_bytes(
    byte_level: Tokenizer, seed: int, include: bool
) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("aabé€", k=6))
    # Every token is a byte of UTF-8, so that most end within a character; the last one may be incomplete.
    pieces = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    tokens = [byte_level.token_to_id(byte) for piece, _ in pieces for byte in piece][:11]
    text = byte_level.decode(tokens)
    stops = ["".join(rng.choices("aabé€", k=rng.randint(1, 3))) for _ in range(3)]
    expected = first_stop(text, stops)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    for steps in chunkings(tokens):
        deltas, stop, detokenizer = stream(byte_level, steps, params)
        if expected is None:
            assert (stop, "".join(deltas), detokenizer.token_ids) == (None, text, tokens)
            continue
        end = expected[1] + len(expected[0])
        assert stop == expected[0]
        assert "".join(deltas) == text[: end if include else expected[1]]
        assert detokenizer.token_ids == tokens[: len(text[:end].encode())]


def test_text_that_may_become_a_stop_string_is_held_back_and_released_when_it_does_not(
    byte_level: Tokenizer,
) -> None:
    params = SamplingParams(stop=["fog"])
    ids = [byte_level.encode(character).ids[0] for character in "a fox"]
    deltas, stop, _ = stream(byte_level, [[token_id] for token_id in ids], params)
    assert stop is None
    assert deltas == ["a", " ", "", "", "fox"]


def test_nothing_is_held_back_when_the_stop_string_is_wanted(byte_level: Tokenizer) -> None:
    params = SamplingParams(stop=["fog"], include_stop_str_in_output=True)
    ids = [byte_level.encode(character).ids[0] for character in "fog"]
    deltas, stop, _ = stream(byte_level, [[token_id] for token_id in ids], params)
    assert (deltas, stop) == (["f", "o", "g"], "fog")


def test_the_token_that_stops_a_request_has_no_text_unless_it_is_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the fox").ids
    for include, expected in ((False, byte_level.decode(ids[:-1])), (True, byte_level.decode(ids))):
        params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
        deltas, _, detokenizer = stream(byte_level, [[token_id] for token_id in ids], params, STOP)
        assert "".join(deltas) == expected
        assert detokenizer.token_ids == ids


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_special_tokens_text_is_a_stop_string_also_where_the_token_has_none(
    kind: str, include: bool, size: int, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    special, content = next(iter(TextDecoding(tokenizer).special.items()))
    before = tokenizer.encode("a fox é", add_special_tokens=False).ids
    # The first one comes before `min_tokens`.
    ids = [special, *before, special, 5]
    params = SamplingParams(stop=["zzz", content], min_tokens=2, include_stop_str_in_output=include)
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    deltas, stop, detokenizer = stream(tokenizer, steps, params)
    assert stop == content
    assert detokenizer.token_ids == [special, *before, special]
    assert "".join(deltas) == tokenizer.decode(before) + (content if include else "")
    plain = SamplingParams(stop=["zzz"])
    assert stream(tokenizer, steps, plain)[1] is None


def test_no_stop_string_counts_before_min_tokens(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(character).ids[0] for character in "aXbXcX"]
    deltas, stop, detokenizer = stream(
        byte_level, [[token_id] for token_id in ids], SamplingParams(stop=["X"], min_tokens=4)
    )
    assert stop == "X"
    assert "".join(deltas) == "aXb"
    assert len(detokenizer.token_ids) == 4


def test_an_abort_releases_what_was_held_back(byte_level: Tokenizer) -> None:
    detokenizer = FastIncrementalDetokenizer(TextDecoding(byte_level), SamplingParams(stop=["fog"]))
    detokenizer.update([byte_level.encode("f").ids[0]], None)
    assert detokenizer.take_text(finished=False) == ""
    detokenizer.update([], FinishReason.ABORT)
    assert detokenizer.take_text(finished=True) == "f"


def test_without_detokenization_there_are_only_token_ids(byte_level: Tokenizer) -> None:
    deltas, _, detokenizer = stream(byte_level, [[5], [6, 7]], SamplingParams(detokenize=False))
    assert deltas == ["", ""]
    assert detokenizer.token_ids == [5, 6, 7]


def word_tokenizer(decoder: Decoder | None) -> Tokenizer:
    """A tokenizer of words, whose decoders put spaces between tokens."""
    words = ["[UNK]", "[CLS]", "[SEP]", "fox", "dog", "##s", ",", "[ADDED]"]
    tokenizer = Tokenizer(WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.add_tokens(["[ADDED]"])
    return tokenizer


def without_spaces_between(text: str, special: list[str]) -> str:
    """Return, by brute force, whether no space stands between two special tokens of the whole text."""
    pattern = "|".join(map(re.escape, special))
    return re.sub(rf"({pattern}) (?={pattern})", r"\1", text)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("decoder", [WordPieceDecoder(), None], ids=["word pieces", "no decoder"])
def test_spaces_between_special_tokens_can_be_left_out(decoder: Decoder | None, skip: bool) -> None:
    tokenizer = word_tokenizer(decoder)
    transformers = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    rng = random.Random(3)
    changed = 0
    for _ in range(200):
        steps = random_steps(rng, tokenizer.get_vocab_size())
        ids = [token_id for step in steps for token_id in step]
        with_spaces = transformers.decode(ids, skip_special_tokens=skip)
        for spaces in (True, False):
            params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
            deltas, _, _ = stream(tokenizer, steps, params)
            joined = with_spaces if spaces else without_spaces_between(with_spaces, ["[CLS]", "[SEP]"])
            assert "".join(deltas) == joined
            changed += joined != with_spaces
    assert (changed > 50) is not skip


def test_text_that_is_decoded_again_has_no_spaces_between_special_tokens_either() -> None:
    tokenizer = word_tokenizer(WordPieceDecoder())
    params = SamplingParams(
        skip_special_tokens=False, spaces_between_special_tokens=False, stop=["[SEP][CLS]"]
    )
    detokenizer = IncrementalDetokenizer.from_new_request(TextDecoding(tokenizer), params)
    assert isinstance(detokenizer, FastIncrementalDetokenizer)
    # As after a token that the library's stream refuses.
    detokenizer._step = detokenizer._decode_again
    assert [detokenizer.update([token_id], None) for token_id in (3, 1, 1, 4, 2)] == [None] * 5
    assert detokenizer.take_text(finished=False) == "fox [CLS][CLS] dog "
    assert detokenizer.update([1], None) == "[SEP][CLS]"
    assert detokenizer.take_text(finished=True) == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_decoders_without_spaces_between_special_tokens_give_the_same_text(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = []
    for spaces in (True, False):
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        deltas, _, _ = stream(tokenizer, random_steps(random.Random(5), tokenizer.get_vocab_size()), params)
        text.append("".join(deltas))
    assert text[0] == text[1]
