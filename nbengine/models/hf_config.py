"""The JSON files of a model directory: config.json, generation_config.json and what they say, free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError


def load_hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a resolved model, with `hf_overrides` replacing its top-level entries.

    Raises:
        ModelLoadError: the model is not resolved, or the file is missing or not a JSON object.
    """
    if not config.resolved:
        raise ModelLoadError(f"the files of {config.model!r} have not been looked for yet (resolve_model)")
    return {**read_json_object(Path(config.directory) / "config.json"), **config.hf_overrides}


def load_generation_config(directory: str) -> dict[str, Any]:
    """generation_config.json of a model directory, empty where there is none."""
    path = Path(directory) / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def max_model_len_of(hf: Mapping[str, Any]) -> int:
    """The longest sequence, in tokens, that the model computes correctly.

    A model with sliding-window attention equals one with full attention up to its window, and attention here
    is full, so the window caps the length.
    """
    length = positive(hf, "max_position_embeddings")
    window = hf.get("sliding_window")
    if window is None or not hf.get("use_sliding_window", True):
        return length
    return min(length, positive(hf, "sliding_window"))


def vocab_size(hf: Mapping[str, Any]) -> int:
    """Number of token ids that the model has logits for (the tokenizer may know fewer)."""
    return positive(hf, "vocab_size")


def eos_token_ids(directory: str, hf: Mapping[str, Any]) -> list[int]:
    """Tokens that end a text, the primary one first; empty where the model names none.

    They are taken from generation_config.json, else from `hf`, else from the tokenizer's files.
    """
    for source in (load_generation_config(directory), hf):
        stated = source.get("eos_token_id")
        if stated is not None:
            return _token_list(stated)
    token = _tokenizer_eos(Path(directory))
    return [] if token is None else [token]


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer at `key` of a configuration, `default` where it is missing or null.

    Raises:
        ModelLoadError: it is something else, or missing without a default.
    """
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The positive number at `key` of a configuration, `default` where it is missing or null.

    Raises:
        ModelLoadError: it is something else, or missing without a default.
    """
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelLoadError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`; anything else there raises `ModelLoadError`."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """The list of JSON objects in the file at `path`; anything else there raises `ModelLoadError`."""
    content = _read_json(path)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ModelLoadError(f"{path} does not hold a list of JSON objects")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


def _token_list(stated: object) -> list[int]:
    tokens = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
        raise ModelLoadError(f"eos_token_id must be a token id or a list of them, got {stated!r}")
    return list(dict.fromkeys(tokens))


def _tokenizer_eos(directory: Path) -> int | None:
    paths = (directory / "tokenizer_config.json", directory / "tokenizer.json")
    if not all(path.is_file() for path in paths):
        return None
    eos = read_json_object(paths[0]).get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    for token in read_json_object(paths[1]).get("added_tokens", []):
        if token.get("content") == eos:
            return int(token["id"])
    return None
