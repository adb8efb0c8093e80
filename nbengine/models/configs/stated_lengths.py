"""The lengths that a model's files state beside the one that limits its requests; free of torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nbengine.config import ModelConfig
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.hf_config import (
    load_generation_config,
    load_hf_config,
    max_model_len_of,
    read_json_object,
    scaled_length_of,
    usual_model_len_of,
)
from nbengine.models.configs.usual_names import OTHER_NAMES

logger = logging.getLogger(__name__)

_DEFAULT_MAX_LENGTH = 20
"""The `max_length` that transformers writes where nobody has chosen one."""


def warn_of_shorter_lengths(config: ModelConfig, max_model_len: int) -> None:
    """Say in one warning which lengths, in tokens, the files of a resolved model state that are shorter than
    `max_model_len`: requests are not held to them.

    Raises:
        ModelLoadError: a file is no JSON object.
    """
    shorter = {name: length for name, length in _stated(config) if length < max_model_len}
    if shorter:
        logger.warning(
            "%s: the files state %s, where a prompt and its output may have %d tokens; max_model_len=%d keeps to that",
            config.directory,
            ", ".join(f"{name} {length}" for name, length in shorter.items()),
            max_model_len,
            min(shorter.values()),
        )


def warn_of_changed_angles(config: ModelConfig, max_model_len: int) -> None:
    """Say that a resolved model with dynamic rotary scaling turns all tokens as in texts of `max_model_len` tokens,
    where that is longer than its context.

    Raises:
        ModelLoadError: a file is no JSON object.
    """
    hf = load_hf_config(config)
    if hf.get("max_position_embeddings") is None or is_encoder(hf):
        return
    usual = usual_model_len_of(hf)
    if usual < max_model_len <= max_model_len_of(hf):
        logger.warning(
            "%s: max_model_len is %d, and dynamic scaling of the rotary embedding begins beyond %d tokens; all requests "
            "are computed with the angles for %d tokens, shorter ones, too",
            config.directory,
            max_model_len,
            usual,
            max_model_len,
        )


def _stated(config: ModelConfig) -> Iterator[tuple[str, int]]:
    hf = load_hf_config(config)
    yield from _lengths("config.json", hf, OTHER_NAMES["max_position_embeddings"])
    if hf.get("max_position_embeddings") is not None and (scaled := scaled_length_of(hf)) is not None:
        yield "the scaled rotary embedding (config.json)", scaled
    path = Path(config.tokenizer_files) / "tokenizer_config.json"
    yield from _lengths(path.name, read_json_object(path) if path.is_file() else {}, ["model_max_length"])
    if config.generation_config == "auto":
        stated = load_generation_config(config.directory)
        if stated.get("max_length") != _DEFAULT_MAX_LENGTH:
            yield from _lengths("generation_config.json", stated, ["max_length"])


def _lengths(file: str, stated: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        length = stated.get(name)
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            yield f"{name} ({file})", length
