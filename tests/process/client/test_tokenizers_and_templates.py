"""Directories without tokenizer.json and templates of the engine's own, over real processes."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from nbengine.config import ModelConfig
from nbengine.errors import InvalidArgumentError
from nbengine.models.checkpoints.files import resolve_model

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def without_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of random-tiny whose tokenizer is a file of tiktoken's: every byte is a token."""
    source = resolve_model(ModelConfig("random-tiny")).directory
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(tmp_path / "cache"))
    directory = Path(shutil.copytree(source, tmp_path / "model"))
    (directory / "tokenizer.json").unlink()
    added = {
        str(256 + at): {"content": token, "special": True} for at, token in enumerate(("<|bos|>", "<|eos|>"))
    }
    config = {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (directory / "tiktoken.model").write_text("".join(lines))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 256], "top_k": 5}))
    return directory


def test_a_converted_tokenizer_serves_texts_chats_and_grammars(
    without_fast: Path, tmp_path: Path, no_leftovers: None
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    with LLM(str(without_fast), chat_template=str(template), num_gpu_blocks_override=64) as llm:
        (plain,) = llm.generate("hi", SamplingParams(max_tokens=3), use_tqdm=False)
        assert plain.prompt_token_ids == list(b"hi")
        (chat,) = llm.chat(HELLO, SamplingParams(max_tokens=3), use_tqdm=False)
        assert (chat.prompt, chat.prompt_token_ids) == ("<hi>", list(b"<hi>"))
        (own,) = llm.chat(HELLO, SamplingParams(max_tokens=3), chat_template="{{ 'own' }}", use_tqdm=False)
        assert own.prompt == "own"
        grammar = StructuredOutputsParams(choice=["yes", "no"])
        (chosen,) = llm.generate(
            "hi", SamplingParams(max_tokens=8, structured_outputs=grammar), use_tqdm=False
        )
        assert chosen.outputs[0].text in ("yes", "no")
        assert llm.get_default_sampling_params().top_k == 5


async def test_an_attached_client_has_the_engines_template_and_defaults(
    start_async: Callable[..., AsyncLLM],
) -> None:
    options = {"chat_template": "{{ 'the engine: ' + messages[0].content }}", "generation_config": "none"}
    engine = start_async(**options)
    other = AsyncLLM.attach(engine.name)
    try:
        for llm in (engine, other):
            assert llm.render_chat(HELLO)["prompt"] == "the engine: hi"
            assert llm.default_sampling_params() == {}
    finally:
        other.shutdown()


def test_a_template_that_is_none_stops_a_start_before_anything_runs(no_leftovers: None) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"chat_template must be a Jinja template \(line 1: TemplateSyn"
    ):
        LLM("random-tiny", chat_template="{% for %}")
