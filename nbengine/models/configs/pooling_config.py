"""The tasks that a model can be asked for, and the pooling that its authors mean. Free of torch.

sentence-transformers describes a model in modules.json, the folder of its Pooling module, and
sentence_bert_config.json; a model without these has the defaults of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.configs.encoder_config import any_encoder_config, is_encoder
from nbengine.models.configs.hf_config import (
    max_model_len_of,
    num_labels_of,
    positive,
    read_json_object,
    read_json_objects,
    usual_model_len_of,
)
from nbengine.models.registry import decoder_config

_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True)
class PoolingDefaults:
    """The way in which vectors are pooled unless a request says otherwise.

    `pooling` is None where the model's own way is not among ours; `max_seq_length` where none is advised.
    """

    pooling: str | None
    normalize: bool = True
    max_seq_length: int | None = None


def supported_tasks(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """List the tasks that a model can be asked for: "generate" first, the others in the order in which they
    are defaults."""
    num_labels = num_labels_of(hf)
    if num_labels == 1:
        return ("score", "classify", "encode")
    if num_labels:
        return ("classify", "encode")
    vectors = ("embed", "score", "encode")
    return vectors if is_encoder(hf) else ("generate", *vectors)


def takes_prompt_embeds(hf: Mapping[str, Any]) -> bool:
    """Return whether prompts can be given as embeddings: not to encoders, nor to models whose layers have embeddings of
    token ids of their own."""
    return not is_encoder(hf) and not decoder_config(hf).layer_inputs


def longest_model_len(hf: Mapping[str, Any]) -> int:
    """Return the longest sequence, in tokens, that a model can take."""
    if is_encoder(hf):
        return any_encoder_config(hf).max_model_len
    # A family may know what a configuration leaves out.
    stated = hf.get("max_position_embeddings") is not None
    return max_model_len_of(hf) if stated else decoder_config(hf).max_position_embeddings


def advised_model_len(directory: str, hf: Mapping[str, Any]) -> int:
    """Return the longest sequence, in tokens, unless somebody asks for a longer one: what the authors advise, and what
    costs shorter sequences nothing."""
    is_stated = not is_encoder(hf) and hf.get("max_position_embeddings") is not None
    longest = usual_model_len_of(hf) if is_stated else longest_model_len(hf)
    advised = load_pooling_defaults(directory, hf).max_seq_length
    return longest if advised is None else min(longest, advised)


def load_pooling_defaults(directory: str, hf: Mapping[str, Any]) -> PoolingDefaults:
    """Load the pooling defaults of a model directory whose config.json says `hf`.

    Without the files of sentence-transformers an encoder takes the first token ("cls"), a decoder the last
    one, and both normalise.

    Raises:
        ModelLoadError: a file is malformed, or asks for a module that is not supported.
    """
    own = PoolingDefaults("cls" if is_encoder(hf) else "last", max_seq_length=_max_seq_length(directory))
    path = Path(directory) / "modules.json"
    if num_labels_of(hf) or not path.is_file():
        return own
    kinds = {str(module.get("type")).rpartition(".")[2]: module for module in read_json_objects(path)}
    unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise ModelLoadError(f"{path}: the modules {', '.join(sorted(unknown))} are not supported")
    pooling = own.pooling
    if "Pooling" in kinds:
        pooling = _pooling_mode(Path(directory) / str(kinds["Pooling"].get("path", "")) / "config.json")
    return PoolingDefaults(pooling, "Normalize" in kinds, own.max_seq_length)


def _pooling_mode(path: Path) -> str | None:
    config = read_json_object(path)
    if "pooling_mode" in config:
        return _POOLING_NAMES.get(str(config["pooling_mode"]))
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return _POOLING_FLAGS.get(chosen[0]) if len(chosen) == 1 else None


def _max_seq_length(directory: str) -> int | None:
    path = Path(directory) / "sentence_bert_config.json"
    if not path.is_file():
        return None
    content = read_json_object(path)
    return positive(content, "max_seq_length") if content.get("max_seq_length") is not None else None
