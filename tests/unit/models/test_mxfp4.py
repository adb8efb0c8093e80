"""Experts in MXFP4 against transformers' own conversion: they stay as they are, or are computed in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nbengine.config import ModelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import FORMATS, dense
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.weights import WeightSlot
from nbengine.models.loading import load_model, packed_formats, weights_bytes_of
from tests.kernels.quantized_weights import rounded
from tests.support.family_cases import CASES
from tests.support.parallel_support import ThreadWorld
from tests.unit.models.test_parallel_moe import Cores, redivide

CPU = torch.device("cpu")
MXFP4 = FORMATS["mxfp4"]
EXPERTS, INNER, HIDDEN, LAYERS = 4, 128, 64, 3
TOKENS = list(range(3, 40))
LIMIT, ALPHA = 0.8, 1.702
Load = Callable[..., DecoderForCausalLM]


def packed(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    experts, rows, columns = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 124, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, random_model: Any) -> tuple[Path, Any]:
    """A checkpoint of gpt-oss with packed experts, and what transformers makes of it in float32."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    case = CASES["gpt-oss"]
    model = random_model(case.kind, **case.settings, vocab_size=260)
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    for index in range(LAYERS):
        for name, shape in (("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            blocks, scales = packed((EXPERTS, *shape), index)
            key = f"model.layers.{index}.mlp.experts.{name}"
            del weights[key]
            weights |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    oracle = GptOssForCausalLM.from_pretrained(
        directory,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    experts = oracle.model.layers[1].mlp.experts
    named = load_file(directory / "model.safetensors")
    key = "model.layers.1.mlp.experts.down_proj"
    numbers = convert_moe_packed_tensors(named[f"{key}_blocks"], named[f"{key}_scales"], dtype=torch.float32)
    assert torch.equal(experts.down_proj, numbers)
    return directory, oracle.eval()


@pytest.fixture(scope="module")
def gguf_file(
    checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory, write_gguf: Any, gguf_variant: Any
) -> Iterator[Path]:
    """The same weights in a GGUF file, as llama.cpp's converter has them, whose tokenizer is converted once."""
    directory, oracle = checkpoint
    metadata: dict[str, Any] = {
        "gpt-oss.expert_count": EXPERTS,
        "gpt-oss.expert_used_count": 2,
        "gpt-oss.attention.sliding_window": 8,
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 4.0,
        "gpt-oss.rope.scaling.original_context_length": 64,
    }
    state = dict(_converted(load_file(directory / "model.safetensors")))
    model = SimpleNamespace(config=oracle.config, state_dict=lambda: state)
    own = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBENGINE_CACHE_DIR", str(own / "cache"))
        yield write_gguf(
            own / "model.gguf", model, gguf_variant("gpt-oss", metadata=metadata, vocabulary=260)
        )


def _converted(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights.items():
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            nibbles = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)
            halves = nibbles[..., :16] | (nibbles[..., 16:] << 4)
            whole = torch.cat((weights[f"{base}_scales"][..., None], halves), dim=-1).flatten(-2)
            yield from _parts(base, "weight", whole)
        elif name.endswith("_proj_bias"):
            yield from _parts(name.removesuffix("_bias"), "bias", weight)
        else:
            yield name.replace(".sinks", ".sinks.weight"), weight


def _parts(base: str, kind: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The projections of the model's tensor, whose rows lie in turn."""
    if not base.endswith("gate_up_proj"):
        yield f"{base}.{kind}", weight
        return
    for first, name in enumerate(("gate_proj", "up_proj")):
        yield f"{base.replace('gate_up_proj', name)}.{kind}", weight[:, first::2].contiguous()


@pytest.fixture
def load_as() -> Load:
    """Load with experts as they are, or exactly with `dtype="float32"`."""

    def load_as(path: Path, parallel: ParallelState = SINGLE, **asked: Any) -> DecoderForCausalLM:
        found = load_model(config_of(path, **asked), CPU, torch.float32, parallel=parallel)
        assert isinstance(found, DecoderForCausalLM)
        return found

    return load_as


def config_of(path: Path, **asked: Any) -> ModelConfig:
    settings = {"hf_overrides": {"swiglu_limit": LIMIT}, **asked}
    return resolve_model(ModelConfig(model=str(path), tokenizer="none", device="cpu", **settings))


def logits_of(model: DecoderForCausalLM, make_runner: Any, tokens: list[int]) -> Tensor:
    found: Tensor = make_runner(model).step({"a": tokens})["a"]
    return found


def experts_of(model: DecoderForCausalLM) -> dict[str, WeightSlot]:
    slots = model.weight_slots().items()
    return {name: slot for name, slot in slots if ".experts." in name and name.endswith(".weight")}


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_greedy_tokens_in_float32_are_those_of_transformers(
    source: str,
    checkpoint: tuple[Path, Any],
    gguf_file: Path,
    load_as: Load,
    make_runner: Any,
    compared: Any,
) -> None:
    directory, oracle = checkpoint
    model = load_as(gguf_file if source == "gguf" else directory, dtype="float32")
    assert {slot.form for slot in model.weight_slots().values()} == {None}
    runner = make_runner(model)
    answer, logits = [], runner.step({"a": TOKENS})["a"]
    for _ in range(20):
        answer.append(int(logits[-1].argmax()))
        logits = runner.step({"a": answer[-1:]})["a"]
    with torch.inference_mode():
        expected = oracle(torch.tensor([[*TOKENS, *answer]])).logits[0]
    assert answer == expected[len(TOKENS) - 1 : -1].argmax(-1).tolist()
    torch.testing.assert_close(logits[-1], expected[-1], rtol=0, atol=2e-4)
    if source == "gguf":
        compared(oracle, "gguf")


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_every_expert_stays_as_it_is(
    source: str, checkpoint: tuple[Path, Any], gguf_file: Path, load_as: Load
) -> None:
    directory, oracle = checkpoint
    path = gguf_file if source == "gguf" else directory
    model = load_as(path)
    slots = experts_of(model)
    assert len(slots) == LAYERS * EXPERTS * 3
    assert {slot.form for slot in slots.values()} == {MXFP4}
    for index, layer in enumerate(oracle.model.layers):
        # transformers has the inputs' features first, and gates and other projections in turn.
        gate_up, down = layer.mlp.experts.gate_up_proj.mT, layer.mlp.experts.down_proj.mT
        numbers = {"gate_proj": gate_up[:, ::2], "up_proj": gate_up[:, 1::2], "down_proj": down}
        for name, whole in numbers.items():
            for expert in range(EXPERTS):
                slot = slots[f"model.layers.{index}.mlp.experts.{expert}.{name}.weight"]
                assert torch.equal(dense(MXFP4, slot.tensor, slot.rows), whole[expert])
    # 4 bits a number, and a byte for 32 of them.
    assert (
        sum(slot.tensor.nbytes for slot in slots.values()) == LAYERS * EXPERTS * 3 * INNER * HIDDEN * 17 // 32
    )


def test_the_bytes_foretold_are_those_that_the_weights_take(
    checkpoint: tuple[Path, Any], load_as: Load
) -> None:
    directory, _ = checkpoint
    config, model = config_of(directory), load_as(directory)
    hf = json.loads((directory / "config.json").read_text())
    foretold = weights_bytes_of(hf, torch.float32, packed=packed_formats(config, CPU))
    assert foretold == model.weights_bytes
    assert foretold < weights_bytes_of(hf, torch.bfloat16)


def test_a_block_computes_what_its_numbers_say(checkpoint: tuple[Path, Any], load_as: Load) -> None:
    directory, oracle = checkpoint
    block, experts = load_as(directory).moe_blocks[1], oracle.model.layers[1].mlp.experts
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        weights, chosen = block.route(x)
        scores, expected = oracle.model.layers[1].mlp.router(x)[1:]
        actual = block(x).double()
    assert torch.equal(chosen.sort().values, expected.sort().values)
    torch.testing.assert_close(weights.sum(-1), torch.ones(30))
    torch.testing.assert_close(weights.sort().values, scores.sort().values, rtol=1e-5, atol=1e-6)
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(rounded(x)):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            gated = row @ experts.gate_up_proj[expert].double() + experts.gate_up_proj_bias[expert]
            gate, up = gated[::2].clamp(max=LIMIT), gated[1::2].clamp(-LIMIT, LIMIT)
            activated = rounded((gate * (gate * ALPHA).sigmoid() * (up + 1)).float()[None])[0]
            wanted[token] += weight * (
                activated @ experts.down_proj[expert].double() + experts.down_proj_bias[expert]
            )
    error = (actual - wanted).norm() / wanted.norm()
    # A sum of float32 that lies between two levels of 8 bits may be rounded to either.
    assert error < 2e-3


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    ("sizes", "expert_parallel"),
    [((2, 1, 1), False), ((2, 1, 1), True), ((1, 2, 1), False), ((1, 1, 2), True)],
)
def test_divided_experts_give_the_logits_of_one_worker(
    sizes: tuple[int, int, int],
    expert_parallel: bool,
    source: str,
    checkpoint: tuple[Path, Any],
    gguf_file: Path,
    load_as: Load,
    make_runner: Any,
) -> None:
    path = gguf_file if source == "gguf" else checkpoint[0]
    expected = logits_of(load_as(path), make_runner, TOKENS)
    cores = Cores(sizes, expert_parallel, load_as, path)
    held = [experts_of(model) for model in cores.models]
    assert all(slot.form is MXFP4 for slots in held for slot in slots.values())
    whole = sum(slot.tensor.nbytes for slot in experts_of(load_as(path)).values())
    assert [sum(slot.tensor.nbytes for slot in slots.values()) for slots in held].count(whole // 2) == (
        0 if sizes[1] == 2 else 2
    )
    (step,) = cores.run([[{"a": TOKENS}, *([{}] if sizes[2] == 2 else [])]], make_runner)
    for state, found in zip(cores.world.states, step, strict=True):
        if state.layout.is_last_stage and state.layout.dp_rank == 0:
            torch.testing.assert_close(found["a"], expected, rtol=0, atol=0.02)
            assert found["a"].argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 4), (4, 2)])
