"""Statements of tokenizer_config.json that tokenizer.json contradicts, held against transformers' AutoTokenizer."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AlbertTokenizer,
    AutoTokenizer,
    BertTokenizer,
    CohereTokenizer,
    DebertaV2Tokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    MPNetTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    RobertaTokenizer,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from nbengine.config import ModelConfig
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.frontend.text.tokenizer_statements import unmet_statements, warn_of_unmet_statements

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<mask>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "<x>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyzTF.', ", "é", "É", "e", "東", "京"]
MERGES = [("f", "o"), ("fo", "x"), ("t", "h"), ("th", "e")]
MERGED = ["fo", "fox", "th", "the"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_LEVEL = [*"!'.abcdefghijklmnopqrstuvwxyzTFEÉéÃ", "Ġ", "Ċ", "©", "ī", "æ", "Ŀ", "±", "ä", "º", "¬"]
TEXTS = ["the fox", " the  Fox", "Éé 東京", "<s>the</s> fox <x> fox", "fox<x>fox", "it's . the"]


def numbered(*tokens: str) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def with_merges(cls: Any, alphabet: list[str], mark: str) -> Callable[..., PreTrainedTokenizerBase]:
    vocabulary = numbered(*SPECIAL, *BYTES, *alphabet, mark, *MERGED, f"{mark}the")
    return lambda **says: cls(vocab=vocabulary, merges=[*MERGES, (mark, "the")], **says)


def with_scores(cls: Any) -> Callable[..., PreTrainedTokenizerBase]:
    words = ["▁the", "▁fox", "the", "fox", "▁"]
    pieces = [(token, -float(at)) for token, at in numbered(*SPECIAL, *words, *LETTERS).items()]
    return lambda **says: cls(vocab=pieces, **says)


def word_piece(cls: Any) -> Callable[..., PreTrainedTokenizerBase]:
    letters = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return lambda **says: cls(vocab=numbered(*SPECIAL, "the", "fox", "Fox", "東京", *letters), **says)


MODELS: dict[str, tuple[str, Callable[..., PreTrainedTokenizerBase]]] = {
    "Llama": ("llama", with_merges(LlamaTokenizer, LETTERS, "▁")),
    "Gemma": ("gemma", with_merges(GemmaTokenizer, LETTERS, "▁")),
    "GPT2": ("gpt2", with_merges(GPT2Tokenizer, BYTE_LEVEL, "Ġ")),
    "Qwen2": ("qwen2", with_merges(Qwen2Tokenizer, BYTE_LEVEL, "Ġ")),
    "Roberta": ("roberta", with_merges(RobertaTokenizer, BYTE_LEVEL, "Ġ")),
    "GPTNeoX": ("gpt_neox", with_merges(GPTNeoXTokenizer, BYTE_LEVEL, "Ġ")),
    "Cohere": ("cohere", with_merges(CohereTokenizer, BYTE_LEVEL, "Ġ")),
    "Bert": ("bert", word_piece(BertTokenizer)),
    "MPNet": ("mpnet", word_piece(MPNetTokenizer)),
    "T5": ("t5", with_scores(T5Tokenizer)),
    "XLMRoberta": ("xlm-roberta", with_scores(XLMRobertaTokenizer)),
    "Albert": ("albert", with_scores(AlbertTokenizer)),
    "DebertaV2": ("deberta-v2", with_scores(DebertaV2Tokenizer)),
}
TOKEN = {
    "content": "<x>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}
FLAGS = (
    "add_prefix_space",
    "legacy",
    "do_lower_case",
    "strip_accents",
    "keep_accents",
    "remove_space",
    "tokenize_chinese_chars",
    "add_bos_token",
    "add_eos_token",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
    "trim_offsets",
)
TOKENS = ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
SAID: dict[str, list[Any]] = {
    **{flag: [True, False] for flag in FLAGS},
    **{token: ["<x>"] for token in TOKENS},
    "extra_special_tokens": [["<x>"]],
    "model_max_length": [3],
    "truncation_side": ["left"],
    "added_tokens_decoder": [
        {"10": TOKEN},
        {"10": {**TOKEN, "special": False}},
        {"10": {**TOKEN, "lstrip": True, "rstrip": True}},
        {"900": {**TOKEN, "content": "fox"}},
    ],
}


def written(model: str, directory: Path, **says: Any) -> Path:
    """The files of a tokenizer that its class in transformers has made, saying so."""
    model_type, make = MODELS[model]
    make(**says).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def say(directory: Path, name: str, value: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


def seen(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The tokens that a tokenizer makes of texts, and the texts that it makes of these."""
    encoded = [tokenizer.encode(text) for text in TEXTS]
    texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in encoded for skip in (False, True)]
    return [encoded, texts]


