"""The division of text into pieces as the header of a GGUF file says, where transformers' conversion does not do it.

llama.cpp's tokenizer (llama-vocab.cpp) defines what the entries mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbengine.errors import quoted
from nbengine.models.checkpoints.gguf import GGUFHeader
from nbengine.models.checkpoints.gguf_patterns import BEGUN, PATTERNS, WHOLE_WORDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def divide_as_stated(backend: Tokenizer, header: GGUFHeader) -> list[str]:
    """Let a converted tokenizer divide text as the header says; return the entries that it cannot follow, each as
    "name=value"."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _divide_bytes(backend, header.metadata.get("tokenizer.ggml.pre"))
    return _put_space(backend, header) if kind == "llama" else []


def begins_text(header: GGUFHeader) -> bool:
    """Return whether a byte-level tokenizer puts the beginning-of-text token before a text, though its file does not
    say so: llama.cpp's tokenizers with some names do."""
    stated = header.metadata
    return (
        stated.get("tokenizer.ggml.model") == "gpt2"
        and stated.get("tokenizer.ggml.pre") in BEGUN
        and "tokenizer.ggml.add_bos_token" not in stated
        and "tokenizer.ggml.bos_token_id" in stated
    )


def _divide_bytes(backend: Tokenizer, pre: object) -> list[str]:
    from tokenizers import Regex, pre_tokenizers
    from tokenizers.models import BPE

    if pre is None:
        # Files of early converters say nothing; transformers takes GPT-2's way.
        return []
    patterns = PATTERNS.get(pre) if isinstance(pre, str) else None
    if patterns is None:
        return [f"tokenizer.ggml.pre={quoted(pre)}"]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if isinstance(backend.model, BPE):
        backend.model.ignore_merges = pre in WHOLE_WORDS
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
