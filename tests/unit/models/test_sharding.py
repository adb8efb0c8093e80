"""Some numbers of workers divide a model; the others are refused with the numbers that do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.frontend.assembly import resolve_files
from nbengine.models.division import check_parallel
from nbengine.models.registry import decoder_config
from nbengine.models.sharding import DecoderShard, ExpertShard


def hf_config(heads: int, kv_heads: int, inner: int, layers: int = 30) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": heads * 64,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
    }


def parallel(tp_size: int = 1, pp_size: int = 1) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "allowed"),
    [
        (9, 3, 1536, "1 or 3"),
        (9, 3, 1539, "1, 3 or 9"),
        (4, 2, 176, "1, 2 or 4"),
        (12, 2, 24, "1, 2, 4, 6 or 12"),
        (12, 3, 24, "1, 3, 6 or 12"),
        (12, 4, 24, "1, 2, 4 or 12"),
        (8, 8, 12, "1, 2 or 4"),
        (7, 7, 16, "1"),
    ],
)
def test_exactly_the_sizes_that_are_named_are_allowed(
    heads: int, kv_heads: int, inner: int, allowed: str
) -> None:
    sizes = {int(size) for size in allowed.replace(" or ", ", ").split(", ")}
    for size in range(1, 40):
        if size in sizes:
            check_parallel(hf_config(heads, kv_heads, inner), parallel(size))
            continue
        with pytest.raises(InvalidArgumentError) as refusal:
            check_parallel(hf_config(heads, kv_heads, inner), parallel(size))
        assert str(refusal.value) == (
            f"tensor_parallel_size must be {allowed} for this model ({heads} attention heads, {kv_heads} "
            f"key-value heads, intermediate size {inner}), got {size}"
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (12, 2), (12, 4), (8, 8), (8, 1)])
def test_each_query_head_is_with_its_key_value_head_on_one_rank(heads: int, kv_heads: int) -> None:
    config = decoder_config(hf_config(heads, kv_heads, heads))
    for tp_size in range(1, heads + 1):
        try:
            check_parallel(hf_config(heads, kv_heads, heads), parallel(tp_size))
        except InvalidArgumentError:
            continue
        for layout in layouts(parallel(tp_size)):
            shard = DecoderShard.of(config, layout)
            for local in range(shard.num_heads):
                query_head = layout.tp_rank * shard.num_heads + local
                kv_head = shard.first_kv_head + local // (shard.num_heads // shard.num_kv_heads)
                assert kv_head == query_head // (heads // kv_heads)


def test_a_stage_needs_a_layer() -> None:
    check_parallel(hf_config(4, 4, 4, layers=3), parallel(1, 3))
    with pytest.raises(InvalidArgumentError, match=r"pipeline_parallel_size must be at most 3, .*, got 4"):
        check_parallel(hf_config(4, 4, 4, layers=3), parallel(1, 4))


@pytest.mark.parametrize(("sizes", "name"), [((2, 1), "tensor"), ((1, 2), "pipeline"), ((2, 2), "tensor")])
def test_encoders_are_computed_by_one_worker(sizes: tuple[int, int], name: str) -> None:
    encoder = {"architectures": ["BertModel"], "model_type": "bert"}
    check_parallel(encoder, parallel())
    with pytest.raises(InvalidArgumentError, match=f"{name}_parallel_size must be 1 .*encoders.*, got 2"):
        check_parallel(encoder, parallel(*sizes))


def test_an_unsupported_architecture_is_named_before_anything_is_divided() -> None:
    with pytest.raises(ModelLoadError, match="OwnForCausalLM is not supported"):
        check_parallel({"architectures": ["OwnForCausalLM"]}, parallel(2))


def test_the_frontend_refuses_before_anything_is_started() -> None:
    config = EngineConfig(model=ModelConfig("random-tiny"), parallel=parallel(3))
    with pytest.raises(InvalidArgumentError, match="tensor_parallel_size must be 1, 2 or 4 for this model"):
        resolve_files(config)


def test_the_check_does_not_import_torch() -> None:
    code = (
        "import sys, nbengine.models.sharding, nbengine.frontend.assembly; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def moe(num_experts: int, inner: int, **settings: Any) -> dict[str, Any]:
    return {
        **hf_config(4, 4, 7),
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": num_experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": inner,
        **settings,
    }


def experts_parallel(tp_size: int, dp_size: int, *, whole: bool) -> list[RankLayout]:
    """The places of one stage's workers in all engine cores."""
    config = ParallelConfig(
        tensor_parallel_size=tp_size, data_parallel_size=dp_size, enable_expert_parallel=whole
    )
    cores = (dataclasses.replace(config, data_parallel_rank=rank) for rank in range(dp_size))
    return [layout for core in cores for layout in layouts(core)]


