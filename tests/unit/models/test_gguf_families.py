"""Families read from GGUF files, written as llama.cpp's converter would, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from parallel_support import ThreadWorld
from torch import Tensor

from nbengine.config import ModelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import dense
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import generation_config, hf_config
from nbengine.models.checkpoints.loader import check_checkpoint, load_decoder
from nbengine.models.layers.weights import ALL_DENSE, WeightSlot
from nbengine.models.loading import load_model, packed_formats
from nbengine.models.registry import decoder_config
from nbengine.runtime.progress import Reporter
from tests.support.gguf_cases import CASES, RECURRENT
from tests.support.gguf_converter import VOCABULARY, Converter, convert, round_matrices
from tests.support.thorough import combinations, in_turn
from tests.unit.models.conftest import Runner
from tests.unit.models.test_recurrent_families import HybridRunner

CPU = torch.device("cpu")
TOKENS = torch.randint(3, VOCABULARY, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def made(name: str, kind: Kind, directory: Path, random_model: Any, **settings: Any) -> tuple[Any, Path]:
    """A model of transformers whose matrices are what the file has of them, and the file."""
    case = CASES[name]
    stated = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, **case.settings, **settings}
    oracle = random_model(case.kind, **stated)
    for key, parameter in oracle.named_parameters():
        if key.endswith("A_log"):
            parameter.data.uniform_(-3, 1, generator=torch.Generator().manual_seed(2))
    round_matrices(oracle, kind)
    oracle.save_pretrained(directory)
    # The cache of transformers asks a layer with attention how long a sequence is.
    oracle.config.use_cache = False
    return oracle, convert(directory, directory / "model.gguf", kind, case.more)


def loaded(
    path: Path, *, longest: int | None = None, parallel: ParallelState = SINGLE, packed: Any = ALL_DENSE
) -> Any:
    return load_decoder(
        decoder_config(hf_config(read_header(path))),
        (path,),
        dtype=torch.float32,
        device=CPU,
        max_positions=longest,
        report=Reporter(None, "load"),
        parallel=parallel,
        packed=packed,
    )


def runner_of(name: str, model: Any, **options: Any) -> Any:
    return (HybridRunner if name in RECURRENT else Runner)(model, **options)


def assert_same(found: Tensor, oracle: Any) -> None:
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-4)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "kind"),
    in_turn(CASES, [Kind.F32, Kind.Q8_0]),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_gguf_file_gives_the_logits_of_what_was_converted(
    name: str, kind: Kind, tmp_path: Path, random_model: Any, compared: Any
) -> None:
    oracle, path = made(name, kind, tmp_path, random_model)
    assert read_header(path).architecture == CASES[name].arch
    model = loaded(path, longest=CASES[name].max_model_len)
    assert_same(runner_of(name, model).step({"a": TOKENS})["a"], oracle)
    compared(oracle, "gguf")


@pytest.mark.parametrize("name", ["phi4-mini", "olmo3", "qwen3.5 moe", "granite 4", "lfm2"])
def test_a_file_without_an_output_projection_has_the_embeddings_for_it(
    name: str, tmp_path: Path, random_model: Any
) -> None:
    oracle, path = made(name, Kind.F32, tmp_path, random_model, tie_word_embeddings=True)
    assert "output.weight" not in read_header(path).tensors
    assert_same(runner_of(name, loaded(path)).step({"a": TOKENS})["a"], oracle)


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    combinations(
        ["llama 4", "qwen3.5", "qwen3.5 moe", "qwen3-next", "granite 4 moe", "lfm2", "olmo", "olmo3", "glm"],
        [Kind.F32, Kind.Q8_0],
        [(2, 1), (1, 2)],
        together=1,
    ),
)
def test_two_ranks_give_them_from_their_parts_of_a_file(
    name: str, kind: Kind, sizes: tuple[int, int], tmp_path: Path, random_model: Any
) -> None:
    even = {"linear_num_key_heads": 4, "linear_num_value_heads": 8} if name.startswith("qwen3") else {}
    oracle, path = made(name, kind, tmp_path, random_model, **even)
    world = ThreadWorld(*sizes)
    runners = [runner_of(name, loaded(path, parallel=state), parallel=state) for state in world.states]

    def run(state: Any) -> Tensor:
        runner, parts = runners[state.layout.rank], []
        for chunk in (TOKENS[:33], TOKENS[33:34], TOKENS[34:]):
            step = runner.step if state.layout.is_last_stage else runner.hidden
            parts.append(step({"a": chunk})["a"])
        return torch.cat(parts)

    layout = world.states[-1].layout
    for logits in world.run(run)[layout.pp_rank * layout.tp_size :]:
        assert_same(logits, oracle)


def values_of(slot: WeightSlot) -> Tensor:
    return slot.tensor if slot.form is None else dense(slot.form, slot.tensor, slot.rows)


def by_turns(columns: Tensor, key_heads: int) -> Tensor:
    """Columns by key heads, in the order in which files have value heads."""
    heads = columns.unflatten(1, (key_heads, -1, 32))
    return heads.transpose(1, 2).flatten(1)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_quantised_value_heads_stay_so_in_any_order(
    tp_size: int, tmp_path: Path, private_cache: Path, random_model: Any
) -> None:
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    oracle, path = made("qwen3.5", Kind.Q8_0, tmp_path, random_model, **sizes)
    weights, rule = oracle.state_dict(), decoder_config(hf_config(read_header(path))).delta_rule
    assert rule is not None
    assert rule.tiled
    packed = packed_formats(resolve_model(ModelConfig(model=str(path), tokenizer="none")), CPU)
    rows = {"q": range(128), "k": range(128, 256), "v": range(256, 512)}
    for state in ThreadWorld(tp_size, 1).states:
        rank, before = state.layout.tp_rank, "model.layers.0.linear_attn"
        slots = loaded(path, parallel=state, packed=packed).weight_slots()
        for part, of_all in rows.items():
            expected = weights[f"{before}.in_proj_qkv.weight"][of_all.start : of_all.stop]
            expected = expected.chunk(tp_size)[rank]
            slot = slots[f"{before}.in_proj_{part}.weight"]
            assert slot.form is not None
            assert torch.equal(values_of(slot), expected)
        slot = slots[f"{before}.out_proj.weight"]
        expected = weights[f"{before}.out_proj.weight"].chunk(tp_size, dim=1)[rank]
        assert slot.form is not None
        assert torch.equal(values_of(slot), by_turns(expected, 4 // tp_size))


def test_a_ranks_value_heads_that_are_no_whole_blocks_are_dense(
    tmp_path: Path, private_cache: Path, random_model: Any
) -> None:
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 4}
    _, path = made("qwen3.5", Kind.Q8_0, tmp_path, random_model, **sizes)
    packed = packed_formats(resolve_model(ModelConfig(model=str(path), tokenizer="none")), CPU)
    name = "model.layers.0.linear_attn.out_proj.weight"
    whole = loaded(path, packed=packed).weight_slots()[name]
    assert whole.form is not None
    # The file's columns are those of the value heads 0, 2, 1, 3 of the two key heads.
    heads = values_of(whole).unflatten(1, (4, 16))
    for state in ThreadWorld(2, 1).states:
        slot = loaded(path, parallel=state, packed=packed).weight_slots()[name]
        own = heads[:, [state.layout.tp_rank, 2 + state.layout.tp_rank]].flatten(1)
        assert slot.form is None
        assert torch.equal(slot.tensor, own)


@pytest.mark.parametrize("name", ["llama 4", *RECURRENT])
def test_a_file_comes_with_its_tokenizer_and_quantised_weights(
    name: str, tmp_path: Path, private_cache: Path, random_model: Any
) -> None:
    oracle, path = made(name, Kind.Q8_0, tmp_path, random_model)
    config = resolve_model(ModelConfig(model=str(path)))
    assert (Path(str(config.directory)) / "tokenizer.json").is_file()
    model = load_model(config, CPU, torch.float32)
    assert any(slot.form is not None for slot in model.weight_slots().values())
    found = runner_of(name, model).step({"a": TOKENS})["a"]
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    # The rows that are multiplied are rounded to 8 bits, too, which may send a token to other experts. Another tensor,
    # or another order of its rows, would come out at more than 1.
    assert (found - expected).norm() < 0.3 * expected.norm()


def more(**metadata: Any) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in metadata.items()}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", more(lfm2__attention__causal=False), "lfm2.attention.causal False is not supported"),
    (
        "lfm2",
        more(lfm2__attention__head_count_kv=[0, 2]),
        "head_count_kv is a tuple of 2, not a number for each of 4",
    ),
    (
        "lfm2",
        more(lfm2__attention__head_count_kv=[0, 2, 1, 0]),
        r"layers of different .*head_count_kv .* \[0, 2, 1, 0\]",
    ),
    (
        "granite 4",
        more(granitehybrid__ssm__time_step_rank=7),
        r"ssm.inner_size \(128\) must be a multiple of .*rank \(7\)",
    ),
    ("granite 4", more(granitehybrid__expert_weights_scale=2.5), "expert_weights_scale 2.5 is not supported"),
    ("qwen3.5", more(qwen35__full_attention_interval=0), "qwen35.full_attention_interval is 0"),
    ("qwen3.5", more(qwen35__nextn_predict_layers=4), "4 of 4 layers predict further tokens"),
    ("qwen3.5", more(qwen35__ssm__group_count="two"), "ssm.group_count is a str, not an integer"),
    ("glm4", more(glm4__rope__dimension_sections=[4, 2, 2, 0]), "glm4.rope.dimension_sections"),
    ("qwen2 yarn", more(qwen2__rope__scaling__yarn_ext_factor=0.5), "yarn_ext_factor is 0.5"),
    ("lfm2", more(lfm2__attention__sliding_window=8), "lfm2.attention.sliding_window is not supported"),
    ("olmo", more(olmo__rope__dimension_count=8), "8 of 16 dimensions"),
    ("lfm2 moe", more(lfm2moe__expert_gating_func=1), "lfm2moe.expert_gating_func 1 is not supported"),
    ("llama 4", more(llama4__expert_count=0), "models of kind 'llama4' without experts are not supported"),
    (
        "llama 4",
        more(llama4__attention__sliding_window=0),
        "llama4.attention.sliding_window is not supported",
    ),
    ("glm4 moe", more(glm4moe__expert_gating_func=1), "glm4moe.expert_gating_func 1 is not supported"),
    ("gemma4", more(gemma4__expert_count=8), "gemma4.expert_used_count"),
    (
        "gemma4",
        more(gemma4__feed_forward_length=[128, 256, 128, 256, 128, 256]),
        r"feed_forward_length \[128, 256, 128, 256, 128, 256\] is not supported",
    ),
    (
        "gemma4",
        more(gemma4__attention__head_count_kv=[2, 1, 1, 1, 2, 1]),
        r"head_count_kv \[2, 1, 1, 1, 2, 1\] is not supported: each type",
    ),
    (
        "gemma4",
        more(gemma4__attention__head_count_kv=[2, 1, 2, 1, 2, 1]),
        "full layers with values and 1 key heads of their own are not supported",
    ),
    ("nemotron-h", more(nemotron_h__expert_count=8), "mixture-of-experts models of kind 'nemotron_h'"),
    (
        "nemotron 3 moe",
        more(nemotron_h_moe__expert_group_count=2),
        "nemotron_h_moe.expert_group_count 2 is not supported",
    ),
    (
        "nemotron 3 moe",
        more(nemotron_h_moe__moe_latent_size=32),
        "nemotron_h_moe.moe_latent_size 32 is not supported",
    ),
    ("mamba-2", more(mamba2__ssm__time_step_rank=7), r"ssm.inner_size \(128\) must be a multiple of"),
    ("qwen3.5", more(qwen35__expert_count=8), "mixture-of-experts models of kind 'qwen35'"),
]


@pytest.mark.parametrize(("name", "metadata", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_a_header_says_and_nothing_here_computes_is_refused_by_its_key(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path, random_model: Any
) -> None:
    made(name, Kind.F32, tmp_path, random_model)
    path = convert(tmp_path, tmp_path / "other.gguf", Kind.F32, {**CASES[name].more, **metadata})
    with pytest.raises(ModelLoadError, match=message) as refusal:
        decoder_config(hf_config(read_header(path)))
    assert str(path) in str(refusal.value)


def test_a_missing_key_is_named(tmp_path: Path, random_model: Any) -> None:
    made("lfm2", Kind.F32, tmp_path, random_model)
    converter = Converter(tmp_path, Kind.F32)
    stated = dict(converter.metadata())
    del stated["{arch}.shortconv.l_cache"]
    converter.metadata = lambda: iter(stated.items())  # type: ignore[method-assign]
    with pytest.raises(ModelLoadError, match=r"metadata key lfm2.shortconv.l_cache is missing"):
        hf_config(read_header(converter.write(tmp_path / "other.gguf")))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("granite 4", "blk.0.ssm_x.weight", "1 tensors that are not supported, as 'blk.0.ssm_x.weight'"),
        ("lfm2", "blk.0.ssm_in.weight", "'blk.0.ssm_in.weight'"),
    ],
)
def test_a_tensor_that_the_architecture_lacks_is_named(
    name: str, tensor: str, message: str, tmp_path: Path, random_model: Any
) -> None:
    made(name, Kind.F32, tmp_path, random_model)
    converter = Converter(tmp_path, Kind.F32)
    stated = list(converter.converted())
    converter.converted = lambda: iter([*stated, (tensor, torch.zeros(4, 4))])  # type: ignore[method-assign]
    path = converter.write(tmp_path / "other.gguf", CASES[name].more)
    with pytest.raises(ModelLoadError, match=message):
        check_checkpoint(decoder_config(hf_config(read_header(path))), (path,), torch.float32)


@pytest.mark.parametrize("name", ["qwen3.5", "granite 4"])
def test_a_decay_that_grows_is_corrupt(name: str, tmp_path: Path, random_model: Any) -> None:
    made(name, Kind.F32, tmp_path, random_model)
    converter = Converter(tmp_path, Kind.F32)
    changed = [(key, -value if key == "blk.0.ssm_a" else value) for key, value in converter.converted()]
    converter.converted = lambda: iter(changed)  # type: ignore[method-assign]
    path = converter.write(tmp_path / "other.gguf", CASES[name].more)
    with pytest.raises(ModelLoadError, match=r"corrupt: tensor blk.0.ssm_a has a value that is not negative"):
        loaded(path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, random_model: Any) -> None:
    oracle, _ = made("qwen3.5", Kind.F32, tmp_path, random_model)
    converter = Converter(tmp_path, Kind.F32)
    further = [(f"blk.4.{name}.weight", torch.ones(64)) for name in ("attn_norm", "nextn.enorm")]
    stated = [*converter.converted(), *further]
    converter.converted = lambda: iter(stated)  # type: ignore[method-assign]
    metadata = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = converter.write(tmp_path / "other.gguf", {**CASES["qwen3.5"].more, **metadata})
    assert_same(runner_of("qwen3.5", loaded(path)).step({"a": TOKENS})["a"], oracle)


def test_older_files_of_qwen3_next_have_projections_by_key_heads(tmp_path: Path, random_model: Any) -> None:
    oracle, _ = made("qwen3-next", Kind.F32, tmp_path, random_model)
    converter = Converter(tmp_path, Kind.F32)
    stated = {name: value for name, value in converter.converted() if "attn_qkv" not in name}
    stated = {name: value for name, value in stated.items() if "attn_gate" not in name}
    for name, value in converter.tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            stated[f"blk.{name.split('.')[2]}.ssm_in.weight"] = value
    converter.converted = lambda: iter(stated.items())  # type: ignore[method-assign]
    path = converter.write(tmp_path / "other.gguf")
    assert_same(runner_of("qwen3-next", loaded(path)).step({"a": TOKENS})["a"], oracle)


def test_files_of_chatglm_have_queries_keys_and_values_in_one(tmp_path: Path, random_model: Any) -> None:
    oracle, _ = made("glm", Kind.Q8_0, tmp_path, random_model)
    converter = Converter(tmp_path, Kind.Q8_0)
    stated = dict(converter.converted())
    for layer in range(3):
        for kind in ("weight", "bias"):
            parts = [stated.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            stated[f"blk.{layer}.attn_qkv.{kind}"] = torch.cat(parts)
    converter.converted = lambda: iter(stated.items())  # type: ignore[method-assign]
    path = converter.write(tmp_path / "other.gguf")
    assert_same(runner_of("glm", loaded(path)).step({"a": TOKENS})["a"], oracle)


def test_a_text_ends_at_every_token_that_the_file_says_ends_one(tmp_path: Path, random_model: Any) -> None:
    made("lfm2", Kind.F32, tmp_path, random_model)
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
    path = convert(tmp_path, tmp_path / "other.gguf", Kind.F32, ends)
    assert generation_config(read_header(path))["eos_token_id"] == [2, 7, 8]


def test_files_with_gate_and_other_projection_of_experts_in_one(tmp_path: Path, random_model: Any) -> None:
    oracle, _ = made("qwen3.5 moe", Kind.Q8_0, tmp_path, random_model)
    converter = Converter(tmp_path, Kind.Q8_0)
    stated = dict(converter.converted())
    for layer in range(4):
        parts = [stated.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        stated[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(parts, dim=1)
    converter.converted = lambda: iter(stated.items())  # type: ignore[method-assign]
    path = converter.write(tmp_path / "other.gguf", CASES["qwen3.5 moe"].more)
    assert_same(runner_of("qwen3.5 moe", loaded(path)).step({"a": TOKENS})["a"], oracle)


def test_recurrent_layers_may_be_stated_one_by_one(tmp_path: Path, random_model: Any) -> None:
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    oracle, _ = made("qwen3.5", Kind.F32, tmp_path, random_model, layer_types=types)
    stated = {"qwen35.attention.recurrent_layers": [each == "linear_attention" for each in types]}
    path = convert(tmp_path, tmp_path / "other.gguf", Kind.F32, {**CASES["qwen3.5"].more, **stated})
    assert_same(runner_of("qwen3.5", loaded(path)).step({"a": TOKENS})["a"], oracle)


@pytest.mark.parametrize("pattern", [2, [True, False, True, False, True, False, True]])
def test_a_window_pattern_of_gemma_3_is_a_number_or_one_for_each_layer(
    pattern: Any, tmp_path: Path, random_model: Any
) -> None:
    types = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
    oracle, _ = made("gemma3", Kind.F32, tmp_path, random_model, layer_types=types)
    stated = {"gemma3.attention.sliding_window_pattern": pattern}
    path = convert(tmp_path, tmp_path / "other.gguf", Kind.F32, stated)
    assert_same(runner_of("gemma3", loaded(path)).step({"a": TOKENS})["a"], oracle)


def test_yarn_is_as_the_file_says(tmp_path: Path, random_model: Any) -> None:
    rope = {**CASES["qwen2 yarn"].settings["rope_parameters"], "beta_fast": 2.0, "attention_factor": 1.3}
    oracle, path = made("qwen2 yarn", Kind.F32, tmp_path, random_model, rope_parameters=rope)
    assert read_header(path).metadata["qwen2.rope.scaling.yarn_beta_fast"] == 2.0
    assert_same(runner_of("qwen2 yarn", loaded(path)).step({"a": TOKENS})["a"], oracle)
