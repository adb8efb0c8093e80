"""The JSON files of a model directory: config.json, generation_config.json and what they say, free of
torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.regular_files import check_regular
from nbengine.models.configs.usual_names import with_usual_names

_ROPE_NAMES = frozenset(("rope_scaling", "rope_parameters"))
_KEPT = ("rope_theta", "partial_rotary_factor")
"""The entries for a rotary embedding that hold whatever its scaling is."""
_OF_THE_TEXT = ("architectures", "model_type")
"""The entries of a `text_config` that are about the text alone."""
_ORIGINAL = "original_max_position_embeddings"
_LENGTHENING = ("linear", "dynamic", "yarn")
"""The kinds of rotary scaling whose factor multiplies `max_position_embeddings`."""
_SCALED_ALREADY = "gemma3"
"""The beginning of the types of models whose `max_position_embeddings` is the longer context."""
FAMILIES_KEY = "nbengine_families"
"""The entry with the families that were registered for some architectures (`ModelConfig.families`)."""
MODEL_IMPL_KEY = "nbengine_model_impl"
CLASSIFIER = "ForSequenceClassification"
"""The ending of the names of classes with a classification head."""
_DEFAULT_LABELS = 2
"""The number that transformers assumes where config.json names no labels."""
"""The entry with `ModelConfig.model_impl`; where it is missing, it is "auto"."""


def load_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Read the config.json of a resolved model, with `hf_overrides` replacing its top-level entries.

    Of a model of text and images, the entries of its decoder (`text_config`) are at the top level, too, those of
    `hf_overrides` as well as those of the file.

    Raises:
        ModelLoadError: the model is not resolved, or the file is missing or not a JSON object.
    """
    if not config.resolved:
        raise ModelLoadError(f"the files of {config.model!r} have not been looked for yet (resolve_model)")
    stated = read_json_object(Path(config.directory) / "config.json")
    overrides = _with_text_overrides(stated, config.hf_overrides)
    found = with_usual_names(_overridden(with_text_config(stated), overrides))
    # A file names no code that is to be imported.
    found.pop(FAMILIES_KEY, None)
    found.pop(MODEL_IMPL_KEY, None)
    if config.model_impl != "auto":
        found[MODEL_IMPL_KEY] = config.model_impl
    return {**found, FAMILIES_KEY: config.families} if config.families else found


