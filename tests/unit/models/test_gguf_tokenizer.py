"""Prepared directories of GGUF files with other kinds of tokenizers, and of files that have none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.frontend.text.tokenizer_statements import unmet_statements
from nbengine.models.checkpoints import gguf_prepare
from nbengine.models.checkpoints.gguf_patterns import PATTERNS
from nbengine.models.checkpoints.gguf_prepare import prepared_directory
from nbengine.models.checkpoints.gguf_tokenizer import main, write_prepared
from nbengine.runtime.progress import Reporter

TEXTS = [
    "",
    "hello there",
    " hello  there ",
    "12 345\n\n",
    "naïve 日本 🙂",
    "<s>hello</s>",
    "it's <unk>",
    "abab",
]
QUIET = Reporter(None, "fetch")


def write_sentencepiece(path: Path, **metadata: Any) -> Path:
    """A GGUF file with a sentencepiece vocabulary and an embedding, as far as preparing it needs."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    words = [
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "he",
        "ll",
        "llo",
        "hello",
        "▁hello",
        "▁t",
        "th",
        "er",
        "▁the",
        "▁there",
    ]
    writer = GGUFWriter(str(path), "llama")
    for name, value in {"context_length": 64, "embedding_length": 32, "block_count": 1}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + words)
    writer.add_token_types(types + [1] * len(words))
    writer.add_token_scores([0.0] * len(pieces) + [-float(index) for index in range(len(words))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ bos_token + m['content'] }}{% endfor %}")
    for name, flag in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces + words), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_tokenizer(gguf: Path, prepared: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    ours = PreTrainedTokenizerFast.from_pretrained(str(prepared))
    for text in TEXTS:
        assert ours.encode(text) == oracle.encode(text)
        assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text))
    assert ours.get_vocab() == oracle.get_vocab()
    assert (ours.bos_token, ours.eos_token) == (oracle.bos_token, oracle.eos_token)


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_sentencepiece_vocabulary_equals_transformers(add_bos: bool, tmp_path: Path) -> None:
    gguf = write_sentencepiece(tmp_path / "model.gguf", add_bos_token=add_bos)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_prepared(gguf, prepared)
    assert_same_tokenizer(gguf, prepared)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(prepared))
    assert (tokenizer.encode("hello")[0] == 1) is add_bos
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hello"


def prepared(gguf: Path, directory: Path) -> PreTrainedTokenizerFast:
    directory.mkdir()
    write_prepared(gguf, directory)
    return load_tokenizer(ModelConfig(directory=str(directory)))


def unmet(directory: Path) -> list[str]:
    return unmet_statements(
        directory, load_tokenizer(ModelConfig(directory=str(directory))).backend_tokenizer
    )


@pytest.mark.parametrize("space", [True, False])
def test_the_space_before_a_text_is_put_or_left_out_as_the_file_says(space: bool, tmp_path: Path) -> None:
    gguf = write_sentencepiece(tmp_path / "model.gguf", add_bos_token=False, add_space_prefix=space)
    tokenizer = prepared(gguf, tmp_path / "prepared")
    converted = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=gguf.name)
    merges = json.loads(converted.backend_tokenizer.to_str())["model"]["merges"]
    oracle = LlamaTokenizer(
        vocab=converted.get_vocab(), merges=[tuple(merge) for merge in merges], add_prefix_space=space
    )
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == oracle.decode(
            oracle.encode(text, add_special_tokens=False)
        )
    assert (tokenizer.tokenize("hello") == ["▁hello"]) is space
    assert unmet(tmp_path / "prepared") == []


