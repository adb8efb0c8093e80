"""Pooling requests of decoders through engine, scheduler and worker, in this process, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine import LLM, PoolingParams, SamplingParams
from nbengine.errors import InvalidArgumentError
from nbengine.models.checkpoints.tiny import random_tiny
from nbengine.outputs import RequestOutput
from nbengine.pooling_outputs import PoolingRequestOutput
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler
from tests.support.thorough import amount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = {
    "mean": PoolingParams(task="embed", pooling="mean"),
    "cls": PoolingParams(task="embed", pooling="cls"),
    "last": PoolingParams(task="embed", pooling="last"),
    "plain": PoolingParams(task="embed", pooling="mean", normalize=False),
    "short": PoolingParams(task="embed", pooling="last", dimensions=10),
    "encode": PoolingParams(task="encode"),
    "unit states": PoolingParams(task="encode", normalize=True),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("models"), seed=0)


@pytest.fixture(scope="module")
def hidden_states(directory: Path) -> Callable[[list[int]], Tensor]:
    """Hidden states of all tokens after the final norm, from one dense pass of transformers."""
    from transformers import AutoModel

    model: PreTrainedModel = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    def states(token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).last_hidden_state[0]

    return states


@pytest.fixture
def make_llm(directory: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        defaults = {"block_size": 4, "num_gpu_blocks_override": 200, "max_model_len": 200}
        made.append(LLM(str(directory), multiprocess=False, **{**defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that have been preempted while a part of their prompt was computed."""
    seen: list[Request] = []
    original = Scheduler._preempt

    def preempt(self: Scheduler, request: Request, preempted_req_ids: set[str]) -> None:
        if request.num_computed_tokens:
            seen.append(request)
        original(self, request, preempted_req_ids)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    return seen


def expected(states: Tensor, params: PoolingParams) -> NDArray[np.float32]:
    """Compute the result by its definition, in plain torch."""
    if params.task == "encode":
        return (torch.nn.functional.normalize(states, dim=1) if params.normalize else states).numpy()
    vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[params.pooling or "last"]
    vector = vector[: params.dimensions]
    if params.normalize is False:
        return vector.numpy()
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def mixed(seed: int, count: int) -> list[tuple[list[int], PoolingParams | SamplingParams]]:
    """Prompts that often share a prefix, for pooling of every kind and for generating."""
    random = Random(seed)
    shared = [random.randrange(256) for _ in range(40)]
    generating = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asked: list[PoolingParams | SamplingParams] = [*KINDS.values(), generating, generating]
    return [
        (
            shared[: random.randrange(41)] + [random.randrange(256) for _ in range(random.randint(1, 50))],
            random.choice(asked),
        )
        for _ in range(count)
    ]


def run(llm: LLM, requests: list[tuple[list[int], PoolingParams | SamplingParams]]) -> dict[str, Any]:
    engine = llm.llm_engine
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if isinstance(output, PoolingRequestOutput):
                assert output.request_id not in outputs
                outputs[output.request_id] = output.outputs.data
            else:
                outputs[output.request_id] = output.outputs[0].token_ids
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 4096}, id="whole"),
        pytest.param({"max_num_batched_tokens": 7}, id="chunks-of-7"),
        pytest.param({"max_num_batched_tokens": 33, "max_num_seqs": 4}, id="four-at-a-time"),
        pytest.param(
            {"num_gpu_blocks_override": 35, "max_model_len": 140, "max_num_batched_tokens": 12},
            id="preempted",
        ),
        pytest.param({"enable_prefix_caching": False, "max_num_batched_tokens": 50}, id="uncached"),
    ],
)
def test_chunks_batches_preemptions_and_the_prefix_cache_change_no_result(
    options: dict[str, Any],
    make_llm: Callable[..., LLM],
    hidden_states: Callable[[list[int]], Tensor],
    preempted: list[Request],
    request: pytest.FixtureRequest,
) -> None:
    llm = make_llm(**options)
    forced = request.node.callspec.id == "preempted"
    for seed in range(amount(4, thorough=8) if forced else amount(1, thorough=4)):
        requests = mixed(seed, 40)
        outputs = run(llm, requests)
        assert len(outputs) == len(requests)
        for index, (prompt, params) in enumerate(requests):
            got = outputs[str(index)]
            if isinstance(params, PoolingParams):
                want = expected(hidden_states(prompt), params)
                assert got.dtype == np.float32
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
            else:
                assert len(got) == params.max_tokens
    (stats,) = llm.stats().engines
    assert stats.num_free_blocks == stats.num_blocks
    if forced:
        begun = [r for r in preempted if r.pooling_params is not None]
        assert {r.pooling_params.pooling for r in begun} >= {"mean", "cls", "last", None}
    if options.get("enable_prefix_caching", True):
        assert stats.prefix_cache_hits > 0