def _with_text_overrides(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return overrides with the entries of their `text_config` at the top level, which replace those of the file's
    `text_config` one by one."""
    text, before = overrides.get("text_config"), stated.get("text_config")
    if not isinstance(text, Mapping):
        return overrides
    merged = {**before, **text} if isinstance(before, Mapping) else text
    inside = {key: value for key, value in text.items() if key not in _OF_THE_TEXT}
    return {**inside, **overrides, "text_config": merged}


def _overridden(stated: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with entries replaced, and with what is said of rotary embeddings under one name.

    Where a file has both names, `rope_scaling` counts, as in transformers. What is overridden counts under either name,
    and keeps the file's base and the part of a head that is turned unless it says others.
    """
    found = {key: value for key, value in {**stated, **overrides}.items() if key not in _ROPE_NAMES}
    before, is_new = _rope_entry(stated), not _ROPE_NAMES.isdisjoint(overrides)
    rope = _rope_entry(overrides) if is_new else before
    # There may be one for each type of layer.
    if isinstance(rope, Mapping) and not any(isinstance(each, Mapping) for each in rope.values()):
        kept = before if is_new and isinstance(before, Mapping) else {}
        # Where nothing is stated, a family may assume scaling, and a base alone does not replace it.
        sources = (kept, rope, overrides) if kept or rope else ()
        said = {key: each[key] for each in sources for key in _KEPT if each.get(key) is not None}
        rope = {**rope, **said}
    return {**found, "rope_parameters": rope} if rope else found


def _rope_entry(stated: Mapping[str, Any]) -> Any:
    return stated.get("rope_scaling") or stated.get("rope_parameters") or {}


def with_text_config(stated: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the entries of its `text_config`, if it has one, at the top level."""
    text = stated.get("text_config")
    if not isinstance(text, dict):
        return stated
    return {**text, **{key: value for key, value in stated.items() if value is not None}}


def load_generation_config(directory: str) -> dict[str, Any]:
    """Read the generation_config.json of a model directory; the result is empty where there is none."""
    path = Path(directory) / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def max_model_len_of(hf: Mapping[str, Any]) -> int:
    """Return the longest sequence, in tokens, that a model can take: `max_position_embeddings`, which scaling of the
    rotary embedding lengthens (linear, dynamic, YaRN; other kinds are counted in it already)."""
    return max([positive(hf, "max_position_embeddings"), *_scaled_lengths(hf)])


def usual_model_len_of(hf: Mapping[str, Any]) -> int:
    """Return the longest sequence, in tokens, of a model unless somebody asks for more: with dynamic scaling all angles
    change beyond `max_position_embeddings`, so that longer sequences cost the shorter ones something."""
    length = positive(hf, "max_position_embeddings")
    kinds = [kind for kind, _ in _scalings(hf)]
    return length if "dynamic" in kinds else max([length, *_scaled_lengths(hf)])


def scaled_length_of(hf: Mapping[str, Any]) -> int | None:
    """Return the length, in tokens, that the scaling of the rotary embedding gives; None where it gives none."""
    return max(_scaled_lengths(hf), default=None)


def _scaled_lengths(hf: Mapping[str, Any]) -> list[int]:
    length = positive(hf, "max_position_embeddings")
    originals = [
        (kind, rope, original_length_of(hf if kind == "yarn" else {}, rope)) for kind, rope in _scalings(hf)
    ]
    # YaRN without an original context stretches one that is not stated, so that nothing follows from it.
    return [
        int(number(rope, "factor") * (original or length))
        for kind, rope, original in originals
        if kind != "yarn" or original is not None
    ]


def original_length_of(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> int | None:
    """Return the context, in tokens, that the scaling of a rotary embedding starts from; None where nothing is said
    of it. What stands beside the scaling counts before what stands within, as in transformers."""
    source = rope if hf.get(_ORIGINAL) is None else hf
    return None if source.get(_ORIGINAL) is None else positive(source, _ORIGINAL)


def _scalings(hf: Mapping[str, Any]) -> list[tuple[object, Mapping[str, Any]]]:
    """Return the kinds of scaling that lengthen a context, with what is said of each."""
    if str(hf.get("model_type", "")).startswith(_SCALED_ALREADY):
        return []
    stated = stated_rope(hf)
    # There may be one for each type of layer.
    ropes = [stated, *(each for each in stated.values() if isinstance(each, Mapping))]
    found = [(rope.get("rope_type", rope.get("type")), rope) for rope in ropes]
    return [(kind, rope) for kind, rope in found if kind in _LENGTHENING and rope.get("factor") is not None]


def stated_rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a configuration says of rotary embeddings: `rope_parameters` (transformers 5), else
    `rope_scaling`.

    Raises:
        ModelLoadError: it is no object.
    """
    stated = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters must be an object, got {quoted(stated)}")
    return stated


def vocab_size(hf: Mapping[str, Any]) -> int:
    """Return the number of token ids for which the model has logits (the tokenizer may know fewer)."""
    return positive(hf, "vocab_size")


def eos_token_ids(directory: str, hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text, the primary one first; empty where the model names none.

    They are taken from `overrides` of the configuration, else from generation_config.json, else from `hf`, else from the
    tokenizer's files.
    """
    for source in (overrides, load_generation_config(directory), hf):
        stated = source.get("eos_token_id")
        if stated is not None:
            return _token_list(stated)
    token = _tokenizer_eos(Path(directory))
    return [] if token is None else [token]


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the positive integer at `key` of a configuration, `default` where it is missing or null.

    Raises:
        ModelLoadError: the value is something else, or missing without a default.
    """
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def natural(hf: Mapping[str, Any], key: str, default: int) -> int:
    """Return the integer from 0 on at `key` of a configuration, `default` where it is missing or null.

    Raises:
        ModelLoadError: the value is something else.
    """
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelLoadError(f"config.json: {key} must be an integer from 0 on, got {quoted(value)}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return the positive number at `key` of a configuration, `default` where it is missing or null.

    Raises:
        ModelLoadError: the value is something else, or missing without a default.
    """
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelLoadError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file at `path`; anything else there raises `ModelLoadError`."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """Read the list of JSON objects in the file at `path`; anything else there raises `ModelLoadError`."""
    content = _read_json(path)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ModelLoadError(f"{path} does not hold a list of JSON objects")
    return content


def _read_json(path: Path) -> Any:
    check_regular(path)
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


def num_labels_of(hf: Mapping[str, Any]) -> int:
    """Return the number of labels of a model with a classification head, 0 for a model without one."""
    if not any(str(name).endswith(CLASSIFIER) for name in hf.get("architectures") or ()):
        return 0
    labels = hf.get("id2label")
    if labels is None:
        return positive(hf, "num_labels", _DEFAULT_LABELS)
    if not isinstance(labels, Mapping) or not labels:
        raise ModelLoadError(f"config.json: id2label must be an object with labels, got {labels!r}")
    return len(labels)


def label_names(hf: Mapping[str, Any]) -> list[str]:
    """Return the names of the labels of a model with a classification head, in their order; those without a
    name are called LABEL_0, LABEL_1 and so on, as transformers does it."""
    names = hf.get("id2label") or {}
    return [str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels_of(hf))]
