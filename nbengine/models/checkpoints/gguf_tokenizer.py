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
from nbengine.models.checkpoints.gguf import GGUFHeader, read_header
from nbengine.models.checkpoints.gguf_config import generation_config, hf_config, num_tokens
from nbengine.models.checkpoints.gguf_pieces import begins_text, divide_as_stated
from nbengine.models.checkpoints.gguf_prepare import REFUSED
from nbengine.models.checkpoints.tokenizer_prepare import NOT_APPLIED
from nbengine.models.configs.hf_config import read_json_object
from nbengine.models.registry import decoder_config

_NAMED_TEMPLATE = "tokenizer.chat_template."
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
    _write_tokenizer(gguf, directory, header)


def _write_tokenizer(gguf: Path, directory: Path, header: GGUFHeader) -> None:
    # AutoTokenizer gives the same tokenizer but parses the whole file twice more to choose its class.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    unmet = divide_as_stated(tokenizer.backend_tokenizer, header)
    if begins_text(header):
        tokenizer.add_bos_token = True
    tokenizer.save_pretrained(str(directory))
    path = directory / "tokenizer_config.json"
    content = {key: value for key, value in read_json_object(path).items() if key not in _LOADER_LEFTOVERS}
    _write_json(path, {**content, NOT_APPLIED: unmet} if unmet else content)
    _drop_invented_tokens(directory / "tokenizer.json", num_tokens(header))
    _write_further_templates(directory / "additional_chat_templates", header)


def _write_further_templates(directory: Path, header: GGUFHeader) -> None:
    """Write the chat templates that have a name, such as "tool_use", as files."""
    for key, template in header.metadata.items():
        name = key.removeprefix(_NAMED_TEMPLATE)
        if name != key and isinstance(template, str) and name.replace("-", "_").isidentifier():
            directory.mkdir(exist_ok=True)
            (directory / f"{name}.jinja").write_text(template, encoding="utf-8")


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
