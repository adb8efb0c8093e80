"""A mistake in a cell gets one clear error there, and the stream beside it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_support.kernel import Kernel
from notebook_support.paced import start_line

from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

REQUESTS = [
    ("", "the prompt is empty"),
    ("--max-tokens 3\n" + "long " * 2000, "prompt must be at most 4095 tokens long"),
    ("--temprature 1\nhi", "unknown flag --temprature; did you mean --temperature?"),
    ("--engine nobody\nhi", "there is no engine 'nobody'"),
    ("-o 9x\nhi", "argument -o/--out: '9x' is not a variable name"),
    ("--temperature -1\nhi", "temperature must be a finite number, 0 or greater, got -1.0"),
    ("--temperature nan\nhi", "temperature must be finite, got nan"),
    ("--temperature hot\nhi", "argument --temperature: invalid float value: 'hot'"),
    ("--top-p 0\nhi", "top_p must be in (0, 1], got 0.0"),
    ("--top-k -7\nhi", "top_k must be 0 or -1 (off), or at least 1, got -7"),
    ("--min-p 2\nhi", "min_p must be in [0, 1], got 2.0"),
    ("--max-tokens 0\nhi", "max_tokens must be at least 1, or None, got 0"),
    ("--seed -1\nhi", "seed must be in [0, 2**63), got -1"),
    ('--stop ""\nhi', "stop must be without empty strings"),
    ("-n 3 --temperature 0\nhi", "n must be 1 when using greedy sampling, got 3"),
    ("-n 0\nhi", "n must be at least 1, got 0"),
    ("--logprobs 21\nhi", "logprobs must be in [0, 20], or None, got 21"),
    ("--set min_tokens=20 --max-tokens 10\nhi", "min_tokens must be at most max_tokens, got 20"),
    ("--set presence_penalty=5\nhi", "presence_penalty must be in [-2, 2], got 5"),
    ("--set frequency_penalty=-5\nhi", "frequency_penalty must be in [-2, 2], got -5"),
    ("--set repetition_penalty=0\nhi", "repetition_penalty must be greater than 0, got 0"),
    ("--set stop_token_ids=[258]\nhi", "stop_token_ids must be token ids in [0, 258), got 258"),
    ("--set truncate_prompt_tokens=0\nhi", "truncate_prompt_tokens must be -1, at least 1, or None, got 0"),
    ("--set bogus=1\nhi", "no sampling parameter 'bogus'"),
]
STARTS = [
    ("no-such-model", "no model 'no-such-model'"),
    ("/no/such/model", "no model '/no/such/model'"),
    ("random-tiny --num-bloks 3", "unknown flag --num-bloks; did you mean --num-blocks?"),
    ("random-tiny --block-size 3", "block_size must be a power of two from 1 to 256, got 3"),
    ("random-tiny --kv-cache-memory-bytes lots", "'lots' is not a size such as 512MiB"),
    ("random-tiny --dp 0", "data_parallel_size must be at least 1, got 0"),
]


@pytest.fixture(scope="module")
def notebook(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with an engine; every test runs beside a stream, which must not notice."""
    kernel.run(start_line(tokens_per_second=200) + " -o llm")
    yield kernel
    kernel.run("%engine stop random-tiny")


@pytest.fixture(autouse=True)
def neighbour(notebook: Kernel) -> Iterator[None]:
    """A stream in the background; it must bring exactly its text."""
    notebook.run("%%generate -a -o neighbour --max-tokens 200\nhi\n")
    yield
    notebook.run("result = await neighbour")
    assert notebook.value("(result.text, result.finish_reason)") == ((ALPHABET * 8)[:200], "length")


def complaint(notebook: Kernel, code: str) -> str:
    """Return the one line that is shown for a mistake in a line; check that there is no traceback."""
    cell = notebook.run_any(code)
    assert cell.status == "error"
    output = cell.outputs[-1]
    assert output["name"] == "stderr", cell.outputs
    assert output["text"].startswith("UsageError: ")
    assert output["text"].count("\n") == 1
    return str(output["text"])


def start_failure(notebook: Kernel, code: str) -> str:
    """Return the line that is shown, behind the stages, for a start that fails later: the whole traceback."""
    cell = notebook.run_any(code)
    assert cell.status == "error"
    stages, error = cell.outputs
    assert "✗" in stages["data"]["text/plain"]
    (line,) = error["traceback"]
    assert line == f"{error['ename']}: {error['evalue']}"
    assert "\n" not in line
    return str(line)


def test_a_wrong_request_is_one_line_that_names_it(notebook: Kernel) -> None:
    for rest, message in REQUESTS:
        assert message in complaint(notebook, f"%%generate {rest}\n")
    assert "ABC" in notebook.run("%%generate --max-tokens 3\nhi\n").text


def test_a_variable_that_does_not_exist_stays_text(notebook: Kernel) -> None:
    notebook.run("x = 5\n")
    notebook.run("%%generate -o answer --raw --max-tokens 2\n{x} {nobody} {x.nothing} {nobody[0]} {1 + }\n")
    assert notebook.value("answer.prompt") == "5 {nobody} {x.nothing} {nobody[0]} {1 + }"


def test_a_wrong_start_is_one_line_that_names_it(notebook: Kernel) -> None:
    assert "is running already" in complaint(notebook, "%engine start")
    named = complaint(notebook, "%engine start --name random-tiny")
    assert "is running already, and differs: model is" in named
    assert "or another --name" in named
    assert "no command 'strat'; did you mean start?" in complaint(notebook, "%engine strat")
    for rest, message in STARTS:
        assert message in complaint(notebook, f"%engine start {rest} --name second")


def test_a_model_that_cannot_be_loaded_is_one_line_with_the_fault(notebook: Kernel, tmp_path: Path) -> None:
    with open(resolve_model(ModelConfig("smollm2-135m")).weights[0], "rb") as file:
        head = file.read(4 << 20)
    tiny = resolve_model(ModelConfig("random-tiny")).directory
    (tmp_path / "cut.gguf").write_bytes(head)
    (tmp_path / "corrupt.gguf").write_bytes(head[:100] + b"\xff" * 300 + head[400:])
    cut, silent = (shutil.copytree(tiny, tmp_path / name) for name in ("cut", "silent"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (silent / "tokenizer.json").unlink()
    for path, message in (
        (tmp_path / "cut.gguf", "truncated: tensor"),
        (tmp_path / "corrupt.gguf", "corrupt"),
        (cut, f"{weights} is truncated, corrupt or no safetensors file"),
        (silent, f"{silent} has no tokenizer.json"),
    ):
        line = start_failure(notebook, f"%engine start {path} --name second")
        assert str(path) in line
        assert message in line


def test_a_model_that_does_not_fit_is_one_line_with_the_numbers(notebook: Kernel) -> None:
    start = "%engine start random-tiny --name second --device cpu"
    weights = start_failure(notebook, f"{start} --hf-overrides '{{\"intermediate_size\": 10000000000}}'")
    assert "does not fit on cpu: its weights take about 13.97 TiB" in weights
    blocks = start_failure(notebook, f"{start} --num-blocks 2 --max-model-len 2048")
    assert blocks.endswith(
        "lower max_model_len to at most 32, or raise num_gpu_blocks_override to at least 128"
    )
    assert "(1 MiB), but the KV cache has 2 (16 KiB)" in blocks
