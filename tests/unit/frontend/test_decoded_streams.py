"""Streams of random tokens, held against transformers' own decode of the whole, for tokenizers of every kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nbengine.frontend.outputs.logprobs import LogprobsProcessor, TokenTexts
from nbengine.frontend.text.decoding import SpaceCleaner, TextDecoding
from nbengine.frontend.text.detokenizer import IncrementalDetokenizer
from nbengine.ipc.messages import FinishReason, LogprobsLists
from nbengine.sampling_params import SamplingParams
from tests.unit.frontend.conftest import byte_level_tokenizer

SPECIAL = ("<s>", "</s>", "[SEP]")
ADDED = ("<think>", "東京", " n't", "é", "<0x41", "\ufffd")
"""Added tokens that are not special: some have characters outside of the vocabulary's alphabet."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁the", "▁a", "a", "s", "é", "▁▁▁", "▁.", "'", "▁'", "ve", "\ufffd"]
WORDS = ["the", "fox", "##s", "##", ".", ",", "'", "n't", "ve", "##ve", "a", "!", "é", "'s"]


def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


def sentencepiece_bpe(*, strips: bool) -> Tokenizer:
    """Llama 2's kind, and Gemma's, which keeps the first space."""
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", *BYTES, *PIECES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    return tokenizer


def unigram(*, byte_fallback: bool) -> Tokenizer:
    pieces = ["<unk>", *(BYTES if byte_fallback else []), *PIECES]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=byte_fallback))
    metaspace = decoders.Metaspace()
    tokenizer.decoder = (
        decoders.Sequence([decoders.ByteFallback(), metaspace]) if byte_fallback else metaspace
    )
    return tokenizer


def word_piece(*, cleanup: bool) -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


def words() -> Tokenizer:
    """A tokenizer without a decoder."""
    return Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a"))


def suffixed_bpe() -> Tokenizer:
    """The kind of the first GPT, whose words end with a mark."""
    pieces = [*"abc.,'", "a</w>", "b</w>", ".</w>", "'</w>", "s</w>", "n't</w>"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "SentencePiece BPE": functools.partial(sentencepiece_bpe, strips=True),
    "SentencePiece BPE that keeps the first space": functools.partial(sentencepiece_bpe, strips=False),
    "Unigram": functools.partial(unigram, byte_fallback=False),
    "Unigram with bytes": functools.partial(unigram, byte_fallback=True),
    "WordPiece": functools.partial(word_piece, cleanup=False),
    "WordPiece that cleans up": functools.partial(word_piece, cleanup=True),
    "no decoder": words,
    "BPE with suffixes": suffixed_bpe,
}


@functools.cache
def made(kind: str, cleans_up: bool) -> PreTrainedTokenizerFast:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=cleans_up,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )


def streamed(
    tokenizer: PreTrainedTokenizerFast,
    steps: list[list[int]],
    params: SamplingParams,
    prompt: Sequence[int] = (),
) -> list[str]:
    """Return what a request shows after each step; the last one is the whole text."""
    decoding = TextDecoding.of(tokenizer)
    context = decoding.context_of(prompt, skip_special_tokens=params.skip_special_tokens)
    detokenizer = IncrementalDetokenizer.from_new_request(decoding, params, context)
    deltas = []
    for number, step in enumerate(steps, 1):
        finished = number == len(steps)
        assert detokenizer.update(step, FinishReason.LENGTH if finished else None) is None
        deltas.append(detokenizer.take_text(finished))
    assert detokenizer.token_ids == [token_id for step in steps for token_id in step]
    return list(itertools.accumulate(deltas))


