r"""The ways of dividing text to which `tokenizer.ggml.pre` of a GGUF file gives a name.

The names are llama.cpp's (llama-vocab.cpp); the patterns are those of the `pre_tokenizer` in the tokenizer.json of the
models after which the names are called. Each pattern divides the parts that the one before it has left.
"""

from __future__ import annotations

from collections.abc import Mapping

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 = _CL100K % "{1,3}" + _BREAKS
_QWEN_2 = _CL100K % "" + _BREAKS
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _MARKS + _BREAKS
_O200K = _CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?") + r"|\p{N}{1,3}" + _MARKS + _BREAKS
_KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    rf"{_CONTRACTION}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    rf"{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BREAKS
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BREAKS,
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_JAIS_2 = (
    _CL100K
    % "{1,3}"
    + r"|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)"
    r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
_YOUTU = (
    (
        "[\uac00-\ud7a3\u3131-\u318e]+"
        "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
    ),
    _CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?") + r"|\p{N}" + _MARKS + _BREAKS,
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "([\\t\\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT_2,
)
_WAYS: dict[tuple[str, ...], tuple[str, ...]] = {
    (_GPT_2,): (
        "a.x-4.0",
        "exaone4",
        "gigachat",
        "gpt-2",
        "granite-docling",
        "jais",
        "jina-de",
        "jina-es",
        "jina-v1-en",
        "jina-v2-code",
        "jina-v2-de",
        "jina-v2-es",
        "mellum",
        "modern-bert",
        "mpt",
        "olmo",
        "phi-2",
        "roberta-bpe",
        "trillion",
    ),
    (r"\p{N}", _GPT_2): (
        "codeshell",
        "command-r",
        "exaone",
        "mellum2",
        "minerva-7b",
        "refact",
        "smollm",
        "starcoder",
    ),
    (_LLAMA_3,): (
        "chatglm-bpe",
        "dbrx",
        "falcon-h1",
        "falcon3",
        "glm4",
        "jina-v5-nano",
        "lfm2",
        "llama-bpe",
        "llama-v3",
        "llama3",
        "midm-2.0",
        "pixtral",
        "smaug-bpe",
    ),
    (_QWEN_2,): (
        "deepseek-r1-qwen",
        "f2llmv2",
        "grok-2",
        "hunyuan",
        "kormo",
        "megrez",
        "qwen2",
        "solar-open",
        "stablelm2",
    ),
    (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BREAKS,): (
        "qwen35",
    ),
    (_TEKKEN,): ("tekken",),
    (_O200K,): ("gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"),
    (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K): ("cohere2moe", "tiny_aya"),
    (_KIMI,): ("kimi-k2",),
    _DEEPSEEK_LLM: ("deepseek-llm",),
    _DEEPSEEK_CODER: ("deepseek-coder",),
    _DEEPSEEK_3: ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]"): ("falcon",),
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"): ("default",),
    (_BLOOM,): ("bloom", "gpt3-finnish", "poro-chat"),
    (_BLOOM, r"\p{N}"): ("viking",),
    (_JAIS_2,): ("jais-2",),
    _YOUTU: ("youtu",),
    _CHAMELEON: ("chameleon",),
    (r"\p{N}+", r"(?=(\d{3})+(?!\d))"): ("superbpe",),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ): ("bailingmoe", "bailingmoe2", "llada-moe"),
    (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _BREAKS,): ("seed-coder",),
    ("[^\\n]+|[\\n]+", _QWEN_2): ("laguna",),
    (
        _CONTRACTION
        + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
        r"|\s+(?!\S)|\s+",
    ): ("exaone-moe",),
    (r"\p{N}{1,3}", _CL100K % "+" + _BREAKS): ("minicpm5",),
}
PATTERNS: Mapping[object, tuple[str, ...]] = {
    name: patterns for patterns, names in _WAYS.items() for name in names
}
"""The patterns of each name."""
_BEGUN_LLAMA_3 = (
    "falcon-h1",
    "falcon3",
    "jina-v5-nano",
    "lfm2",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "midm-2.0",
    "pixtral",
)
WHOLE_WORDS = frozenset((*_BEGUN_LLAMA_3, "minicpm5", "tekken", "youtu"))
"""The names of tokenizers for which a part that is a token is that one, even if no merges lead to it."""
BEGUN = frozenset((*_BEGUN_LLAMA_3, "chameleon", "tekken"))
"""The names of tokenizers that begin a text with the beginning-of-text token unless the file says otherwise."""
