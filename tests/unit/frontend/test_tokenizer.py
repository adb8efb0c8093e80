"""Loading tokenizers."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from nbengine.config import EngineArgs, EngineConfig, ModelConfig
from nbengine.config.chat_template import MAX_TEMPLATE_LENGTH, template_text
from nbengine.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError
from nbengine.frontend.text.chat import has_chat_template, render_chat
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.detokenizer import IncrementalDetokenizer
from nbengine.frontend.text.stored_templates import check_template
from nbengine.frontend.text.tokenizer import load_tokenizer, resolve_tokenizer
from nbengine.models.configs.description import describe_model, described_model
from nbengine.sampling_params import SamplingParams


def test_it_neither_truncates_nor_pads_whatever_its_file_says(model_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_directory, copy)
    content = json.loads((copy / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    (copy / "tokenizer.json").write_text(json.dumps(content))
    original = load_tokenizer(ModelConfig(directory=str(model_directory)))
    tokenizer = load_tokenizer(ModelConfig(directory=str(copy)))
    ids = tokenizer.backend_tokenizer.encode("the quick brown fox").ids
    assert ids == original.backend_tokenizer.encode("the quick brown fox").ids
    assert len(ids) > 2


def test_a_tokenizer_of_its_own_wins_over_the_models(model_directory: Path, tmp_path: Path) -> None:
    config = ModelConfig(directory=str(tmp_path), tokenizer=resolve_tokenizer(str(model_directory)))
    assert load_tokenizer(config).eos_token == "<|end|>"


def test_a_directory_without_a_tokenizer_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(ModelConfig(directory=str(tmp_path)))
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        resolve_tokenizer(str(tmp_path))


def test_a_corrupt_tokenizer_is_a_load_error(model_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_directory, copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_tokenizer(ModelConfig(directory=str(copy)))


def test_a_name_that_is_nothing_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no/such/place", "nobody/no-such-tokenizer", "~nobody-here/tokenizer"):
        with pytest.raises(ModelNotFoundError, match="no tokenizer"):
            resolve_tokenizer(name)


def loaded(directory: Path, **settings: str) -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelConfig(directory=str(directory), **settings))


@pytest.fixture
def without_template(model_directory: Path, tmp_path: Path) -> Path:
    """A model's directory that has no template."""
    directory = tmp_path / "model"
    shutil.copytree(model_directory, directory)
    (directory / "chat_template.jinja").unlink()
    return directory


USER = [{"role": "user", "content": "the fox"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_templates_are_found_wherever_a_model_keeps_them(without_template: Path) -> None:
    directory = without_template
    assert loaded(directory).chat_template is None
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert render_chat(loaded(directory), USER)["prompt"] == "of a processor"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ (tools or []) | length }}"},
    ]
    content = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**content, "chat_template": named}))
    tokenizer = loaded(directory)
    assert render_chat(tokenizer, USER)["prompt"] == "plain"
    assert render_chat(tokenizer, USER, tools=[TOOL])["prompt"] == "with 1"
    assert render_chat(tokenizer, USER, tools=[])["prompt"] == "plain"
    assert render_chat(tokenizer, USER, chat_template="tool_use")["prompt"] == "with 0"
    (directory / "chat_template.jinja").write_text("of a file")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    tokenizer = loaded(directory)
    assert render_chat(tokenizer, USER, tools=[TOOL])["prompt"] == "of a file"
    assert render_chat(tokenizer, USER, chat_template="rag")["prompt"] == "with documents"


