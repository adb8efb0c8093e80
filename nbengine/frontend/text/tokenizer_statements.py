"""This module finds what the files beside a tokenizer.json say of text and that file has otherwise.

tokenizer.json counts here, because it describes the whole tokenizer. The classes that transformers has for
single models make parts of it again, of what tokenizer_config.json says; where the two differ, tokens differ.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbengine.config import ModelConfig
from nbengine.errors import quoted
from nbengine.models.checkpoints.tokenizer_prepare import NOT_APPLIED
from nbengine.models.configs.hf_config import read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The classes of transformers that take tokenizer.json as it is, and ignore the rest."""
_MARKS = ("▁", "Ġ")
_FLAGS = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")


def unmet_statements(directory: Path, backend: Tokenizer) -> list[str]:
    """Return what the files in a tokenizer's directory say of text and the tokenizer does not do, each as
    "name=value".

    Raises:
        ModelLoadError: a file is no JSON object.
    """
    stated = _object(directory / "tokenizer_config.json")
    found = [str(entry) for entry in stated.get(NOT_APPLIED) or ()]
    if stated.get("tokenizer_class") not in _GENERIC:
        kind = type(backend.model).__name__
        for name, (what_is, kinds) in _TRUTHS.items():
            says = stated.get(name)
            if isinstance(says, bool) and (not kinds or kind in kinds) and what_is(backend) is (not says):
                found.append(f"{name}={says}")
        found += [*_other_tokens(stated, backend), *_other_specials(stated, backend)]
    if _object(directory / "sentence_bert_config.json").get("do_lower_case") is True and not _lowers(backend):
        found.append("do_lower_case=True (sentence_bert_config.json)")
    return found


def warn_of_unmet_statements(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Say in one warning what the files beside a resolved model's tokenizer.json ask for in vain.

    Raises:
        ModelLoadError: a file is no JSON object.
    """
    directory = Path(config.tokenizer_files)
    if unmet := unmet_statements(directory, tokenizer.backend_tokenizer):
        logger.warning(
            "%s: the files of the tokenizer say %s, which is not applied: tokenizer.json has it otherwise",
            directory,
            ", ".join(unmet),
        )


def _object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


# What a tokenizer does, as its own behaviour shows it; None where the question makes no sense.


def _normalized(backend: Tokenizer, text: str) -> str:
    return text if backend.normalizer is None else str(backend.normalizer.normalize_str(text))


def _pieces(backend: Tokenizer, text: str) -> list[str]:
    normalized = _normalized(backend, text)
    if backend.pre_tokenizer is None:
        return [normalized]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normalized)]


def _begins_with_space(backend: Tokenizer) -> bool | None:
    if not any(mark in piece for piece in _pieces(backend, "a b") for mark in _MARKS):
        return None
    return _pieces(backend, "a")[0].startswith(_MARKS)


def _repeats_space(backend: Tokenizer) -> bool | None:
    """Tell whether SentencePiece's space comes behind each special token, not only at the beginning of a text."""
    special = next((str(t) for t in backend.get_added_tokens_decoder().values() if t.special), None)
    if special is None or not _pieces(backend, "a")[0].startswith(_MARKS[0]):
        return None
    tokens = backend.encode(f"{special}a", add_special_tokens=False).tokens
    return len(tokens) > 1 and tokens[1].startswith(_MARKS[0])


def _lowers(backend: Tokenizer) -> bool:
    return "A" not in _normalized(backend, "A")


def _strips_accents(backend: Tokenizer) -> bool:
    return "é" not in unicodedata.normalize("NFC", _normalized(backend, "é"))


def _splits_chinese(backend: Tokenizer) -> bool:
    return "東京" not in _normalized(backend, "東京")


_WORD_PIECE, _UNIGRAM = "WordPiece", "Unigram"
_TRUTHS: Mapping[str, tuple[Callable[[Tokenizer], bool | None], tuple[str, ...]]] = {
    "add_prefix_space": (_begins_with_space, ()),
    "legacy": (_repeats_space, ()),
    "do_lower_case": (_lowers, (_WORD_PIECE, _UNIGRAM)),
    "strip_accents": (_strips_accents, (_WORD_PIECE,)),
    "keep_accents": (lambda backend: not _strips_accents(backend), (_UNIGRAM,)),
    "tokenize_chinese_chars": (_splits_chinese, (_WORD_PIECE,)),
}
"""The truth about a tokenizer that each entry states, and the kinds of models that the entry is for, if not all."""


def _other_tokens(stated: Mapping[str, Any], backend: Tokenizer) -> list[str]:
    """Return the entries of `added_tokens_decoder` that have another id or other properties in the tokenizer."""
    entries = stated.get("added_tokens_decoder")
    known = backend.get_added_tokens_decoder()
    found = []
    for token_id, says in entries.items() if isinstance(entries, Mapping) else ():
        token = known.get(int(token_id))
        for flag in _FLAGS if isinstance(says, Mapping) else ():
            is_so = getattr(token, flag, None)
            if flag in says and says[flag] != is_so:
                found.append(f"added_tokens_decoder[{token_id}].{flag}={quoted(says[flag])}")
    return found


def _other_specials(stated: Mapping[str, Any], backend: Tokenizer) -> list[str]:
    """Return the tokens for what is unknown, and for both ends of a text, where the tokenizer has others there."""
    text, whole = (backend.encode("a", add_special_tokens=special).tokens for special in (False, True))
    start = next(at for at in range(len(whole) + 1) if whole[at : at + len(text)] == text)
    before, behind = whole[:start], whole[start + len(text) :]
    places = {"bos_token": before, "cls_token": before, "eos_token": behind, "sep_token": behind}
    unknown = getattr(backend.model, "unk_token", None)
    places["unk_token"] = [] if unknown is None else [unknown]
    says = {name: _content(stated.get(name)) for name in places}
    return [
        f"{name}={quoted(says[name])}"
        for name, found in places.items()
        if found and says[name] is not None and says[name] not in found
    ]


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None