@pytest.mark.parametrize("kind", KINDS)
@given(skip=st.booleans(), cleans_up=st.booleans(), data=st.data())
def test_what_a_stream_shows_is_a_prefix_of_what_transformers_decodes_and_in_the_end_all_of_it(
    kind: str, skip: bool, cleans_up: bool, data: st.DataObject
) -> None:
    tokenizer = made(kind, cleans_up)
    # Three ids more than the tokenizer knows: a model's vocabulary may be larger.
    size = len(tokenizer)
    some = st.integers(0, size + 2) | st.integers(size - len(SPECIAL) - len(ADDED), size - 1)
    steps = data.draw(st.lists(st.lists(some, min_size=1, max_size=4), min_size=1, max_size=14))
    ids = [token_id for step in steps for token_id in step]
    shown = streamed(tokenizer, steps, SamplingParams(skip_special_tokens=skip))
    assert shown[-1] == tokenizer.decode(ids, skip_special_tokens=skip)
    assert all(shown[-1].startswith(text) for text in shown)


@pytest.mark.parametrize("kind", KINDS)
@given(skip=st.booleans(), cleans_up=st.booleans(), data=st.data())
def test_prompt_and_text_together_are_what_transformers_decodes_of_all_tokens(
    kind: str, skip: bool, cleans_up: bool, data: st.DataObject
) -> None:
    tokenizer = made(kind, cleans_up)
    ids = st.lists(st.integers(0, len(tokenizer) + 2), max_size=12)
    prompt = data.draw(ids)
    # A prompt is a text: it does not end within a character.
    while "\ufffd" in (before := tokenizer.decode(prompt, skip_special_tokens=skip)):
        prompt.pop()
    written = data.draw(ids)
    whole = tokenizer.decode([*prompt, *written], skip_special_tokens=skip)
    # Bytes may break the character before them, and the clean-up may take a space of the prompt's.
    assume(whole.startswith(before))
    shown = streamed(
        tokenizer,
        [[token_id] for token_id in written] or [[]],
        SamplingParams(skip_special_tokens=skip),
        prompt,
    )
    assert before + shown[-1] == whole
    assert all(whole.startswith(before + text) for text in shown)


def test_only_decoders_that_look_back_need_the_prompt() -> None:
    needing = {kind for kind in KINDS if TextDecoding.of(made(kind, False)).looks_back}
    assert needing == set(KINDS) - {"byte-level BPE", "SentencePiece BPE that keeps the first space"}
    tokenizer = made("SentencePiece BPE", False)
    decoding = TextDecoding.of(tokenizer)
    the, bos = tokenizer.convert_tokens_to_ids(["▁the", "<s>"])
    byte = tokenizer.convert_tokens_to_ids("<0x41>")
    for prompt, skip, context in (
        ([bos, the, bos], True, [the]),
        ([bos, the, bos], False, [bos]),
        ([bos], True, []),
        ([the, the, byte, byte], True, [the, byte, byte]),
        ([the, 10**6], True, [the]),
        (None, True, []),
    ):
        assert decoding.context_of(prompt, skip_special_tokens=skip) == context


def test_stop_strings_see_the_space_before_the_first_word() -> None:
    tokenizer = made("SentencePiece BPE", False)
    the, a = tokenizer.convert_tokens_to_ids(["▁the", "▁a"])
    for context, stop in (([the], " a"), ([], None)):
        params = SamplingParams(stop=[" a"])
        detokenizer = IncrementalDetokenizer.from_new_request(TextDecoding.of(tokenizer), params, context)
        assert detokenizer.update([a], None) == stop


@pytest.mark.parametrize("kind", ["SentencePiece BPE", "Unigram", "no decoder"])
@pytest.mark.parametrize("has_prompt", [True, False])
def test_texts_of_log_probabilities_add_up_to_the_text(kind: str, has_prompt: bool) -> None:
    tokenizer = made(kind, False)
    texts = TokenTexts(tokenizer.backend_tokenizer)
    names = ["the", "fox", "a"] if kind == "no decoder" else ["▁the", "a", "▁a", "s"]
    written = tokenizer.convert_tokens_to_ids(names)
    processor = LogprobsProcessor(texts, SamplingParams(logprobs=0), is_first=not has_prompt)
    count = len(written)
    processor.update(LogprobsLists([[token] for token in written], [[-1.0]] * count, [1] * count), count)
    pieces = [
        entry[token].decoded_token for entry, token in zip(processor.take() or (), written, strict=True)
    ]
    prompt = written[:1] if has_prompt else []
    shown = streamed(tokenizer, [written], SamplingParams(), prompt)
    assert "".join(map(str, pieces)) == shown[-1]


