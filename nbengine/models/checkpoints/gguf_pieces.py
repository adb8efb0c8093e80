"""The division of text into pieces as the header of a GGUF file says, where transformers' conversion does not do it.

llama.cpp's tokenizer (llama-vocab.cpp) defines what the entries mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbengine.errors import quoted
from nbengine.models.checkpoints.gguf import GGUFHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Pre-tokenizers that are GPT-2's, with each digit by itself."""
_LIKE_GPT_2 = (
    "gpt-2",
    "gigachat",
    "granite-docling",
    "jais",
    "jina-de",
    "jina-es",
    "jina-v1-en",
    "jina-v2-code",
    "jina-v2-de",
    "jina-v2-es",
    "mpt",
    "olmo",
    "phi-2",
    "roberta-bpe",
    "trillion",
)
_LIKE_LLAMA_3 = ("chatglm-bpe", "glm4")
"""Pre-tokenizers that are Llama 3's, and that transformers does not know."""


def divide_as_stated(backend: Tokenizer, header: GGUFHeader) -> list[str]:
    """Let a converted tokenizer divide text as the header says; return the entries that it cannot follow, each as
    "name=value"."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _divide_bytes(backend, header.metadata.get("tokenizer.ggml.pre"))
    return _put_space(backend, header) if kind == "llama" else []


def _divide_bytes(backend: Tokenizer, pre: object) -> list[str]:
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in _DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _LIKE_LLAMA_3:
        from tokenizers import Regex

        split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    elif pre is not None and pre not in _LIKE_GPT_2 and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        return [f"tokenizer.ggml.pre={quoted(pre)}"]
    return []


def _put_space(backend: Tokenizer, header: GGUFHeader) -> list[str]:
    """Let a SentencePiece tokenizer begin a text with a space, or not."""
    from tokenizers import decoders, pre_tokenizers

    wanted = header.metadata.get("tokenizer.ggml.add_space_prefix")
    if (
        not isinstance(wanted, bool)
        or backend.encode("a", add_special_tokens=False).tokens[0].startswith("▁") is wanted
    ):
        return []
    if wanted or backend.normalizer is not None:
        # Gemma's and Phi 3's ways are part of their classes in transformers.
        return [f"tokenizer.ggml.add_space_prefix={wanted}"]
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return []
