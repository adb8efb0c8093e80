"""all-minilm-l6-v2, as it comes out of the model cache, against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nbengine import LLM, PoolingParams
from nbengine.errors import InvalidArgumentError, RequestError
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORDS = [
    "a",
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "quickly",
    "on",
    "under",
    "river",
    "bank",
    "money",
    "naïve",
    "東京",
    "🙂",
    "2024",
    "unbelievable",
]
PAIRS = [
    ("A man is playing a guitar.", "Someone plays music on a stringed instrument."),
    ("How do I reset my password?", "I forgot my login credentials, what now?"),
    ("The stock market fell sharply.", "Shares dropped a lot today."),
    ("She baked a chocolate cake.", "A dessert came out of her oven."),
]


def texts(count: int) -> list[str]:
    random = Random(1)
    return [" ".join(random.choices(WORDS, k=random.randint(1, 120))) for _ in range(count)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("all-minilm-l6-v2", multiprocess=False, max_num_batched_tokens=700) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(llm: LLM) -> PreTrainedModel:
    from transformers import BertModel

    directory = llm.llm_engine.config.model.directory
    return BertModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def sentence_vectors(llm: LLM, oracle: PreTrainedModel, sentences: list[str]) -> NDArray[np.float32]:
    """Compute vectors as sentence-transformers defines them: the mean over a batch's own tokens,
    normalised."""
    tokenizer = llm.get_tokenizer()
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        hidden = oracle(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None].float()
    means = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means).numpy()


def test_embeddings_are_those_of_transformers_whatever_the_batch(llm: LLM, oracle: PreTrainedModel) -> None:
    sentences = texts(40)
    want = np.concatenate([sentence_vectors(llm, oracle, [sentence]) for sentence in sentences])
    outputs = llm.embed(sentences, use_tqdm=False)
    assert [output.prompt for output in outputs] == sentences
    assert {output.outputs.hidden_size for output in outputs} == {384}
    np.testing.assert_allclose([o.outputs.embedding for o in outputs], want, rtol=0, atol=1e-5)
    alone = np.concatenate([llm.embed(s, use_tqdm=False)[0].outputs.embedding for s in sentences[:8]])
    np.testing.assert_allclose(alone.reshape(8, -1), want[:8], rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [-1, 3, 17])
def test_long_texts_are_truncated_as_the_tokenizer_does_it(
    length: int, llm: LLM, oracle: PreTrainedModel
) -> None:
    sentence = " ".join(WORDS * 40)
    (output,) = llm.embed(sentence, truncate_prompt_tokens=length, use_tqdm=False)
    longest = 256 if length == -1 else length
    want = llm.get_tokenizer()(sentence, truncation=True, max_length=longest)["input_ids"]
    assert output.prompt_token_ids == want
    with pytest.raises(InvalidArgumentError, match="prompt must be at most 256 tokens long"):
        llm.embed(sentence, use_tqdm=False)


def test_related_sentences_score_higher_than_unrelated_ones(llm: LLM) -> None:
    ones, others = [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS]
    vectors = np.array([o.outputs.embedding for o in llm.embed([*ones, *others], use_tqdm=False)])
    cosines = vectors[: len(ones)] @ vectors[len(ones) :].T
    for index, one in enumerate(ones):
        scores = [output.outputs.score for output in llm.score(one, others, use_tqdm=False)]
        np.testing.assert_allclose(scores, cosines[index], atol=1e-5)
        assert int(np.argmax(scores)) == index
    paired = [output.outputs.score for output in llm.score(ones, others, use_tqdm=False)]
    np.testing.assert_allclose(paired, np.diag(cosines), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_other_ways_of_pooling_and_dimensions_are_those_of_transformers(
    pooling: str, llm: LLM, oracle: PreTrainedModel
) -> None:
    (states,) = llm.encode("A short text.", use_tqdm=False)
    assert states.outputs.data.shape == (len(states.prompt_token_ids), 384)
    with torch.inference_mode():
        hidden = oracle(torch.tensor([states.prompt_token_ids])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(states.outputs.data, hidden, rtol=0, atol=1e-5)
    params = PoolingParams(pooling=pooling, dimensions=64)
    (output,) = llm.embed("A short text.", pooling_params=params, use_tqdm=False)
    want = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling][:64]
    np.testing.assert_allclose(output.outputs.embedding, want / np.linalg.norm(want), rtol=0, atol=1e-5)


def test_an_encoder_has_no_kv_cache_and_says_what_it_can_do(llm: LLM) -> None:
    (stats,) = llm.stats().engines
    assert (stats.num_blocks, stats.num_free_blocks, stats.kv_cache_usage) == (0, 0, 0.0)
    assert llm.llm_engine.ready.kv_cache_bytes == 0
    assert llm.get_supported_tasks() == ("embed", "score", "encode")
    assert llm.reset_prefix_cache()
    for refused in (lambda: llm.generate("x", use_tqdm=False), lambda: llm.chat([])):
        with pytest.raises(InvalidArgumentError):
            refused()
    with pytest.raises(InvalidArgumentError, match="text or token ids for an encoder"):
        llm.embed({"prompt_embeds": np.zeros((3, 384), np.float32)}, use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match=r"task must be one of embed, score, encode.*'generate'"):
        llm.generate("x", use_tqdm=False)


@pytest.mark.parametrize(
    ("sampling", "pooling", "message"),
    [
        (SamplingParams(), None, "the model cannot be asked to generate"),
        (None, PoolingParams(task="classify", pooling="cls"), "the model cannot be asked to classify"),
        (None, PoolingParams(task="score", pooling="cls"), "the model cannot be asked to score"),
        (None, PoolingParams(task="embed"), "needs a kind of pooling"),
        (None, PoolingParams(task="embed", pooling="cls", dimensions=385), "exceeds the model's hidden size"),
        (SamplingParams(), PoolingParams(task="embed", pooling="cls"), "either sampling_params or pooling"),
    ],
)
def test_the_engine_itself_refuses_what_its_model_cannot_do(
    sampling: SamplingParams | None, pooling: PoolingParams | None, message: str, llm: LLM
) -> None:
    """Requests that no frontend of ours has checked, as another client could send them."""
    client: Any = llm.llm_engine.engine_core
    request = EngineCoreRequest("raw", [101, 102], sampling, pooling)
    with pytest.raises(RequestError, match=message):
        client.engine_core.preprocess_add_request(request)


def test_the_engine_refuses_embeddings_for_an_encoder(llm: LLM) -> None:
    client: Any = llm.llm_engine.engine_core
    params = PoolingParams(task="embed", pooling="cls")
    request = EngineCoreRequest("raw", None, None, params, prompt_embeds=np.zeros((3, 384), np.float32))
    with pytest.raises(RequestError, match="cannot be given to an encoder"):
        client.engine_core.preprocess_add_request(request)


@pytest.mark.parametrize("level", [1, 2])
def test_an_encoder_that_has_slept_gives_the_same_vectors(level: int) -> None:
    with LLM("all-minilm-l6-v2", multiprocess=False) as llm:
        (before,) = llm.embed("Good night.", use_tqdm=False)
        llm.sleep(level=level)
        llm.wake_up()
        (after,) = llm.embed("Good night.", use_tqdm=False)
    assert after.outputs.embedding == before.outputs.embedding
