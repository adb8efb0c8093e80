"""The native encoders and classification heads against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.configs.encoder_config import encoder_config
from nbengine.models.families.bert import BertModel
from nbengine.models.families.decoder_classifier import DecoderForSequenceClassification
from nbengine.models.layers.encoder_attention import group_prompts
from nbengine.models.loading import load_encoder_model

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 70,
    "pad_token_id": 1,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"type_vocab_size": 2}),
    "bert-tanh-gelu": ("Bert", {"hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
    "bert-relu": ("Bert", {"hidden_act": "relu"}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "roberta-other-padding": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 4}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
}
LENGTHS = [1, 1, 2, 7, 8, 8, 9, 30, 33, 60]

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def random_encoder() -> MakeModel:
    """Make an encoder of transformers in which every parameter matters, biases and norms included."""

    def make(kind: str, head: str = "Model", **settings: Any) -> PreTrainedModel:
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
        model = getattr(transformers, f"{kind}{head}")._from_config(config, attn_implementation="eager")
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
                parameter.copy_(1 + 0.3 * noise if "LayerNorm.weight" in name else noise * scale)
        return model.float().eval()

    return make


def load_encoder(directory: Path) -> BertModel:
    config = resolve_model(ModelConfig(model=str(directory), tokenizer="none"))
    return load_encoder_model(config, torch.device("cpu"), torch.float32)


def random_prompts(lengths: list[int], vocabulary: int = 90) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    # The first ids are special: RoBERTa gives padding no position.
    return [torch.randint(5, vocabulary, (length,), generator=generator) for length in lengths]


def run(model: BertModel, prompts: list[Tensor], segments: list[Tensor]) -> list[Tensor]:
    lengths = np.array([len(prompt) for prompt in prompts])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    groups = group_prompts(lengths, torch.device("cpu"))
    with torch.inference_mode():
        hidden = model.forward(torch.cat(prompts), positions, torch.cat(segments), groups)
    return list(hidden.split(lengths.tolist()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_hidden_states_of_transformers(
    variant: str, tmp_path: Path, random_encoder: MakeModel, compared: Any
) -> None:
    kind, settings = VARIANTS[variant]
    oracle = random_encoder(kind, **settings)
    oracle.save_pretrained(tmp_path)
    model = load_encoder(tmp_path)
    prompts = random_prompts(LENGTHS)
    kinds = oracle.config.type_vocab_size
    segments = [torch.arange(len(prompt)) * kinds // len(prompt) for prompt in prompts]
    for prompt, segment, hidden in zip(prompts, segments, run(model, prompts, segments), strict=True):
        with torch.inference_mode():
            expected = oracle(prompt[None], token_type_ids=segment[None]).last_hidden_state[0]
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
    compared(oracle, "cut")


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classification_heads_give_the_logits_of_transformers(
    kind: str, num_labels: int, tmp_path: Path, random_encoder: MakeModel
) -> None:
    oracle = random_encoder(kind, "ForSequenceClassification", num_labels=num_labels, type_vocab_size=2)
    oracle.save_pretrained(tmp_path)
    model = load_encoder(tmp_path)
    prompts = random_prompts(LENGTHS)
    hidden = run(model, prompts, [torch.zeros_like(prompt) for prompt in prompts])
    with torch.inference_mode():
        logits = model.classify(torch.stack([states[0] for states in hidden]))
        for prompt, row in zip(prompts, logits, strict=True):
            torch.testing.assert_close(row, oracle(prompt[None]).logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_decoders_with_a_classification_head_give_the_logits_of_transformers(
    kind: str, tmp_path: Path, load: Any, make_runner: Any, random_model: Any
) -> None:
    settings = {"num_labels": 3, "sliding_window": None} if kind == "Mistral" else {"num_labels": 3}
    oracle = random_model(kind, "ForSequenceClassification", **settings)
    oracle.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert isinstance(model, DecoderForSequenceClassification)
    prompts = {str(len(prompt)): prompt for prompt in random_prompts([1, 9, 40])}
    hidden = make_runner(model).hidden({name: prompt.tolist() for name, prompt in prompts.items()})
    for name, prompt in prompts.items():
        with torch.inference_mode():
            expected = oracle(prompt[None]).logits[0]
            logits = model.classify(hidden[name][-1:])[0]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_groups_cover_every_token_once_with_little_padding() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(1, 200, 100))
    groups = group_prompts(lengths, torch.device("cpu"))
    assert [group.start for group in groups] == [0, *(group.stop for group in groups[:-1])]
    assert groups[-1].stop == lengths.sum()
    assert sum(group.count for group in groups) == len(lengths)
    padded = sum(group.count * group.length for group in groups)
    assert padded <= 1.25 * lengths.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"architectures": ["RobertaModel"], "pad_token_id": 69}, "must be greater than pad_token_id"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": []}, "id2label must be an object"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused(change: dict[str, Any], message: str) -> None:
    config = {"architectures": ["BertModel"], **SIZES, **change}
    with pytest.raises(ModelLoadError, match=message):
        encoder_config(config)


def test_a_checkpoint_with_other_shapes_is_refused(tmp_path: Path, random_encoder: MakeModel) -> None:
    random_encoder("Bert").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 91}))
    with pytest.raises(ModelLoadError, match=r"word_embeddings\.weight has the shape \[90, 48\]"):
        load_encoder(tmp_path)