def byte_level_file(
    path: Path, pre: str | None, further: Sequence[str] = (), begin: bool = False, add_bos: bool | None = None
) -> Path:
    """A GGUF file with a byte-level vocabulary that has some pairs of spaces, letters and digits, and the tokens
    `further`; `begin`: the last of these begins a text."""
    merges = ["Ġ Ġ", "1 2", "12 3", "Ġ 1", "h e", "' s", "' S", "Ġ he"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    tokens += further
    writer = GGUFWriter(str(path), "llama")
    for name, value in {"context_length": 64, "embedding_length": 32, "block_count": 1}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - begin) + [3] * begin)
    writer.add_token_merges(merges)
    if begin:
        writer.add_bos_token_id(len(tokens) - 1)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_eos_token_id(0)
    writer.add_string("tokenizer.chat_template.tool_use", "with tools")
    writer.add_string("tokenizer.chat_template.../../evil", "no")
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = ["In 1  23 he's 123", "  7", " 007", "a1b22", "x = 12\n\n 5", "he'S"]


@pytest.mark.parametrize(
    "pre", ["smollm", "starcoder", "refact", "command-r", "gpt-2", "olmo", "glm4", "llama-bpe", None]
)
def test_text_is_divided_as_llama_cpps_patterns_for_the_pre_tokenizer_say(
    pre: str | None, tmp_path: Path
) -> None:
    """The patterns are those of llama-vocab.cpp: one divides the text, the next one each part."""
    llama_3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    patterns = {"glm4": [llama_3], "llama-bpe": [llama_3], "gpt-2": [GPT_2], "olmo": [GPT_2], None: [GPT_2]}
    tokenizer = prepared(byte_level_file(tmp_path / "model.gguf", pre), tmp_path / "prepared")
    for text in DIGITS:
        parts = [text]
        for pattern in patterns.get(pre, [r"\p{N}", GPT_2]):
            parts = [piece for part in parts for piece in divided(pattern, part)]
        whole = [tokenizer.backend_tokenizer.model.tokenize(in_bytes(part)) for part in parts]
        assert tokenizer.encode(text) == [token.id for tokens in whole for token in tokens], (pre, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert unmet(tmp_path / "prepared") == []


def divided(pattern: str, text: str) -> list[str]:
    """All of a text: what the pattern finds, and what lies between."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def in_bytes(text: str) -> str:
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in as_bytes.pre_tokenize_str(text))


def isolated(*patterns: str) -> list[dict[str, Any]]:
    """Splits as tokenizer.json writes them."""
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]


AS_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LIKE_GPT_2 = {**AS_BYTES, "use_regex": True}
DIGIT_BY_DIGIT = {"type": "Digits", "individual_digits": True}
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
IN_TOKENIZER_JSON: dict[str, list[dict[str, Any]]] = {
    "deepseek-coder": [
        *isolated("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+"),
        DIGIT_BY_DIGIT,
        AS_BYTES,
    ],
    "deepseek-v3": [
        *isolated(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ),
        AS_BYTES,
    ],
    "deepseek-llm": [
        *isolated(
            "[\r\n]",
            r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
            "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
            "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
            "\\s?[!-/:-~！-／：-～\u2018-‟\u3000-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\ud7ff]+",
        ),
        {"type": "Digits", "individual_digits": False},
        AS_BYTES,
    ],
    "smollm": [DIGIT_BY_DIGIT, LIKE_GPT_2],
    "minerva-7b": [DIGIT_BY_DIGIT, LIKE_GPT_2],
    "exaone4": [LIKE_GPT_2],
    "stablelm2": [*isolated(CL100K), AS_BYTES],
    "solar-open": [*isolated(CL100K), AS_BYTES],
    "bloom": [*isolated(r" ?[^(\s|[.,!?…。，、।۔،])]+"), AS_BYTES],
    "viking": [*isolated(r" ?[^(\s|[.,!?…。，、।۔،])]+"), DIGIT_BY_DIGIT, AS_BYTES],
}
"""The pre-tokenizers of models for which llama.cpp has a name, as their tokenizer.json has them."""
PASSAGES = [
    *TEXTS,
    *DIGITS,
    "我想在apple工作1314151天～ ？ ひらがな カタカナ 가나다",
    "def f(x):\r\n\treturn x**2 != 3.14 and 'it''s'  # naïve Ελληνικά კარგი ὧδε ﬁ",
    "$100,000.00 (a_b) [c] {d} |e| <f> `g` ^h ~i… ½ Ⅷ x²\n \n\n  \u3000end \t",
]


@pytest.mark.parametrize("pre", IN_TOKENIZER_JSON)
def test_text_is_divided_as_the_tokenizer_json_of_the_models_says(pre: str, tmp_path: Path) -> None:
    tokenizer = prepared(byte_level_file(tmp_path / "model.gguf", pre), tmp_path / "prepared")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": IN_TOKENIZER_JSON[pre]}
    oracle = Tokenizer.from_str(json.dumps(content))
    ours = tokenizer.backend_tokenizer
    for text in PASSAGES:
        pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == [piece for piece, _ in oracle.pre_tokenizer.pre_tokenize_str(text)]
        assert ours.encode(text).ids == oracle.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert unmet(tmp_path / "prepared") == []


def test_the_names_of_llama_cpp_are_known_or_named(tmp_path: Path) -> None:
    """transformers' list, and what llama-vocab.cpp has beside it."""
    further = (
        "default starcoder gpt-2 phi-2 a.x-4.0 mellum modern-bert jais jais-2 jina-v1-en roberta-bpe refact command-r "
        "olmo poro-chat glm4 chatglm-bpe codeshell gpt3-finnish exaone exaone-moe chameleon mellum2 cohere2moe tiny_aya "
        "superbpe trillion granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense joyai-llm "
        "kimi-k2 grok-2 laguna minicpm5 youtu falcon mpt gigachat megrez"
    )
    for name in [*GGUF_PRE_TOKENIZER_SPLITS, *further.split(), *IN_TOKENIZER_JSON]:
        assert name in PATTERNS, name
        for pattern in PATTERNS[name]:
            assert ["".join(divided(pattern, text)) for text in PASSAGES] == PASSAGES
    for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
        assert PATTERNS[name] == (pattern,)


@pytest.mark.parametrize("pre", ["whitespace", "afmoe", "x"])
def test_a_pre_tokenizer_that_nobody_knows_is_named_at_every_start(pre: str, tmp_path: Path) -> None:
    tokenizer = prepared(byte_level_file(tmp_path / "model.gguf", pre), tmp_path / "prepared")
    assert tokenizer.encode("he")
    assert unmet(tmp_path / "prepared") == [f"tokenizer.ggml.pre='{pre}'"]


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_a_word_that_is_a_token_is_that_token_where_the_models_tokenizer_json_ignores_merges(
    pre: str, whole: bool, tmp_path: Path
) -> None:
    """Llama 3's and Tekken's tokenizer.json say `ignore_merges`: true; no merges lead to "hello" here."""
    file = byte_level_file(tmp_path / "model.gguf", pre, further=["hello"])
    tokenizer = prepared(file, tmp_path / "prepared")
    assert tokenizer.tokenize("hello") == (["hello"] if whole else ["he", "l", "l", "o"])
    assert tokenizer.tokenize("hellos") == ["he", "l", "l", "o", "s"]


@pytest.mark.parametrize(
    ("pre", "stated", "begun"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("llama-bpe", True, True),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("gpt-2", True, True),
        ("dbrx", None, False),
    ],
)
def test_a_text_begins_with_the_token_that_llama_cpp_puts_there(
    pre: str, stated: bool | None, begun: bool, tmp_path: Path
) -> None:
    """Files of Llama 3 that were made before the middle of 2025 do not say `add_bos_token`, and mean it."""
    file = byte_level_file(tmp_path / "model.gguf", pre, further=["<|begin|>"], begin=True, add_bos=stated)
    tokenizer = prepared(file, tmp_path / "prepared")
    ids = tokenizer.encode("he")
    assert tokenizer.convert_ids_to_tokens(ids) == (["<|begin|>"] if begun else []) + ["he"]
    assert tokenizer.encode("he", add_special_tokens=False) == ids[-1:]
    assert tokenizer.bos_token == "<|begin|>"


def test_chat_templates_with_a_name_are_found(tmp_path: Path) -> None:
    tokenizer = prepared(byte_level_file(tmp_path / "model.gguf", "gpt-2"), tmp_path / "prepared")
    assert tokenizer.chat_template == {"tool_use": "with tools"}


def test_a_byte_level_vocabulary_of_qwen_equals_transformers(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    model = random_model("Qwen2", vocab_size=260)
    gguf = write_gguf(tmp_path / "model.gguf", model, gguf_variant(arch="qwen2", vocabulary=260))
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_prepared(gguf, prepared)
    assert_same_tokenizer(gguf, prepared)


def test_more_tokens_than_the_embedding_has_rows_is_refused(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    model = random_model("Qwen2", vocab_size=200)
    gguf = write_gguf(tmp_path / "model.gguf", model, gguf_variant(arch="qwen2", vocabulary=260))
    with pytest.raises(ModelLoadError, match="260 tokens, the embedding only 200 rows"):
        write_prepared(gguf, tmp_path)


def test_a_token_that_transformers_invents_is_dropped(
    tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> None:
    variant = gguf_variant(arch="qwen2", vocabulary=260, first_token="<unk>")
    gguf = write_gguf(tmp_path / "model.gguf", random_model("Qwen2", vocab_size=260), variant)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_prepared(gguf, prepared)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(prepared))
    ids = tokenizer.encode("he<|endoftext|>he")
    assert max(ids) < 260
    assert len(ids) > 3
    assert tokenizer.decode(ids) == "he<|endoftext|>he"


def test_the_child_reports_a_refusal_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert main([str(path), str(tmp_path)]) == 3
    assert (
        capsys.readouterr().err
        == f"{path}: truncated or corrupt: the tensor count ends at byte 16, but the file has 8 bytes\n"
    )


@pytest.mark.usefixtures("tokenizers_converted_in_a_process")
def test_a_prepared_directory_is_made_once_and_again_when_the_file_changes(
    tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_sentencepiece(tmp_path / "model.gguf")
    first = prepared_directory(gguf, QUIET)
    assert_same_tokenizer(gguf, first)
    assert json.loads((first / "config.json").read_text())["vocab_size"] > 256
    converted: list[Path] = []
    monkeypatch.setattr(gguf_prepare, "_convert", lambda path, content: converted.append(path))
    assert prepared_directory(gguf, QUIET) == first
    assert converted == []
    gguf.write_bytes(gguf.read_bytes() + b"\0")
    assert prepared_directory(gguf, QUIET) != first
    assert converted == [gguf]
    assert not list((private_cache / "prepared").glob(".staging-*"))


def test_advice_for_sampling_stands_where_the_file_has_none(tmp_path: Path, private_cache: Path) -> None:
    gguf = write_sentencepiece(tmp_path / "model.gguf", add_bos_token=True)
    plain, advised = (
        prepared_directory(gguf, QUIET, advice) for advice in (None, {"temperature": 0.2, "eos_token_id": 77})
    )
    assert plain != advised
    before, after = (json.loads((each / "generation_config.json").read_text()) for each in (plain, advised))
    assert "temperature" not in before
    assert after == {**before, "temperature": 0.2}


@pytest.mark.usefixtures("tokenizers_converted_in_a_process")
def test_a_broken_file_leaves_no_prepared_directory(tmp_path: Path, private_cache: Path) -> None:
    gguf = write_sentencepiece(tmp_path / "model.gguf")
    gguf.write_bytes(gguf.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match="truncated"):
        prepared_directory(gguf, QUIET)
    assert list((private_cache / "prepared").iterdir()) == []
