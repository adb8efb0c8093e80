"""The models `random-tiny` and `random-tiny-moe`: what the seed decides, and that they load as transformers loads them."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nbengine.config import ModelConfig, ParallelConfig
from nbengine.errors import InvalidArgumentError
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.tiny import random_tiny, random_tiny_moe
from nbengine.models.configs.hf_config import eos_token_ids, load_hf_config
from nbengine.models.division import check_parallel


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize("make", [random_tiny, random_tiny_moe])
def test_the_seed_decides_the_weights(make: Callable[[Path, int], Path], tmp_path: Path) -> None:
    first, again = make(tmp_path / "a", 3), make(tmp_path / "b", 3)
    assert weights(first) == weights(again)
    assert weights(first) != weights(make(tmp_path / "a", 4))
    assert make(tmp_path / "a", 3) == first


@pytest.fixture
def directory(private_cache: Path) -> str:
    return resolve_model(ModelConfig("random-tiny", seed=7)).directory


@pytest.mark.parametrize("name", ["random-tiny", "random-tiny-moe"])
def test_logits_equal_transformers(name: str, private_cache: Path, load: Any, make_runner: Any) -> None:
    directory = resolve_model(ModelConfig(name, seed=7)).directory
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    tokens = list(range(0, 256, 3))
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    logits = make_runner(load(name, seed=7)).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_two_or_four_workers_divide_the_mixture_of_experts(whole_experts: bool, private_cache: Path) -> None:
    hf_config = load_hf_config(resolve_model(ModelConfig("random-tiny-moe")))

    def is_divided(tp_size: int, dp_size: int) -> bool:
        sizes = {"tensor_parallel_size": tp_size, "data_parallel_size": dp_size}
        try:
            check_parallel(hf_config, ParallelConfig(**sizes, enable_expert_parallel=whole_experts))
        except InvalidArgumentError:
            return False
        return True

    grid = itertools.product(range(1, 5), repeat=2)
    divided = {sizes for sizes in grid if math.prod(sizes) <= 4 and is_divided(*sizes)}
    # Three engine cores divide no expert, but may hold whole ones.
    thirds = {(1, 3)} if whole_experts else set()
    assert divided == thirds | {(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)}


def test_no_expert_is_idle(load: Any, make_runner: Any, private_cache: Path) -> None:
    model = load("random-tiny-moe")
    chosen: set[tuple[int, int]] = set()
    for layer, block in enumerate(model.moe_blocks):
        route = block.route

        def note(
            x: torch.Tensor, layer: int = layer, route: Any = route
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights, experts = route(x)
            chosen.update((layer, expert) for expert in experts.flatten().tolist())
            return weights, experts

        block.route = note
    make_runner(model).step({"a": list(range(256))})
    assert len(chosen) == 2 * 8


def test_every_text_survives_the_tokenizer(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("", " a  b\n", "naïve 日本語 🙂", "\x00\x7f", "<|eos|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 258
    assert tokenizer.encode("<|bos|>é<|eos|>")[0] == 256
    hf = load_hf_config(ModelConfig("random-tiny", directory=directory))
    assert eos_token_ids(directory, hf, {}) == [tokenizer.eos_token_id] == [257]


def test_the_chat_template_marks_the_turns(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|>user\nhi<|eos|>\n<|bos|>assistant\n"


@pytest.mark.parametrize("name", ["random-tiny", "random-tiny-moe"])
def test_greedy_output_depends_on_the_whole_prompt(
    name: str, load: Any, make_runner: Any, private_cache: Path
) -> None:
    model = load(name)
    outputs = set()
    for first in range(12):
        runner = make_runner(model)
        tokens, new = [first, 50, 60, 70], []
        for _ in range(6):
            tokens = [int(runner.step({"a": tokens})["a"][-1].argmax())]
            new += tokens
        outputs.add(tuple(new))
    assert len(outputs) > 9


def test_loading_does_not_import_torchs_compiler(private_cache: Path) -> None:
    script = (
        "import sys, torch\n"
        "from nbengine.config import ModelConfig, ParallelConfig\n"
        "from nbengine.models.checkpoints.files import resolve_model\n"
        "from nbengine.models.loading import load_model\n"
        "load_model(resolve_model(ModelConfig('random-tiny')), torch.device('cpu'), torch.float32)\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