@pytest.mark.parametrize("kind", ["byte-level BPE", "SentencePiece BPE", "Unigram with bytes"])
def test_a_character_of_several_tokens_is_shown_when_it_is_complete_and_a_broken_one_at_the_end(
    kind: str,
) -> None:
    tokenizer = made(kind, False)
    if kind == "byte-level BPE":
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("𓀀")[0][0]
        ids = [tokenizer.convert_tokens_to_ids(piece) for piece in alphabet]
    else:
        ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "𓀀".encode()]
    (behind,) = tokenizer.convert_tokens_to_ids(["s"])
    shown = streamed(tokenizer, [[token_id] for token_id in [behind, *ids, behind]], SamplingParams())
    assert not any("\ufffd" in text for text in shown)
    assert shown[:4] == ["s"] * 4
    assert shown[-1] == "s𓀀s"
    broken = streamed(tokenizer, [[token_id] for token_id in [behind, *ids[:3]]], SamplingParams())
    assert broken[:3] == ["s"] * 3
    assert broken[-1] == tokenizer.decode([behind, *ids[:3]])
    assert "\ufffd" in broken[-1]


def test_a_valid_byte_is_not_shown_before_it_is_sure_that_no_invalid_one_follows() -> None:
    tokenizer = made("SentencePiece BPE", False)
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁a", "<0x5D>", "<0x81>", "s")]
    assert streamed(tokenizer, [[token_id] for token_id in ids], SamplingParams()) == [
        "a",
        "a",
        "a",
        "a\ufffd\ufffds",
    ]
    whole = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁a", "<0x5D>", "s")]
    assert streamed(tokenizer, [[token_id] for token_id in whole], SamplingParams()) == ["a", "a", "a]s"]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4,), (1, 3), (3, 1)])
def test_a_stop_string_of_bytes_ends_the_text_and_the_token_behind_the_bytes_is_dropped(
    sizes: tuple[int, ...],
) -> None:
    tokenizer = made("SentencePiece BPE", False)
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁a", "<0x0A>", "▁the", "s")]
    steps = [[ids.pop(0) for _ in range(size)] for size in sizes]
    detokenizer = IncrementalDetokenizer.from_new_request(
        TextDecoding.of(tokenizer), SamplingParams(stop="\n")
    )
    text = ""
    for step in steps:
        stop = detokenizer.update(step, None)
        text += detokenizer.take_text(stop is not None)
        if stop is not None:
            break
    assert (stop, text) == ("\n", "a")
    assert tokenizer.convert_ids_to_tokens(detokenizer.token_ids) == ["▁a", "<0x0A>"]
    assert detokenizer.num_dropped_tokens == len(step) - sum(token in step for token in detokenizer.token_ids)


CLEANED = st.text(" .,!?'ntmsvera\n", max_size=40)


@given(pieces=st.lists(CLEANED, max_size=30))
@example(["a '", " ' s"])
@example([" n", " ", "'", " t"])
@example(["  ' ", "s .", " ' ,"])
def test_text_in_pieces_is_cleaned_as_the_whole_is(pieces: list[str]) -> None:
    cleaner = SpaceCleaner()
    shown = list(itertools.accumulate([*(cleaner.feed(piece) for piece in pieces), cleaner.rest()]))
    assert shown[-1] == made("no decoder", True).clean_up_tokenization("".join(pieces))
    assert all(shown[-1].startswith(text) for text in shown)


def test_the_clean_up_holds_little_back_and_keeps_little() -> None:
    cleaner = SpaceCleaner()
    text, shown = "never ever . a dog 's fox , " * 50, ""
    for place, character in enumerate(text, 1):
        shown += cleaner.feed(character)
        whole = made("no decoder", True).clean_up_tokenization(text[:place])
        assert len(whole) - len(shown) <= 9
        assert len(cleaner._window) < 40
