"""The child process of `nbengine.models.checkpoints.gguf_prepare`, which fills a prepared directory for one
GGUF file.

It is run as `python -m nbengine.models.checkpoints.gguf_tokenizer FILE DIRECTORY`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import generation_config, hf_config, num_tokens
from nbengine.models.checkpoints.gguf_prepare import REFUSED
from nbengine.models.configs.hf_config import read_json_object
from nbengine.models.registry import decoder_config

_LOADER_LEFTOVERS = ("is_local", "local_files_only")
"""The arguments of the conversion's own load that transformers writes into tokenizer_config.json."""


def write_prepared(gguf: Path, directory: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into `directory`.

    Raises:
        ModelLoadError: the file is corrupt or of an unsupported kind.
    """
    header = read_header(gguf)
    config = hf_config(header)
    decoder_config(config)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation_config(header))
    _write_tokenizer(gguf, directory, num_tokens(header))


def _write_tokenizer(gguf: Path, directory: Path, num_tokens: int) -> None:
    # AutoTokenizer gives the same tokenizer but parses the whole file twice more to choose its class.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(str(directory))
    _drop_entries(directory / "tokenizer_config.json", _LOADER_LEFTOVERS)
    _drop_invented_tokens(directory / "tokenizer.json", num_tokens)


def _drop_entries(path: Path, keys: tuple[str, ...]) -> None:
    content = read_json_object(path)
    _write_json(path, {key: value for key, value in content.items() if key not in keys})


def _drop_invented_tokens(path: Path, num_tokens: int) -> None:
    """Drop tokens beyond the vocabulary: transformers' byte-level class adds its default <|endoftext|> to a
    vocabulary without one, whose id would lie outside the model's embedding."""
    content = read_json_object(path)
    added = content["added_tokens"]
    known = [token for token in added if token["id"] < num_tokens]
    if len(known) < len(added):
        _write_json(path, {**content, "added_tokens": known})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run the child; the exit status is 0, or `REFUSED` with the reason on stderr."""
    gguf, directory = map(Path, arguments)
    try:
        write_prepared(gguf, directory)
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
