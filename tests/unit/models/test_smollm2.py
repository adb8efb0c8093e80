"""The default model as it comes out of the model cache, against transformers' reading of the same file."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import SMOLLM2_SAMPLING, resolve_model
from nbengine.models.configs.hf_config import (
    eos_token_ids,
    load_generation_config,
    load_hf_config,
    max_model_len_of,
    vocab_size,
)

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, a\ttab,\r\n\r\n\nline ends   ",
    "def f(x):\n    return {'a': [x ** 2, -1.5e-10]}  # comment\n",
    "1234567890 3.14159 2024-11-20 0x7fff",
    "x =  12\n\n 5",
    "naïve café Ænima ß ﬁ ½ №",
    "日本語のテキストと中文，한국어",
    "العربية עברית हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u00a0\ufeff",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name><not_special> <|im_start",
    "\x00\x01\x7f control",
    "supercalifragilisticexpialidocious " * 5,
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n"}],
    [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "und <|im_end|> weiter"},
    ],
]


@pytest.fixture(scope="module")
def resolved() -> ModelConfig:
    return resolve_model(ModelConfig("smollm2-135m"))


@pytest.fixture(scope="module")
def oracle_tokenizer(smollm2_read_by_transformers: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_read_by_transformers)
    # The published tokenizer.json of SmolLM2 takes each digit by itself. The file says so ("smollm"), and the conversion
    # does not know that name.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def prepared_tokenizer(resolved: ModelConfig) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(resolved.directory)


def test_the_prepared_tokenizer_encodes_and_decodes_as_transformers_does(
    oracle_tokenizer: Any, prepared_tokenizer: PreTrainedTokenizerFast
) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = oracle_tokenizer.encode(text, add_special_tokens=special)
            assert prepared_tokenizer.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                decoded = oracle_tokenizer.decode(ids, skip_special_tokens=skip)
                assert prepared_tokenizer.decode(ids, skip_special_tokens=skip) == decoded
    assert prepared_tokenizer.get_vocab() == oracle_tokenizer.get_vocab()
    assert prepared_tokenizer.all_special_ids == oracle_tokenizer.all_special_ids


def test_the_prepared_chat_template_renders_as_transformers_does(
    oracle_tokenizer: Any, prepared_tokenizer: PreTrainedTokenizerFast
) -> None:
    for chat in CHATS:
        for generation in (True, False):
            expected = oracle_tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=generation
            )
            rendered = prepared_tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=generation
            )
            assert rendered == expected


def test_the_prepared_tokenizer_loads_as_auto_tokenizer_too(
    resolved: ModelConfig, prepared_tokenizer: PreTrainedTokenizerFast
) -> None:
    auto = AutoTokenizer.from_pretrained(resolved.directory)
    assert [auto.encode(text) for text in TEXTS] == [prepared_tokenizer.encode(text) for text in TEXTS]


def test_the_configuration_says_what_the_file_says(resolved: ModelConfig) -> None:
    hf = load_hf_config(resolved)
    assert (vocab_size(hf), max_model_len_of(hf)) == (49152, 8192)
    assert eos_token_ids(resolved.directory, hf, {}) == [2]
    # The file advises nothing; the alias does.
    advised = load_generation_config(resolved.directory)
    assert {name: advised[name] for name in SMOLLM2_SAMPLING} == SMOLLM2_SAMPLING


def test_a_second_resolution_reads_no_weights_and_imports_neither_torch_nor_transformers(
    resolved: ModelConfig,
) -> None:
    script = (
        "import sys\n"
        "from nbengine.config import ModelConfig\n"
        "from nbengine.models.checkpoints import files\n"
        "sys.addaudithook(lambda event, details: event == 'open' and print('open', details[0]))\n"
        "config = files.resolve_model(ModelConfig('smollm2-135m'))\n"
        "print('resolved', config.directory)\n"
        "heavy = {'torch', 'transformers', 'gguf', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *opened, last = done.stdout.splitlines()
    assert last == f"resolved {resolved.directory}"
    assert any(line.endswith("config.json") for line in opened)
    assert not [line for line in opened if line.endswith((".gguf", ".whl", ".safetensors"))]


def test_logits_equal_transformers_on_a_ragged_batch(
    load: Any, make_runner: Any, smollm2_oracle: Any, prepared_tokenizer: PreTrainedTokenizerFast
) -> None:
    runner = make_runner(load("smollm2-135m", asked="float32"))
    story = prepared_tokenizer.encode(
        "Once upon a time, in a small village by the sea, there lived a baker. " * 3
    )
    random = torch.randint(0, 49152, (33,), generator=torch.Generator().manual_seed(0)).tolist()
    requests = {"story": story, "one": [42], "random": random}
    logits = runner.step(requests)
    # On some processors a single row in float32 is itself further from the truth than this.
    exact = copy.deepcopy(smollm2_oracle).double()
    for name, tokens in requests.items():
        with torch.inference_mode():
            expected = exact(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(logits[name].double(), expected, rtol=0, atol=1e-4)
        assert logits[name].argmax(-1).tolist() == expected.argmax(-1).tolist()
