"""Experts that stay quantised compute what their values say, are divided among workers, and go from one to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbengine.config import EngineConfig, ModelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import ModelLoadError
from nbengine.kernels import reference
from nbengine.kernels.quantized import FORMATS, ZERO_POINTS, dense
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.loader import read_weights
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.moe import DenseExperts
from nbengine.models.layers.packed_experts import PackedExperts
from nbengine.models.layers.regions import is_region
from nbengine.models.layers.weights import WeightSlot
from nbengine.models.loading import load_model, packed_formats, weights_bytes_of
from nbengine.worker.worker import Worker
from tests.kernels.quantized_weights import rounded
from tests.support.resident import resident_bytes
from tests.support.thorough import amount, combinations
from tests.unit.models.quantized_checkpoints import VARIANTS, is_quantized, random_matrix
from tests.unit.models.test_parallel_moe import Cores, redivide

CPU = torch.device("cpu")
EXPERTS, INNER, HIDDEN = 5, 96, 64
TOKENS = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(4)).tolist()
SETTINGS = {
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
    "vocab_size": 260,
}
METADATA = {
    "qwen3moe.expert_count": EXPERTS,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.expert_feed_forward_length": INNER,
}
KINDS = {"q4_0": Kind.Q4_0, "q5_1": Kind.Q5_1, "q8_0": Kind.Q8_0}
SOURCES = [*KINDS, "int4", "int8"]
Load = Callable[..., DecoderForCausalLM]


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, random_model: Any, write_gguf: Any, gguf_variant: Any
) -> Iterator[dict[str, Path]]:
    """The files of a mixture of experts, by format, in a cache of their own: a tokenizer is converted once."""
    directory = tmp_path_factory.mktemp("experts")
    model = random_model("Qwen3Moe", **SETTINGS)
    model.save_pretrained(directory / "plain")
    found = {"int4": directory / "plain", "int8": directory / "plain"}
    for name, kind in KINDS.items():
        variant = gguf_variant("qwen3moe", kind, metadata=METADATA, vocabulary=260)
        found[name] = write_gguf(directory / f"{name}.gguf", model, variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBENGINE_CACHE_DIR", str(directory / "cache"))
        yield found


@pytest.fixture
def config_of(files: dict[str, Path]) -> Callable[..., ModelConfig]:
    """The resolved configuration of a model of `SOURCES`."""

    def config_of(source: str, **asked: Any) -> ModelConfig:
        if source.startswith("int") and asked.get("dtype") != "float32":
            asked["quantization"] = source
        config = ModelConfig(model=str(files[source]), tokenizer="none", device="cpu", **asked)
        return resolve_model(config)

    return config_of


@pytest.fixture
def load_source(config_of: Callable[..., ModelConfig]) -> Load:
    """Load a model of `SOURCES`, its experts quantised unless float32 is asked for."""

    def load(
        source: str, parallel: ParallelState = SINGLE, dtype: torch.dtype = torch.float32, **asked: Any
    ) -> DecoderForCausalLM:
        return load_model(config_of(source, **asked), CPU, dtype, parallel=parallel)

    return load


def values_of(slot: WeightSlot) -> Tensor:
    return slot.tensor if slot.form is None else dense(slot.form, slot.tensor, slot.rows)


def of_experts(model: DecoderForCausalLM) -> dict[str, WeightSlot]:
    return {name: slot for name, slot in model.weight_slots().items() if ".mlp.experts." in name}


def stacked(model: DecoderForCausalLM, layer: int) -> tuple[Tensor, Tensor]:
    """The values of a layer's experts as the reference takes them."""
    slots = model.weight_slots()

    def values(expert: int, projection: str) -> Tensor:
        return values_of(slots[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"])

    gate_up = [torch.cat([values(expert, "gate"), values(expert, "up")]) for expert in range(EXPERTS)]
    return torch.stack(gate_up), torch.stack([values(expert, "down") for expert in range(EXPERTS)])


def rounding_reference(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Do what `reference.experts` does, with activations that are rounded before each product."""
    output = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(rounded(x)):
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            activated = rounded((gate * gate.sigmoid() * up).float()[None])[0]
            output[token] += weight * (down[expert].double() @ activated)
    return output


@pytest.mark.parametrize("source", SOURCES)
def test_every_expert_stays_quantised_unless_float32_is_asked_for(
    source: str, load_source: Load, config_of: Callable[..., ModelConfig]
) -> None:
    slots = of_experts(load_source(source))
    form = FORMATS[{"int4": "q4_1", "int8": "q8_0"}.get(source, source)]
    assert len(slots) == 3 * EXPERTS * 3
    assert {slot.form for slot in slots.values()} == {form}
    exact = load_model(config_of(source, dtype="float32"), CPU, torch.float32)
    assert {slot.form for slot in of_experts(exact).values()} == {None}
    assert isinstance(exact.moe_blocks[0].experts.blocks, DenseExperts)


@pytest.mark.parametrize(
    ("source", "dtype"), combinations(SOURCES, [torch.float32, torch.bfloat16], together=1)
)
def test_a_block_computes_what_its_values_say(source: str, dtype: torch.dtype, load_source: Load) -> None:
    model = load_source(source, dtype=dtype)
    block, (gate_up, down) = model.moe_blocks[1], stacked(model, 1)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        routed = block.route(x)
        actual = block(x).double()
    exact = reference.experts(x, gate_up, down, *routed)
    rounding = float((rounding_reference(x, gate_up, down, *routed) - exact).std())
    assert 0 < rounding < 0.02 * float(exact.std())
    difference = (actual - rounding_reference(x, gate_up, down, *routed)).abs()
    # A sum in another order may round an activation otherwise, which is rare.
    assert float(difference.median()) < 0.01 * rounding
    assert float(difference.max()) < 2 * rounding
    assert float((actual - exact).std()) < 1.5 * rounding


@pytest.mark.parametrize("source", ["q4_0", "int8"])
def test_a_decoder_gives_the_logits_of_transformers_with_the_same_values(
    source: str, load_source: Load, make_runner: Any, random_model: Any
) -> None:
    model = load_source(source)
    oracle = random_model("Qwen3Moe", **SETTINGS)
    with torch.no_grad():
        for name, slot in model.weight_slots().items():
            if ".experts." not in name:
                oracle.get_parameter(name).copy_(values_of(slot))
        for layer in range(3):
            experts = oracle.model.layers[layer].mlp.experts
            for parameter, values in zip(
                (experts.gate_up_proj, experts.down_proj), stacked(model, layer), strict=True
            ):
                parameter.copy_(values)
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    logits = make_runner(model).step({"a": TOKENS})["a"]
    # Of a token, not of all: rounded activations may choose another expert for one in a while.
    by_token = (logits - expected).std(-1)
    assert 0 < float(by_token.median()) < 0.06 * float(expected.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_result_depends_on_no_other_token_and_no_thread(
    dtype: torch.dtype, load_source: Load
) -> None:
    block = load_source("q4_0", dtype=dtype).moe_blocks[0]
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    with torch.inference_mode():
        weights, chosen = block.route(x)
        together = block.experts(x, weights, chosen)
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            try:
                assert torch.equal(block.experts(x, weights, chosen), together)
                for size in (1, 2, 7):
                    parts = zip(*(part.split(size) for part in (x, weights, chosen)), strict=True)
                    assert torch.equal(torch.cat([block.experts(*part) for part in parts]), together)
            finally:
                torch.set_num_threads(before)


@pytest.mark.parametrize(("source", "bits"), [("q4_0", 4.5), ("int4", 5), ("q8_0", 8.5)])
def test_experts_take_the_memory_of_their_blocks_and_it_is_foretold(
    source: str, bits: float, load_source: Load, config_of: Callable[..., ModelConfig]
) -> None:
    model = load_source(source, dtype=torch.bfloat16)
    values = 3 * EXPERTS * 3 * INNER * HIDDEN
    assert sum(slot.tensor.nbytes for slot in of_experts(model).values()) == values * bits / 8
    config = config_of(source)
    worker = loaded_worker(config)
    assert worker._footprint.weights_bytes == worker.model.weights_bytes
    packed = packed_formats(config, CPU)
    assert model.weights_bytes == weights_bytes_of(worker.hf_config, torch.bfloat16, packed=packed)


def loaded_worker(config: ModelConfig) -> Worker:
    worker = Worker(EngineConfig(config))
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(16)
    return worker


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_of_awq_files_stay_as_they_are_and_are_divided(
    expert_parallel: bool, tmp_path: Path, random_model: Any, load: Any
) -> None:
    values = write_awq_experts(tmp_path, random_model("Qwen3Moe", **SETTINGS))
    for sizes in ((1, 1, 1), (1, 1, 3), (2, 1, 2)):
        for model in Cores(sizes, expert_parallel, load, tmp_path).models:
            for name, slot in of_experts(model).items():
                is_dense = name.endswith("down_proj.weight") and not expert_parallel and sizes[0] == 2
                assert slot.form is (None if is_dense else ZERO_POINTS[4])
                torch.testing.assert_close(values_of(slot), values[name][slot.index], rtol=0, atol=0)


def write_awq_experts(directory: Path, model: Any) -> dict[str, Tensor]:
    """Writes a model with random AWQ matrices, one tensor an expert; gives the values of those matrices."""
    model.save_pretrained(directory, save_original_format=True)
    variant, tensors, values = VARIANTS["awq 32"], {}, {}
    for seed, (name, tensor) in enumerate(sorted(load_file(directory / "model.safetensors").items())):
        if not is_quantized(name):
            tensors[name] = tensor
            continue
        parts, exact = random_matrix(variant, *tensor.shape, seed=seed)
        tensors |= {
            f"{name.removesuffix('.weight')}.{part}": held.contiguous() for part, held in parts.items()
        }
        values[name] = torch.from_numpy(exact).float()
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": variant.entry}))
    return values


def resident_bytes_of(weights: Iterable[Tensor]) -> int:
    """The memory that the regions of these weights take of this process."""
    storages = {storage.data_ptr(): storage for storage in (weight.untyped_storage() for weight in weights)}
    assert all(map(is_region, storages.values()))
    return sum(map(resident_bytes, storages.values()))


@pytest.mark.parametrize(
    ("source", "levels"), combinations(["q5_1", "int4"], [(1,), (2,), (1, 2)], together=1)
)
def test_experts_come_back_after_sleep(
    source: str, levels: tuple[int, ...], config_of: Callable[..., ModelConfig]
) -> None:
    worker = loaded_worker(config_of(source))
    before = [weight.clone() for weight in worker.model.parameters()]
    assert isinstance(worker.model, DecoderForCausalLM)
    assert worker.model.kept is not None
    worker.model.kept.wait()
    assert resident_bytes_of(worker.model.parameters()) >= worker.model.weights_bytes
    for level in levels:
        worker.sleep(level)
    assert (resident_bytes_of(worker.model.parameters()) == 0) == (2 in levels)
    worker.wake_up("weights")
    worker.wake_up("kv_cache")
    assert all(map(torch.equal, worker.model.parameters(), before))


@pytest.mark.parametrize(
    ("source", "sizes", "expert_parallel"),
    combinations(["q4_0", "int4"], [(2, 1, 1), (1, 1, 3), (2, 1, 2)], [False, True]),
)
def test_the_parts_of_workers_are_those_of_one_and_give_its_logits(
    source: str, sizes: tuple[int, int, int], expert_parallel: bool, load_source: Load, make_runner: Any
) -> None:
    def load(source: str, parallel: ParallelState = SINGLE) -> DecoderForCausalLM:
        return load_source(source, parallel=parallel)

    alone = load(source)
    whole = {name: values_of(slot) for name, slot in of_experts(alone).items()}
    cores = Cores(sizes, expert_parallel, load, source)  # type: ignore[arg-type]
    held = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in whole.items()}
    share = INNER if expert_parallel else INNER // (sizes[0] * sizes[2])
    for model in cores.models:
        for name, slot in of_experts(model).items():
            # A half or a quarter of the 96 inner features is no whole number of blocks.
            is_dense = name.endswith("down_proj.weight") and share % 32 != 0
            assert (slot.form is None) == is_dense
            assert torch.equal(values_of(slot), whole[name][slot.index]), name
            held[name][slot.index] = True
    assert all(places.all() for places in held.values())
    chunks = [{"a": TOKENS}, *[{"b": [5, core]} for core in range(1, sizes[2])]]
    expected = make_runner(alone).step({"a": TOKENS})["a"]
    (by_rank,) = cores.run([chunks], make_runner)
    for logits in by_rank[: sizes[0]]:
        assert torch.equal(logits["a"], by_rank[0]["a"])
        assert float((logits["a"] - expected).std(-1).median()) < 0.06 * float(expected.std())


CHANGES = {
    # (tensor, pipeline) parallel sizes: numbers of engine cores before and after. A quick run has every second
    # change with whole experts on the cores, and the others with parts of them: parts that become whole blocks, that
    # stop to be ones, and that stay ones.
    (1, 1): [(2, 1), (1, 2), (2, 3), (1, 3), (4, 3), (3, 2), (1, 4), (4, 2), (3, 1)],
    (2, 1): [(1, 2), (2, 1)],
    (1, 2): [(1, 2), (2, 1)],
}
CASES = [
    pytest.param("q5_1", sizes, *change, expert_parallel, id=f"{sizes} {change}{' EP' * expert_parallel}")
    for sizes, changes in CHANGES.items()
    for number, change in enumerate(changes)
    if amount(number in (2, 3, 5, 6, 8) or sizes != (1, 1), thorough=True)
    for expert_parallel in amount([number % 2 == 1], thorough=[False, True])
]
CASES += [
    pytest.param("int4", (2, 1), 1, 3, False, id="int4 of 96 in 6 parts"),
    pytest.param("int4", (2, 1), 3, 1, False, id="int4 of 96 in 2 parts"),
]


@pytest.mark.parametrize(("source", "sizes", "before", "after", "expert_parallel"), CASES)
def test_experts_arrive_bit_for_bit_when_the_number_of_engine_cores_changes(
    source: str,
    sizes: tuple[int, int],
    before: int,
    after: int,
    expert_parallel: bool,
    load_source: Load,
    config_of: Callable[..., ModelConfig],
) -> None:
    read: list[str] = []

    def from_files(model: DecoderForCausalLM, slots: dict[str, WeightSlot]) -> None:
        read.extend(slots)
        read_weights(model, slots, tuple(map(Path, config_of(source).weights)))

    models, world = redivide(
        source,  # type: ignore[arg-type]
        load_source,
        sizes,
        expert_parallel,
        before,
        after,
        from_files,
    )
    for model, state in zip(models, world.states, strict=False):
        layout = replace(state.layout, dp_size=after)
        fresh = load_source(source, parallel=ParallelState(layout)).weight_slots()
        found = model.weight_slots()
        assert found.keys() == fresh.keys()
        for name, slot in found.items():
            assert slot.form is fresh[name].form
            assert torch.equal(slot.tensor, fresh[name].tensor), name
    shares = [INNER // (sizes[0] * cores) for cores in (before, after)]
    becomes_whole = not expert_parallel and shares[0] % 32 != 0 and shares[1] % 32 == 0
    assert bool(read) == becomes_whole
    assert all(name.endswith("down_proj.weight") for name in read)


def test_files_that_have_changed_are_named_when_experts_are_read_from_them(
    load_source: Load, tmp_path: Path, random_model: Any
) -> None:
    model = load_source("int4")
    random_model("Qwen3Moe", **{**SETTINGS, "moe_intermediate_size": 64}).save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    slots = {name: model.weight_slots()[name]}
    with pytest.raises(ModelLoadError, match=rf"{name} has the shape \[64, 64\], the config.* \[64, 96\]"):
        read_weights(model, slots, (tmp_path / "model.safetensors",))


def test_a_matrix_without_blocks_beside_quantised_ones_is_dense(
    tmp_path: Path, random_model: Any, load: Any, make_runner: Any
) -> None:
    settings = {**SETTINGS, "moe_intermediate_size": 40}
    random_model("Qwen3Moe", **settings).save_pretrained(tmp_path)
    model = load(tmp_path, quantization="int8")
    block = model.moe_blocks[0]
    assert isinstance(block.experts.blocks, PackedExperts)
    held = {name.split(".")[-2] for name, slot in of_experts(model).items() if slot.form is None}
    assert held == {"down_proj"}
    logits, exact = (make_runner(each).step({"a": TOKENS})["a"] for each in (model, load(tmp_path)))
    assert 0 < float((logits - exact).std(-1).median()) < 0.06 * float(exact.std())