def loaded(directory: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig(directory=str(directory)))


@pytest.mark.parametrize("model", MODELS)
def test_what_changes_tokens_or_text_is_applied_or_named(model: str, tmp_path: Path) -> None:
    original = written(model, tmp_path / "original")
    as_it_is = seen(AutoTokenizer.from_pretrained(original))
    assert seen(loaded(original)) == as_it_is
    assert unmet_statements(original, loaded(original).backend_tokenizer) == []
    stated = original / "tokenizer_config.json"
    text = stated.read_text()
    for name, value in ((name, value) for name, values in SAID.items() for value in values):
        say(original, name, value)
        ours = loaded(original)
        unmet = unmet_statements(original, ours.backend_tokenizer)
        named = any(entry.startswith(name) for entry in unmet)
        same = seen(ours) == seen(AutoTokenizer.from_pretrained(original))
        assert same or named, (name, value)
        stated.write_text(text)


@pytest.mark.parametrize(
    ("model", "name", "in_the_file", "stated"),
    [
        ("Llama", "add_prefix_space", True, False),
        ("Llama", "add_prefix_space", False, True),
        ("Llama", "legacy", False, True),
        ("Llama", "legacy", True, False),
        ("GPT2", "add_prefix_space", False, True),
        ("Roberta", "add_prefix_space", True, False),
        ("Bert", "do_lower_case", True, False),
        ("Bert", "do_lower_case", False, True),
        ("Bert", "strip_accents", True, False),
        ("Bert", "tokenize_chinese_chars", True, False),
        ("T5", "eos_token", "</s>", "<x>"),
        ("XLMRoberta", "bos_token", "<s>", "<x>"),
        ("DebertaV2", "do_lower_case", False, True),
    ],
)
def test_each_contradiction_is_named_where_transformers_takes_the_other_side(
    model: str, name: str, in_the_file: Any, stated: Any, tmp_path: Path
) -> None:
    directory = written(model, tmp_path / "m", **{name: in_the_file})
    assert unmet_statements(directory, loaded(directory).backend_tokenizer) == []
    say(directory, name, stated)
    assert seen(loaded(directory)) != seen(AutoTokenizer.from_pretrained(directory))
    unmet = unmet_statements(directory, loaded(directory).backend_tokenizer)
    assert [entry for entry in unmet if entry.startswith(name)] == [f"{name}={stated!r}"]


def test_one_warning_names_all_and_says_what_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = written("Bert", tmp_path / "m")
    config = ModelConfig(directory=str(directory))
    with caplog.at_level(logging.WARNING, "nbengine"):
        warn_of_unmet_statements(config, load_tokenizer(config))
        assert caplog.messages == []
        for name, value in {"do_lower_case": False, "strip_accents": False}.items():
            say(directory, name, value)
        (directory / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
        warn_of_unmet_statements(config, load_tokenizer(config))
    [message] = caplog.messages
    said = "the files of the tokenizer say do_lower_case=False, strip_accents=False, which is not applied"
    assert message == f"{directory}: {said}: tokenizer.json has it otherwise"


def test_texts_in_lower_case_are_named_if_sentence_transformers_makes_them(tmp_path: Path) -> None:
    directory = written("Roberta", tmp_path / "m")
    (directory / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    backend = loaded(directory).backend_tokenizer
    assert unmet_statements(directory, backend) == ["do_lower_case=True (sentence_bert_config.json)"]


def test_classes_that_take_the_file_as_it_is_contradict_nothing(tmp_path: Path) -> None:
    for model, (name, value) in itertools.product(
        ("Llama", "GPT2"), {"add_prefix_space": True, "legacy": True}.items()
    ):
        directory = written(model, tmp_path / f"{model}-{name}", add_prefix_space=False)
        say(directory, name, value)
        say(directory, "tokenizer_class", "PreTrainedTokenizerFast")
        (directory / "config.json").write_text("{}")
        assert seen(loaded(directory)) == seen(AutoTokenizer.from_pretrained(directory))
        assert unmet_statements(directory, loaded(directory).backend_tokenizer) == []
