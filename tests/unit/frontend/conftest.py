"""Small tokenizers of the kinds that matter, and a model directory, all made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nbengine.config import EngineConfig, ModelConfig, SchedulerConfig
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.prompt_length import TextEncoder

MAX_MODEL_LEN = 64
SPECIAL_TOKENS = ["<|end|>", "<|user|>", "<|assistant|>"]
TEXT = [
    "the quick brown fox jumps over the lazy dog, then the dog jumps over the fox; naïve café, 東京, 🙂🙃 and so on",
    "to be or not to be: that is the question. Whether 'tis nobler in the mind to suffer",
] * 3
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's kind: every byte is a token, so that token boundaries fall within characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's kind: pieces with a leading mark for the space, bytes for what has no piece."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁the",
        "▁",
        "a",
        "▁fox",
        "s",
        "é",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level tokenizer."""
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """A tokenizer with byte fallback."""
    return byte_fallback_tokenizer()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer) -> Path:
    """A model directory without weights; <|end|> and <|user|> end a text."""
    directory = tmp_path_factory.mktemp("model")
    end, user = (byte_level.token_to_id(token) for token in SPECIAL_TOKENS[:2])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|end|>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "vocab_size": byte_level.get_vocab_size() + 5,
                "max_position_embeddings": 128,
                "hidden_size": 8,
            }
        )
    )
    (directory / "generation_config.json").write_text(
        json.dumps(
            {
                "eos_token_id": [end, user],
                "temperature": 0.6,
                "top_k": 20,
                "repetition_penalty": 1.1,
                "max_new_tokens": 33,
            }
        )
    )
    return directory


@pytest.fixture
def engine_config(model_directory: Path) -> EngineConfig:
    """Configuration of an engine with that model and the priority policy."""
    model = ModelConfig(model="tiny", directory=str(model_directory))
    return EngineConfig(model=model, scheduler=SchedulerConfig(scheduling_policy="priority"))


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> PreTrainedTokenizerFast:
    """The model directory's tokenizer, as the frontend loads it."""
    from nbengine.frontend.text.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(model="tiny", directory=str(model_directory)))


@pytest.fixture
def input_processor(engine_config: EngineConfig, tokenizer: PreTrainedTokenizerFast) -> InputProcessor:
    """The input processor of an engine with `MAX_MODEL_LEN` tokens of context."""
    return InputProcessor(engine_config, tokenizer, TextEncoder(tokenizer.backend_tokenizer), MAX_MODEL_LEN)
