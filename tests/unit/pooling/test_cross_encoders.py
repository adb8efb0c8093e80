"""Classification heads through the engine: probabilities, and scores of two texts judged together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from word_tokenizer import SPECIAL, WORDS, bert_tokenizer

from nbengine import LLM, PoolingParams
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.models.checkpoints.tiny import random_tiny

TEXTS = [" ".join(WORDS[start : start + length]) for start, length in ((0, 3), (5, 20), (30, 1), (10, 9))]
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

MakeModel = Callable[..., tuple[LLM, PreTrainedModel, PreTrainedTokenizerFast]]


@pytest.fixture
def make_model(tmp_path: Path) -> Iterator[MakeModel]:
    """A random model of transformers with a classification head, and ours of the same weights."""
    engines: list[LLM] = []

    def make(
        kind: str, num_labels: int, **options: Any
    ) -> tuple[LLM, PreTrainedModel, PreTrainedTokenizerFast]:
        directory = tmp_path / kind
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(num_labels=num_labels, **SIZES)
        oracle = getattr(transformers, f"{kind}ForSequenceClassification")(config).float().eval()
        with torch.no_grad():
            for parameter in oracle.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        oracle.save_pretrained(directory)
        tokenizer = bert_tokenizer()
        tokenizer.save_pretrained(directory)
        engines.append(LLM(str(directory), multiprocess=False, num_gpu_blocks_override=32, **options))
        return engines[-1], oracle, tokenizer

    yield make
    for engine in engines:
        engine.shutdown()


def logits_of(oracle: PreTrainedModel, *encodings: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([oracle(**encoding).logits for encoding in encodings])


def encoded(tokenizer: PreTrainedTokenizerFast, kind: str, *texts: str) -> Any:
    return tokenizer(*texts, return_tensors="pt", return_token_type_ids=kind in ("Bert", "Electra"))


@pytest.mark.parametrize("kind", ["Bert", "Llama", "Qwen3", "ModernBert", "StableLm"])
def test_classes_have_the_softmax_of_transformers_logits(kind: str, make_model: MakeModel) -> None:
    llm, oracle, tokenizer = make_model(kind, 3)
    want = logits_of(oracle, *(encoded(tokenizer, kind, text) for text in TEXTS))
    outputs = llm.classify(TEXTS, use_tqdm=False)
    assert outputs[0].outputs.num_classes == 3
    probs = [output.outputs.probs for output in outputs]
    np.testing.assert_allclose(probs, want.softmax(1).numpy(), rtol=0, atol=1e-5)
    raw = llm.classify(TEXTS, use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    np.testing.assert_allclose([o.outputs.probs for o in raw], want.numpy(), rtol=0, atol=1e-5)
    assert llm.get_supported_tasks() == ("classify", "encode")
    with pytest.raises(InvalidArgumentError, match="task must be one of classify, encode"):
        llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)


@pytest.mark.parametrize("kind", ["Bert", "Llama", "Qwen2", "Electra", "StableLm"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}], ids=["whole", "chunks"])
def test_a_cross_encoder_scores_pairs_by_the_sigmoid_of_its_logit(
    kind: str, options: dict[str, Any], make_model: MakeModel
) -> None:
    llm, oracle, tokenizer = make_model(kind, 1, **options)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    want = logits_of(oracle, *(encoded(tokenizer, kind, *pair) for pair in pairs)).sigmoid()[:, 0]
    outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    np.testing.assert_allclose([o.outputs.score for o in outputs], want.numpy(), rtol=0, atol=1e-5)
    assert [o.prompt_token_ids for o in outputs] == [tokenizer(*pair)["input_ids"] for pair in pairs]
    assert llm.get_supported_tasks() == ("score", "classify", "encode")
    with pytest.raises(InvalidTypeError, match="judges two texts together"):
        llm.score({"prompt_token_ids": [5]}, "w1", use_tqdm=False)


@pytest.mark.parametrize("length", [3, 4, 7, 12, 20])
def test_pairs_are_truncated_longest_first_as_transformers_does_it(
    length: int, make_model: MakeModel
) -> None:
    llm, oracle, tokenizer = make_model("Bert", 1)
    for pair in ((TEXTS[1], TEXTS[3]), (TEXTS[2], TEXTS[1]), (TEXTS[1], TEXTS[1])):
        want = tokenizer(
            *pair,
            truncation="longest_first",
            max_length=length,
            return_tensors="pt",
            return_token_type_ids=True,
        )
        (output,) = llm.score(*pair, truncate_prompt_tokens=length, use_tqdm=False)
        assert output.prompt_token_ids == want["input_ids"][0].tolist()
        score = float(logits_of(oracle, want).sigmoid())
        assert output.outputs.score == pytest.approx(score, abs=1e-5)


def test_fewer_tokens_than_the_special_ones_are_refused(make_model: MakeModel) -> None:
    llm, _, tokenizer = make_model("Bert", 1)
    # The tokenizer of transformers does not cut at all then: it has no such length, either.
    assert len(tokenizer(*TEXTS[:2], truncation="longest_first", max_length=2)["input_ids"]) > 3
    for length in (1, 2):
        with pytest.raises(InvalidArgumentError) as refused:
            llm.score(TEXTS[0], TEXTS, truncate_prompt_tokens=length, use_tqdm=False)
        assert str(refused.value) == (
            "truncate_prompt_tokens must be at least 3, the special tokens around two texts judged together, "
            f"got {length}"
        )
    params = PoolingParams(truncate_prompt_tokens=1)
    for asked in (llm.classify, llm.encode):
        with pytest.raises(InvalidArgumentError) as refused:
            asked([TEXTS[1], {"prompt": TEXTS[0]}], pooling_params=params, use_tqdm=False)
        assert str(refused.value) == (
            "truncate_prompt_tokens must be at least 2, the special tokens around a text, got 1"
        )
    # Token ids have what their caller has put around them.
    (output,) = llm.classify({"prompt_token_ids": [5, 6, 7]}, truncate_prompt_tokens=1, use_tqdm=False)
    assert output.prompt_token_ids == [5]
    for length in (2, 3):
        (output,) = llm.classify(TEXTS[1], truncate_prompt_tokens=length, use_tqdm=False)
        want = tokenizer(TEXTS[1], truncation=True, max_length=length)["input_ids"]
        assert output.prompt_token_ids == want


def test_a_context_without_room_for_the_special_tokens_is_named(make_model: MakeModel) -> None:
    llm, _, _ = make_model("Bert", 1, max_model_len=2)
    with pytest.raises(
        InvalidArgumentError, match=r"^max_model_len must be at least 3, the special tokens.*got 2$"
    ):
        llm.score(TEXTS[0], TEXTS[1], truncate_prompt_tokens=-1, use_tqdm=False)


def test_one_label_is_refused_where_a_text_count_does_not_fit(tmp_path: Path) -> None:
    directory = random_tiny(tmp_path, seed=0)
    with LLM(str(directory), multiprocess=False, num_gpu_blocks_override=8) as llm:
        for first, second in ((["a", "b"], ["c"]), (["a", "b"], ["c", "d", "e"]), ("a", [])):
            with pytest.raises(InvalidArgumentError, match="1 and 1, 1 and N, or N and N"):
                llm.score(first, second, use_tqdm=False)
        with pytest.raises(InvalidArgumentError, match="a score of this model needs two texts"):
            llm.encode("a", pooling_task="score", use_tqdm=False)
        with pytest.raises(InvalidArgumentError, match="task must be one of generate, embed, score, encode"):
            llm.classify("a", use_tqdm=False)
    shutil.rmtree(directory)