def test_packed_experts_go_from_worker_to_worker_as_they_are(
    before: int, after: int, expert_parallel: bool, checkpoint: tuple[Path, Any], load_as: Load
) -> None:
    directory, _ = checkpoint
    whole = load_as(directory).weight_slots()
    models, _ = redivide(directory, load_as, (1, 1), expert_parallel, before, after)
    for model in models:
        for name, slot in model.weight_slots().items():
            if slot.form is None:
                assert torch.equal(slot.tensor, whole[name].tensor[slot.index]), name
            else:
                numbers = dense(MXFP4, whole[name].tensor, whole[name].rows)[slot.index]
                assert torch.equal(dense(MXFP4, slot.tensor, slot.rows), numbers), name


def test_tensor_parallel_ranks_without_whole_blocks_have_the_numbers(
    checkpoint: tuple[Path, Any], load_as: Load
) -> None:
    directory, _ = checkpoint
    whole = experts_of(load_as(directory))
    world = ThreadWorld(1, 1, 8)
    for state in world.states:
        for name, slot in experts_of(load_as(directory, parallel=state)).items():
            numbers = dense(MXFP4, whole[name].tensor, whole[name].rows)[slot.index]
            assert (slot.form is None) is name.endswith("down_proj.weight")
            held = slot.tensor if slot.form is None else dense(MXFP4, slot.tensor, slot.rows)
            assert torch.equal(held, numbers)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_an_exponent_that_stands_for_no_number_is_refused(
    dtype: str, checkpoint: tuple[Path, Any], tmp_path: Path, load_as: Load
) -> None:
    directory, _ = checkpoint
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.2.mlp.experts.gate_up_proj_scales"][3, 7, 1] = 255
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=r"layers\.2\.mlp\.experts\.gate_up_proj_scales has an exponent"):
        load_as(tmp_path, dtype=dtype)


def test_blocks_without_scales_are_refused(
    checkpoint: tuple[Path, Any], tmp_path: Path, load_as: Load
) -> None:
    directory, _ = checkpoint
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.experts\.down_proj_scales is missing"):
        load_as(tmp_path)
