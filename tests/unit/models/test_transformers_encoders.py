"""Encoders through their classes of transformers, with our attention over flat batches, against the same classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.pooling_config import longest_model_len
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.families.bert import BertModel
from nbengine.models.families.transformers_encoder import TransformersEncoder
from nbengine.models.layers.encoder_attention import group_prompts
from nbengine.models.loading import load_encoder_model, weights_bytes_of
from tests.support.thorough import amount
from tests.tools.compared_models import ENCODERS_THROUGH_TRANSFORMERS

WINDOWED = {
    "pad_token_id": 0,
    "local_attention": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", {}),
    "RoBERTa: positions behind the padding token": ("Roberta", {"pad_token_id": 1}),
    "XLM-RoBERTa": ("XLMRoberta", {"pad_token_id": 3}),
    "RoBERTa with norms in front": ("RobertaPreLayerNorm", {"pad_token_id": 1}),
    "CamemBERT": ("Camembert", {"pad_token_id": 1}),
    "ModernBERT: windows in both directions": ("ModernBert", WINDOWED),
    "ModernBERT: the head takes the mean": ("ModernBert", {**WINDOWED, "classifier_pooling": "mean"}),
    "DistilBERT: sizes of other names": (
        "DistilBert",
        {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96},
    ),
    "ELECTRA: embeddings narrower than states": ("Electra", {"embedding_size": 24}),
    "ALBERT: one layer several times": ("Albert", {"embedding_size": 24}),
    "NomicBERT": ("NomicBert", {}),
    "GTE: queries, keys and values in one tensor of the file": ("Gte", {}),
    "EuroBERT: keys that heads share": ("EuroBert", {"pad_token_id": 0, "classifier_pooling": "mean"}),
    "ERNIE": ("Ernie", {}),
}
WITH_HEAD = [name for name in KINDS if not name.startswith(("ALBERT", "EuroBERT"))]
LENGTHS = (1, 2, 7, 8, 9, 9, 9, 31, 64)


def load(directory: Path, **settings: Any) -> EncoderModel:
    config = resolve_model(ModelConfig(model=str(directory), tokenizer="none", **settings))
    return load_encoder_model(config, torch.device("cpu"), torch.float32)


def written(
    random_model: Any, kind: str, head: str, directory: Path, settings: dict[str, Any]
) -> PreTrainedModel:
    model: PreTrainedModel = random_model(kind, head, **settings)
    model.save_pretrained(directory)
    return model


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 96, (length,), generator=generator) for length in LENGTHS]


def segments(lengths: tuple[int, ...], *, has_two: bool) -> list[Tensor]:
    return [(torch.arange(length) > length // 2).long() * has_two for length in lengths]


def flat_states(model: EncoderModel, rows: list[Tensor], types: list[Tensor]) -> Tensor:
    lengths = np.array([len(row) for row in rows], np.int64)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    groups = group_prompts(lengths, torch.device("cpu"))
    with torch.inference_mode():
        return model.forward(torch.cat(rows), positions, torch.cat(types), groups)


def has_segments(oracle: PreTrainedModel) -> bool:
    sizes = [m.num_embeddings for path, m in oracle.named_modules() if path.endswith("token_type_embeddings")]
    return sizes != [] and sizes[0] > 1


@pytest.mark.parametrize("name", KINDS)
def test_states_of_all_tokens_are_those_of_transformers_whatever_the_batch(
    name: str, tmp_path: Path, random_model: Any, compared: Any
) -> None:
    kind, settings = KINDS[name]
    oracle = written(random_model, kind, "Model", tmp_path, settings)
    model = load(tmp_path, model_impl="transformers")
    assert isinstance(model, TransformersEncoder)
    rows = prompts()
    types = segments(LENGTHS, has_two=has_segments(oracle))
    states = torch.split(flat_states(model, rows, types), LENGTHS)
    for row, own, found in zip(rows, types, states, strict=True):
        with torch.inference_mode():
            named = {"token_type_ids": own[None]} if has_segments(oracle) else {}
            want = oracle(row[None], **named).last_hidden_state[0]
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
        torch.testing.assert_close(flat_states(model, [row], [own]), want, rtol=0, atol=1e-5)
    compared(ENCODERS_THROUGH_TRANSFORMERS, "cut")


@pytest.mark.parametrize("name", WITH_HEAD)
def test_classes_are_those_of_transformers(name: str, tmp_path: Path, random_model: Any) -> None:
    kind, settings = KINDS[name]
    oracle = written(random_model, kind, "ForSequenceClassification", tmp_path, {**settings, "num_labels": 3})
    model = load(tmp_path, model_impl="transformers")
    rows = prompts()[:: amount(4, thorough=1)]
    lengths = tuple(map(len, rows))
    states = torch.split(flat_states(model, rows, segments(lengths, has_two=False)), lengths)
    takes_mean = settings.get("classifier_pooling") == "mean"
    pooled = torch.stack([own.mean(0) if takes_mean else own[0] for own in states])
    with torch.inference_mode():
        want = torch.cat([oracle(row[None]).logits for row in rows])
        torch.testing.assert_close(model.classify(pooled), want, rtol=0, atol=1e-5)


def test_a_model_that_fills_in_masked_tokens_runs_without_its_head(tmp_path: Path, random_model: Any) -> None:
    oracle = written(random_model, "ModernBert", "ForMaskedLM", tmp_path, WINDOWED)
    model = load(tmp_path)
    assert model.weights_bytes == sum(weight.nbytes for weight in oracle.model.parameters())
    (row,) = prompts()[-1:]
    with torch.inference_mode():
        want = oracle.model(row[None]).last_hidden_state[0]
    torch.testing.assert_close(flat_states(model, [row], [row * 0]), want, rtol=0, atol=1e-5)


def test_own_layers_come_first_and_those_of_transformers_where_there_are_none(
    tmp_path: Path, random_model: Any
) -> None:
    written(random_model, "Bert", "Model", tmp_path / "bert", {})
    written(random_model, "Electra", "Model", tmp_path / "electra", {})
    assert isinstance(load(tmp_path / "bert"), BertModel)
    assert isinstance(load(tmp_path / "electra"), TransformersEncoder)
    config = ModelConfig(directory=str(tmp_path / "electra"), model_impl="nbengine")
    assert not is_encoder(load_hf_config(config))


def test_sizes_are_known_before_weights_are_loaded(tmp_path: Path, random_model: Any) -> None:
    written(random_model, "Roberta", "Model", tmp_path, {"pad_token_id": 4})
    hf = load_hf_config(ModelConfig(directory=str(tmp_path), model_impl="transformers"))
    assert longest_model_len(hf) == 256 - 5
    model = load(tmp_path, model_impl="transformers")
    assert weights_bytes_of(hf, torch.float32) == model.weights_bytes
    assert sum(weight.nbytes for weight in model.parameters()) == model.weights_bytes


@pytest.mark.parametrize(
    ("kind", "head", "settings", "message"),
    [
        ("DebertaV2", "Model", {}, "attention of its own: the class takes no attention function"),
        ("MPNet", "Model", {}, "attention of its own: the class takes no attention function"),
        ("Bert", "Model", {"is_decoder": True}, "attention to earlier tokens only .is_decoder."),
        ("Albert", "ForSequenceClassification", {}, "a pooler that does not take hidden states"),
        (
            "EuroBert",
            "ForSequenceClassification",
            {"pad_token_id": 0, "classifier_pooling": "late"},
            "classifier_pooling must be one of",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_the_feature_that_is_missing(
    kind: str, head: str, settings: dict[str, Any], message: str, tmp_path: Path, random_model: Any
) -> None:
    written(random_model, kind, head, tmp_path, settings)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, model_impl="transformers")
