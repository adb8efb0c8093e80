"""The child process of `nbengine.models.checkpoints.tokenizer_prepare`, which makes a tokenizer.json of another
vocabulary.

It is run as `python -m nbengine.models.checkpoints.tokenizer_convert DIRECTORY DESTINATION`.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.tokenizer_prepare import BESIDE, REFUSED, VOCABULARIES
from nbengine.models.configs.hf_config import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LOADER_LEFTOVERS = ("is_local", "local_files_only")
"""The arguments of the conversion's own load that transformers writes into tokenizer_config.json."""


def convert(directory: Path, destination: Path) -> None:
    """Write tokenizer.json and the files beside it into `destination`.

    Raises:
        ModelLoadError: transformers cannot convert this vocabulary, or lacks a package for it.
    """
    _read_without_their_packages()
    with tempfile.TemporaryDirectory(prefix="nbengine-tokenizer-") as staged:
        _link(directory, Path(staged))
        tokenizer = _load(Path(staged))
        tokenizer.save_pretrained(str(destination))
    templates = directory / "chat_template.json"
    if templates.is_file():
        shutil.copyfile(templates, destination / templates.name)
    path = destination / "tokenizer_config.json"
    content = {key: value for key, value in read_json_object(path).items() if key not in _LOADER_LEFTOVERS}
    _write_json(path, content)


def _link(directory: Path, staged: Path) -> None:
    """Link what a conversion needs: all but tokenizer.json, and under a name that transformers looks for."""
    for pattern in (*VOCABULARIES, *BESIDE):
        for path in directory.glob(pattern):
            link = staged / path.relative_to(directory)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.absolute())
    (legacy,) = [*staged.glob("*.tiktoken"), None][:1]
    if legacy is not None and not (staged / "tiktoken.model").exists():
        (staged / "tiktoken.model").symlink_to(legacy.resolve())


def _load(staged: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(staged), local_files_only=True)
    except Exception as error:
        # The reasons are as many as the classes, and transformers says what it lacks.
        raise ModelLoadError(f"{type(error).__name__}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(f"transformers converts no {type(tokenizer).__name__}")
    return tokenizer


def _read_without_their_packages() -> None:
    """Let transformers read vocabularies without the packages sentencepiece and tiktoken, of which it needs
    nothing but the reading of a file: a protocol buffer and lines of base64."""
    slow: Any = importlib.import_module("transformers.convert_slow_tokenizer")

    class Extractor(slow.SentencePieceExtractor):  # type: ignore[misc]
        def __init__(self, model: str) -> None:
            self.proto = slow.import_protobuf().ModelProto()
            try:
                self.proto.ParseFromString(Path(model).read_bytes())
            except Exception as error:
                raise ValueError(f"{Path(model).name} is no SentencePiece model: {error}") from error
            if not self.proto.pieces:
                raise ValueError(f"{Path(model).name} is a SentencePiece model without pieces")

    slow.SentencePieceExtractor = Extractor
    slow.SpmConverter.build_tokenizer_from_spm_proto = staticmethod(
        _with_first_space(slow.SpmConverter.build_tokenizer_from_spm_proto)
    )
    slow.TikTokenConverter.load_tiktoken_bpe = staticmethod(_tiktoken_ranks)


def _with_first_space(build: Callable[..., Tokenizer | None]) -> Callable[..., Tokenizer | None]:
    """Let tokenizers that have no class of their own in transformers put a space before a text where the
    SentencePiece model says so, as the classes do for theirs."""

    def built(proto: Any, vocab: Any, merges: Any = None) -> Tokenizer | None:
        tokenizer = build(proto=proto, vocab=vocab, merges=merges)
        if tokenizer is not None and proto.normalizer_spec.add_dummy_prefix:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            tokenizer.decoder = decoders.Sequence(
                [tokenizer.decoder, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        return tokenizer

    return built


def _tiktoken_ranks(path: str) -> dict[bytes, int]:
    """Read a file of tiktoken's: in each line a token in base64 and its rank."""
    ranks: dict[bytes, int] = {}
    try:
        for line in Path(path).read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise ValueError(
            f"{os.path.basename(path)} is neither a SentencePiece model nor a file of tiktoken's: {error}"
        ) from error
    if not ranks:
        raise ValueError(f"{os.path.basename(path)} is empty")
    return ranks


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run the child; the exit status is 0, or `REFUSED` with the reason on stderr."""
    directory, destination = map(Path, arguments)
    try:
        convert(directory, destination)
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