@pytest.mark.parametrize("num_experts", [1, 4, 7, 60])
def test_whole_experts_are_divided_into_neighbouring_ranges_of_nearly_one_length(num_experts: int) -> None:
    config = decoder_config(moe(num_experts, 6)).moe
    assert config is not None
    for tp_size, dp_size in ((1, 1), (1, 3), (2, 2), (2, 3)):
        if tp_size * dp_size > num_experts:
            continue
        shards = [ExpertShard.of(config, layout) for layout in experts_parallel(tp_size, dp_size, whole=True)]
        assert [expert for shard in shards for expert in shard.experts] == list(range(num_experts))
        sizes = [len(shard.experts) for shard in shards]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
        assert {shard.inner for shard in shards} == {range(6)}


def test_else_every_experts_inner_features_are() -> None:
    config = decoder_config(moe(3, 24)).moe
    assert config is not None
    shards = [ExpertShard.of(config, layout) for layout in experts_parallel(2, 3, whole=False)]
    assert {shard.experts for shard in shards} == {range(3)}
    assert [feature for shard in shards for feature in shard.inner] == list(range(24))


@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 4), (4, 1), (2, 2)])
def test_workers_that_cannot_divide_the_experts_are_refused_with_both_sizes_named(
    tp_size: int, dp_size: int
) -> None:
    def sizes(*, whole: bool) -> ParallelConfig:
        return ParallelConfig(
            tensor_parallel_size=tp_size, data_parallel_size=dp_size, enable_expert_parallel=whole
        )

    check_parallel(moe(4, 8), sizes(whole=False))
    check_parallel(moe(4, 6), sizes(whole=True))
    with pytest.raises(InvalidArgumentError) as refusal:
        check_parallel(moe(3, 6), sizes(whole=False))
    assert str(refusal.value) == (
        "data_parallel_size x tensor_parallel_size must be 1, 2, 3 or 6 for this model (the intermediate size of its "
        "experts is 6), or enable_expert_parallel be set, with which it may be up to 3, got 4"
    )
    with pytest.raises(InvalidArgumentError) as refusal:
        check_parallel(moe(3, 6), sizes(whole=True))
    assert str(refusal.value) == (
        "data_parallel_size x tensor_parallel_size must be at most 3, the number of the model's experts, got 4"
    )


def test_tensor_parallel_ranks_divide_the_dense_layers_and_shared_experts_that_there_are() -> None:
    refused = [
        moe(8, 8, mlp_only_layers=[0]),
        moe(8, 8, architectures=["Qwen2MoeForCausalLM"], shared_expert_intermediate_size=7),
    ]
    check_parallel(moe(8, 8), parallel(2))
    for hf in refused:
        with pytest.raises(
            InvalidArgumentError, match=r"tensor_parallel_size must be 1 .*intermediate size 7"
        ):
            check_parallel(hf, parallel(2))


def test_engine_cores_of_their_own_divide_nothing() -> None:
    for model in (hf_config(4, 4, 7), {"architectures": ["BertModel"], "model_type": "bert"}):
        check_parallel(model, ParallelConfig(data_parallel_size=3))
        with pytest.raises(InvalidArgumentError, match="tensor_parallel_size"):
            check_parallel(model, ParallelConfig(data_parallel_size=3, tensor_parallel_size=3))
