"""A model without weights, and its grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nbengine.config import ModelConfig
from nbengine.engine.core import structured
from nbengine.engine.core.structured import GuidanceGrammar, StructuredOutputManager
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.unit.engine.structured.grammar_rig import (
    EOS,
    MERGED,
    VOCAB_SIZE,
    InThisProcess,
    Make,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("model")
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {token: 256 + i for i, token in enumerate(MERGED)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", "<end>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}))
    return ModelConfig("tiny", directory=str(directory))


@pytest.fixture(scope="module")
def tokenizer(model: ModelConfig) -> Tokenizer:
    return Tokenizer.from_file(str(Path(model.directory) / "tokenizer.json"))


@pytest.fixture
def manager(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> StructuredOutputManager:
    monkeypatch.setattr(structured, "GrammarChecker", InThisProcess)
    return StructuredOutputManager(model, VOCAB_SIZE, max_num_seqs=8)


@pytest.fixture
def make(manager: StructuredOutputManager) -> Make:
    def compile_(params: dict[str, Any] | None = None, **constraint: Any) -> GuidanceGrammar:
        asked = {"eos_token_id": EOS, "max_tokens": 100} | (params or {})
        outputs = StructuredOutputsParams(**constraint)
        grammar = manager.compile(SamplingParams(structured_outputs=outputs, **asked))
        assert grammar is not None
        return grammar

    return compile_
