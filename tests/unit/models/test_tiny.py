"""The model `random-tiny`: what the seed decides, and that it loads as transformers loads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nbengine.config import ModelConfig
from nbengine.models.files import resolve_model
from nbengine.models.hf_config import eos_token_ids, load_hf_config
from nbengine.models.tiny import random_tiny


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again = random_tiny(tmp_path / "a", 3), random_tiny(tmp_path / "b", 3)
    assert weights(first) == weights(again)
    assert weights(first) != weights(random_tiny(tmp_path / "a", 4))
    assert random_tiny(tmp_path / "a", 3) == first


@pytest.fixture
def directory(private_cache: Path) -> str:
    return resolve_model(ModelConfig("random-tiny", seed=7)).directory


def test_logits_equal_transformers(directory: str, load: Any, make_runner: Any) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    tokens = list(range(0, 256, 3))
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    logits = make_runner(load("random-tiny", seed=7)).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_every_text_survives_the_tokenizer(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("", " a  b\n", "naïve 日本語 🙂", "\x00\x7f", "<|eos|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 258
    assert tokenizer.encode("<|bos|>é<|eos|>")[0] == 256
    hf = load_hf_config(ModelConfig("random-tiny", directory=directory))
    assert eos_token_ids(directory, hf) == [tokenizer.eos_token_id] == [257]


def test_the_chat_template_marks_the_turns(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|>user\nhi<|eos|>\n<|bos|>assistant\n"


def test_greedy_output_depends_on_the_whole_prompt(load: Any, make_runner: Any, private_cache: Path) -> None:
    model = load("random-tiny")
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
        "from nbengine.config import ModelConfig\n"
        "from nbengine.models.files import resolve_model\n"
        "from nbengine.models.registry import load_model\n"
        "load_model(resolve_model(ModelConfig('random-tiny')), torch.device('cpu'), torch.float32)\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