def test_pooling_beside_it_changes_no_token_of_a_generating_request(make_llm: Callable[..., LLM]) -> None:
    prompts = ["one", "another prompt", "and a third"]
    asked = [({"prompt": p}, SamplingParams(max_tokens=20, ignore_eos=True)) for p in prompts]

    def tokens(with_pooling: bool) -> list[list[int]]:
        llm = make_llm(max_num_batched_tokens=16)
        for index, (prompt, params) in enumerate(asked):
            if with_pooling:
                llm.llm_engine.add_request("pooled", f"{prompt} pooled " * 3, PoolingParams(task="embed"))
            llm.llm_engine.add_request(str(index), prompt, params)
        outputs: dict[str, list[int]] = {}
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if isinstance(output, RequestOutput):
                    outputs[output.request_id] = output.outputs[0].token_ids
        return [outputs[str(index)] for index in range(len(asked))]

    # Unseeded requests draw from streams in the order in which they come: pooling must take none.
    assert tokens(with_pooling=True) == tokens(with_pooling=False)


def test_last_reads_the_prefix_cache_and_the_others_only_fill_it(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = {"prompt_token_ids": list(range(41))}
    cached = [
        llm.encode(prompt, KINDS[kind], use_tqdm=False)[0].num_cached_tokens
        for kind in ("mean", "cls", "encode", "last")
    ]
    assert cached == [0, 0, 0, 40]


def test_a_prompt_as_long_as_the_model_allows_is_pooled_but_not_continued(
    make_llm: Callable[..., LLM], hidden_states: Callable[[list[int]], Tensor]
) -> None:
    llm = make_llm(max_model_len=64, num_gpu_blocks_override=16)
    tokens = [index % 256 for index in range(65)]
    (output,) = llm.embed({"prompt_token_ids": tokens[:64]}, use_tqdm=False)
    want = expected(hidden_states(tokens[:64]), KINDS["last"])
    np.testing.assert_allclose(output.outputs.embedding, want, rtol=0, atol=1e-5)
    with pytest.raises(InvalidArgumentError, match="at most 64 tokens long"):
        llm.embed({"prompt_token_ids": tokens}, use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="at most 63 tokens long"):
        llm.generate({"prompt_token_ids": tokens[:64]}, use_tqdm=False)
    (cut,) = llm.embed({"prompt_token_ids": tokens}, use_tqdm=False, truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == tokens[:64]


def test_an_aborted_request_leaves_nothing_behind(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_batched_tokens=16, max_num_seqs=2)
    engine = llm.llm_engine
    for index in range(6):
        engine.add_request(str(index), {"prompt_token_ids": [index] * 50}, KINDS["mean"])
    engine.step()
    engine.abort_request([str(index) for index in range(5)])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["5"]
    # Rows of the pooler's accumulator that were lost would be missing here.
    assert len(llm.embed([f"text {index}" for index in range(9)], use_tqdm=False)) == 9
    (stats,) = llm.stats().engines
    assert stats.num_free_blocks == stats.num_blocks


def test_a_prompt_given_as_embeddings_is_pooled_like_its_tokens(
    make_llm: Callable[..., LLM], directory: Path
) -> None:
    from safetensors.torch import load_file

    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    llm = make_llm(max_num_batched_tokens=16)
    tokens = [3, 250, 17] * 12
    prompts = [tokens, {"prompt_embeds": table[tokens]}, {"prompt_embeds": table[[*tokens, 5, 6]]}]
    for kind in ("mean", "cls", "last", "encode"):
        asked = msgspec.structs.replace(KINDS[kind], truncate_prompt_tokens=len(tokens))
        first, *others = (o.outputs.data for o in llm.encode(prompts, asked, use_tqdm=False))
        for other in others:
            np.testing.assert_allclose(other, first, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_model_len": 1, "num_gpu_blocks_override": 1, "block_size": 1},
        {"max_model_len": 1, "max_num_batched_tokens": 1, "block_size": 64},
    ],
    ids=str,
)
def test_an_engine_for_one_token_embeds_it_and_refuses_to_generate(
    make_llm: Callable[..., LLM], limits: dict[str, int]
) -> None:
    llm = make_llm(**limits)
    (output,) = llm.embed([{"prompt_token_ids": [5]}], use_tqdm=False)
    assert len(output.outputs.embedding) == 64
    with pytest.raises(
        InvalidArgumentError, match="max_model_len must be at least 2 for text to be generated"
    ):
        llm.generate([{"prompt_token_ids": [5]}], use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="at most 1 tokens long"):
        llm.embed([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