def test_named_templates_without_a_default_are_an_error_that_names_them(without_template: Path) -> None:
    templates = {"rag": "with documents", "tool_use": "with tools"}
    (without_template / "chat_template.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = loaded(without_template)
    assert render_chat(tokenizer, USER, tools=[TOOL])["prompt"] == "with tools"
    with pytest.raises(
        InvalidArgumentError, match=r"^chat_template must be .*one of this model's: rag, tool_use"
    ):
        render_chat(tokenizer, USER)
    (without_template / "chat_template.json").write_text(json.dumps({"chat_template": [{"name": "x"}]}))
    with pytest.raises(ModelLoadError, match=r"chat_template\.json must have a template"):
        loaded(without_template)


def test_the_engines_template_wins_over_the_models_and_a_calls_over_both(without_template: Path) -> None:
    templates = {"default": "plain", "tool_use": "with tools", "rag": "with documents"}
    (without_template / "chat_template.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = loaded(without_template, chat_template="{{ 'the engine' }}")
    assert render_chat(tokenizer, USER)["prompt"] == "the engine"
    assert render_chat(tokenizer, USER, tools=[TOOL])["prompt"] == "the engine"
    assert render_chat(tokenizer, USER, chat_template="{{ 'mine' }}")["prompt"] == "mine"
    assert render_chat(tokenizer, USER, chat_template="rag")["prompt"] == "with documents"
    with pytest.raises(
        InvalidArgumentError, match=r"one of this model's: default, rag, tool_use, got 'tool_us'"
    ):
        render_chat(tokenizer, USER, chat_template="tool_us")
    (without_template / "chat_template.json").unlink()
    assert not has_chat_template(loaded(without_template))
    with pytest.raises(InvalidArgumentError, match=r"a template's text, which has \{\{ or \{%"):
        render_chat(loaded(without_template), USER, chat_template="tool_use")
    only = loaded(without_template, chat_template="{{ 'the engine' }}")
    assert has_chat_template(only)
    assert render_chat(only, USER)["prompt"] == "the engine"


def test_a_template_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}\nü", encoding="utf-8")
    assert template_text(None) is None
    assert template_text("{{ x }}") == "{{ x }}"
    assert template_text(str(path)) == "{{ messages }}\nü"
    path.write_bytes(b"\xff{{ x }}")
    with pytest.raises(InvalidArgumentError, match="chat_template must be a file of UTF-8 text"):
        template_text(str(path))
    path.write_text("x" * (MAX_TEMPLATE_LENGTH + 1))
    with pytest.raises(InvalidArgumentError, match="at most 262,144 characters"):
        template_text(str(path))


def test_every_client_of_an_engine_has_its_template(model_directory: Path) -> None:
    given = EngineArgs(model="m", chat_template="{{ 'the engine' }}").create_engine_config(bound=False)
    config = dataclasses.replace(
        given, model=dataclasses.replace(given.model, directory=str(model_directory), tokenizer_directory="")
    )
    # What an attach finds in the connection file, and the model's files as they come over a network.
    there = msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig).model
    with described_model(there, describe_model(there)) as model:
        assert model.directory != str(model_directory)
        assert render_chat(load_tokenizer(model), USER)["prompt"] == "the engine"


def test_what_is_no_template_is_refused_with_line_and_reason() -> None:
    for text, reason in (
        ("{{ x }}\n{% for %}", "line 2: TemplateSyntaxError: Expected an expression"),
        ("{{ x", "line 1: TemplateSyntaxError: unexpected end of template"),
    ):
        with pytest.raises(
            InvalidArgumentError, match=rf"^chat_template must be a Jinja template \({reason}"
        ):
            check_template("chat_template", text)
    check_template(
        "chat_template", "{% for m in messages %}{% break %}{% endfor %}{% generation %}x{% endgeneration %}"
    )


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "a\n{{ raise_exception('no tools here') }}",
            "messages are refused by the chat template, line 2: no tools here",
        ),
        ("a\nb\n{{ nothing.there }}", "line 3: UndefinedError: 'nothing' is undefined"),
        ("a\n{% if %}", "line 2: TemplateSyntaxError: Expected an expression"),
        ("a\n\n{{ 1 / 0 }}", "line 3: ZeroDivisionError: division by zero"),
    ],
)
def test_a_template_that_fails_is_told_with_line_and_reason(
    template: str, reason: str, cheap: bool, model_directory: Path
) -> None:
    # The product makes it one that is rendered in the process with limits.
    text = template if cheap else template + "{{ 'x' * 3 }}"
    with pytest.raises(InvalidArgumentError, match=re.escape(reason)):
        render_chat(loaded(model_directory), USER, chat_template=text)


def test_a_template_without_a_generation_prompt_renders_the_messages_alone(model_directory: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for wanted in (True, False):
        rendered = render_chat(
            loaded(model_directory), USER, chat_template=template, add_generation_prompt=wanted
        )
        assert rendered["prompt"] == "the fox"


def test_an_added_token_in_the_middle_of_a_word_is_one_token_and_comes_back(model_directory: Path) -> None:
    tokenizer = loaded(model_directory)
    tokenizer.add_tokens(["<mid>"])
    ids = tokenizer.encode("fo<mid>x")
    assert tokenizer.convert_ids_to_tokens(ids).count("<mid>") == 1
    detokenizer = IncrementalDetokenizer.from_new_request(TextDecoding.of(tokenizer), SamplingParams())
    for token_id in ids:
        detokenizer.update([token_id], None)
    assert detokenizer.take_text(True) == "fo<mid>x"
