"""`--json`, `--regex`, `--choice` and `.value`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine import IncompleteOutputError, StructuredOutputsParams
from nbengine.magics.comparison.arguments import parse_request
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.arguments import GenerateOptions
from tests.unit.magics.conftest import FakeClient, RecordingPublisher

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)


class Place(pydantic.BaseModel):
    """A class that a user may have defined in a cell."""

    city: str


def parse(line: str, body: str | None = "hi\n", **namespace: object) -> GenerateOptions:
    (combination,) = parse_request(line, body, NBEngine(), {**namespace, "n": 3}).combinations
    return combination.options


def constraint(options: GenerateOptions) -> tuple[str, Any]:
    params = options.sampling["structured_outputs"]
    assert isinstance(params, StructuredOutputsParams)
    return params.constraint


def test_a_schema_is_a_variable_json_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(TEXT)
    for line, found in (
        ("--json schema", SCHEMA),
        ("--json {schema}", SCHEMA),
        ("--json=schema", SCHEMA),
        ("--json text", TEXT),
        (f"--json '{TEXT}'", TEXT),
        (f"--json {file}", TEXT),
        ("--json Place", Place.model_json_schema()),
    ):
        options = parse(line, schema=SCHEMA, text=TEXT, Place=Place)
        assert constraint(options) == ("json", found), line
        assert (options.format, options.parse_json) == ("json", True)
    assert parse("--json schema -f code", schema=SCHEMA).format == "code"


@pytest.mark.parametrize("line", ["--json", "--json -o x", "-o x --json", "--json --temperature 0"])
def test_json_alone_asks_for_any_object(line: str) -> None:
    assert constraint(parse(line)) == ("json_object", True)


def test_a_line_prompt_after_a_bare_json_needs_a_mark() -> None:
    for line in ("--json -- List two bees", "--json -o x List two bees", "--json schema List two bees"):
        options = parse(line, None, schema=SCHEMA)
        assert options.prompt == "List two bees"
        assert options.parse_json


def test_a_regex_is_taken_as_it_is_and_choices_are_split() -> None:
    options = parse("--regex '[0-9]{n}'")
    assert constraint(options) == ("regex", "[0-9]{n}")
    assert (options.format, options.parse_json) == ("text", False)
    assert constraint(parse("--choice yes,no")) == ("choice", ["yes", "no"])
    assert constraint(parse("--choice 'dark green, red'")) == ("choice", ["dark green", "red"])
    assert constraint(parse("""--choice '["a, b", "c"]'""")) == ("choice", ["a, b", "c"])
    assert constraint(parse("--choice '[a],b'")) == ("choice", ["[a]", "b"])
    assert parse("").sampling == {}


def test_the_constraint_reaches_the_engine_and_value_is_the_parsed_answer(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.user_ns["schema"] = SCHEMA
    engine.words = ['{"a"', ": [1", ", 2]}"]
    kernel_shell.run_cell("%%generate --json schema -o answer\nTwo numbers\n").raise_error()
    (_, params) = engine.requests[0]
    assert params.structured_outputs == StructuredOutputsParams(json=SCHEMA)
    assert kernel_shell.user_ns["answer"].value == {"a": [1, 2]}
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    (shown,) = publisher.outputs()
    assert shown["text/plain"].startswith('{\n  "a": [\n    1,\n    2\n  ]\n}')


def test_value_without_json_is_the_text(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%%generate --choice 'Hello world,bye' -o answer\nGreet\n").raise_error()
    assert shell.user_ns["answer"].value == "Hello world"


@pytest.mark.parametrize(
    ("finish_reason", "words"),
    [
        (
            "length",
            r"not complete JSON: it was cut off at max_tokens=1; raise --max-tokens, or NBEngine.max_tokens .* \(.text has",
        ),
        ("abort", "it was ended early"),
        ("stop", "a stop string or stop token ended it"),
        (None, "it is still being written"),
    ],
)
def test_value_of_an_answer_that_was_cut_off_says_why(
    shell: InteractiveShell, engine: FakeClient, finish_reason: str | None, words: str
) -> None:
    engine.words = None
    shell.run_cell("%%generate -a --json --max-tokens 1 -o handle\nMore\n").raise_error()
    handle = shell.user_ns["handle"]
    engine.emit('{"a": [1', finish_reason)
    result = handle._partial if finish_reason is None else handle.result(timeout=60)
    with pytest.raises(IncompleteOutputError, match=words):
        _ = result.value
    if finish_reason is None:
        engine.emit("]}", "stop")
        assert handle.result(timeout=60).value == {"a": [1]}


def test_value_of_an_answer_that_was_cut_off_shows_one_line_and_no_traceback(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.words = None
    shell.run_cell("%%generate -a --json --max-tokens 1 -o handle\nMore\n").raise_error()
    engine.emit('{"a": [1', "length")
    shell.user_ns["answer"] = shell.user_ns["handle"].result(timeout=60)
    capsys.readouterr()
    assert not shell.run_cell("answer.value").success
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "IncompleteOutputError: the answer is not complete JSON: it was cut off at max_tokens=1;"
    )
