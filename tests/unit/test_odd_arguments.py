"""Whatever is odd about a directory or an argument: the error names it, on one short line, and nothing is started."""

from __future__ import annotations

import functools
import inspect
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine import LLM, AsyncLLM, SamplingParams, cli
from nbengine.client.engines import directory, launch
from nbengine.client.engines.directory import find_engine, list_engines
from nbengine.config import EngineArgs, EngineConfig, ModelConfig
from nbengine.errors import EngineStartError, InvalidArgumentError, NBEngineError, NotSupportedError
from nbengine.frontend.options import EngineOptions
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.prompt_length import TextEncoder
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.models.checkpoints.files import cache_dir, resolve_model
from nbengine.runtime.connection import ConnectionInfo, log_dir
from nbengine.runtime.directories import places
from nbengine.sampling_params import StructuredOutputsParams
from tests.support.odd_values import ANYTHING, LARGE, LONGEST, SURROGATE, short_line

UNDECODABLE = os.fsdecode(b"a\xffb")
HUGE = "x" * 10**5


def nested(depth: int = 10_000) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def circle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["x"] = value
    return value


class Launched(EngineStartError):
    """All is in order: the host's process would be started now."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A small model, on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBENGINE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return resolve_model(ModelConfig("random-tiny"))


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the place of all directories of a test; no engine is ever started there."""
    place = tmp_path_factory.mktemp("p")
    for variable in ("NBENGINE_RUNTIME_DIR", "NBENGINE_CACHE_DIR", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(place / variable.lower()))
    for variable in ("xdg_runtime_dir", "tmpdir"):
        (place / variable).mkdir(0o700)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(tempfile, "tempdir", None)

    # What a start clears away is looked for here alone.
    monkeypatch.setattr(directory, "places", lambda: [p for p in places() if p.startswith(str(place))])

    def start(info: ConnectionInfo) -> ConnectionInfo:
        raise Launched(info.name)

    monkeypatch.setattr(launch, "_start_host", start)
    return place


def refused(call: Callable[[], object], *named: str) -> NBEngineError:
    """The error of a call that must not come as far as to a start, which names what is odd."""
    with pytest.raises(NBEngineError) as caught:
        call()
    assert not isinstance(caught.value, Launched)
    message = short_line(caught.value)
    assert any(name in message for name in named), message
    return caught.value


# Arguments of an engine.

PATHS = [
    SURROGATE,
    UNDECODABLE,
    "a\0b",
    HUGE,
    HUGE + "/x.gguf",
    "a/" * 5000 + "x.gguf",
    "a\nb",
    "~nobody-there/x",
    "",
    "'\"",
    "loop",
    "empty",
    b"x",
    5,
    math.nan,
]
TEXTS = [SURROGATE, "a\0b", HUGE, b"x", 5, math.nan, LARGE]
NUMBERS = [LARGE, -LARGE, math.nan, math.inf, -math.inf, -1, "5", True, [], HUGE]
ARGUMENTS: dict[str, list[Any]] = {
    **dict.fromkeys(("model", "tokenizer"), PATHS),
    "chat_template": [*PATHS, "{{" + HUGE, "{% for %}", "{{ x", "{%" + SURROGATE],
    **dict.fromkeys(
        (
            "dtype",
            "tokenizer_mode",
            "generation_config",
            "load_format",
            "model_impl",
            "device",
            "scheduling_policy",
            "runner",
            "kv_cache_dtype",
            "quantization",
            "activation_dtype",
            "distributed_executor_backend",
            "data_parallel_backend",
            "distributed_init_method",
            "data_parallel_address",
            "ray_address",
            "profile_dir",
            "revision",
        ),
        TEXTS,
    ),
    **dict.fromkeys(
        (
            "max_model_len",
            "seed",
            "block_size",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "max_num_seqs",
            "max_num_batched_tokens",
            "long_prefill_token_threshold",
            "stream_interval",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "ray_timeout",
            "ray_cpus_per_worker",
            "keep_alive",
            "lease",
            "client_backlog_bytes",
            "metrics_port",
        ),
        NUMBERS,
    ),
    "hf_overrides": [
        nested(),
        circle(),
        {"a": LARGE},
        {"a": math.nan},
        {"a": object()},
        {"a": b"x"},
        {5: 1},
        {SURROGATE: 1},
        {"a": SURROGATE},
        [1],
        HUGE,
        {"a": {1, 2}},
    ],
    "logits_processors": [[SURROGATE + ":x"], ["a:" + HUGE], ["a\0:b"], [5], "a:b", [None], [["a:b"]]],
    "name": [SURROGATE, "a\0b", HUGE, "a\nb", "", "..", "a/b", b"x", 5, "-x"],
    "session": [SURROGATE, "a\0b", HUGE, b"x", 5],
}


def test_every_odd_argument_of_an_engine_is_refused_by_name(
    place: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "loop").symlink_to(place / "loop")
    (place / "empty").mkdir()
    monkeypatch.chdir(place)
    for argument, values in ARGUMENTS.items():
        for value in values:
            arguments = {"model": model.directory, argument: value}
            for door in [AsyncLLM] if argument in ("name", "session") else [LLM, AsyncLLM]:
                call = functools.partial(door, **arguments)
                path = [str(value)[:50]] if isinstance(value, str) and value else []
                error = refused(call, argument, *path)
                if argument not in ("model", "tokenizer"):
                    assert isinstance(error, InvalidArgumentError | NotSupportedError)


OWN = {
    "bound": [0, "x", None, math.nan, [], LARGE, SURROGATE],
    "progress": [5, "x", [], {}, math.nan, SURROGATE],
    "multiprocess": [0, "x", None, math.nan, [], LARGE, SURROGATE],
}
"""Arguments of the frontends themselves."""


def test_every_argument_of_a_frontend_is_tried() -> None:
    for door in (LLM, AsyncLLM):
        arguments = inspect.signature(door).parameters.keys() - EngineOptions.__annotations__.keys()
        assert arguments <= {*OWN, "name", "session", "model"}, door


def test_every_odd_argument_of_a_frontend_is_refused_by_name(place: Path, model: ModelConfig) -> None:
    for argument, values in OWN.items():
        for value in values:
            for door in (LLM, AsyncLLM):
                if argument in inspect.signature(door).parameters:
                    error = refused(
                        functools.partial(door, **{"model": model.directory, argument: value}), argument
                    )
                    assert isinstance(error, InvalidArgumentError | NotSupportedError)


def test_what_is_only_unusual_is_taken(
    place: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    unusual = place / "ä b'\n\"c"
    unusual.symlink_to(model.directory)
    overrides = {"a": [1, 2.5, None, True, "x", (1, 2), {"b": {"c": []}}]}
    for arguments in (
        {"model": str(unusual)},
        {"keep_alive": 10**6, "lease": 1e9},
        {"hf_overrides": overrides},
        {"name": "a" * 64, "session": "ä b"},
    ):
        with pytest.raises(Launched):
            AsyncLLM(**{"model": model.directory} | arguments)


# Directories.

DIRECTORIES = [
    "missing/deep",
    "file",
    "file/x",
    "unwritable",
    "./relative",
    "x y\"z'",
    "a\nb",
    "long/" * 60,
    "x" * 300,
    UNDECODABLE,
    "loop",
    "~nobody-there/x",
    "/proc/nothing",
    "gone",
]
COMMANDS = (["ps"], ["stop", "none"], ["logs", "none"])


@pytest.mark.parametrize("odd", DIRECTORIES, ids=lambda odd: ascii(odd[:20]))
@pytest.mark.parametrize(
    "variable",
    [
        "NBENGINE_RUNTIME_DIR",
        "NBENGINE_CACHE_DIR",
        "TMPDIR",
        "XDG_RUNTIME_DIR",
        "JUPYTER_RUNTIME_DIR",
        "XDG_CACHE_HOME",
    ],
)
def test_an_odd_directory_is_used_or_named(
    variable: str,
    odd: str,
    place: Path,
    model: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "loop").symlink_to(place / "loop")
    (place / "file").write_text("x")
    (place / "unwritable").mkdir(0o500)
    (place / "gone").mkdir()
    monkeypatch.chdir(place)
    if variable == "JUPYTER_RUNTIME_DIR":
        monkeypatch.delenv("NBENGINE_RUNTIME_DIR")
    if variable == "XDG_CACHE_HOME":
        monkeypatch.delenv("NBENGINE_CACHE_DIR")
    monkeypatch.setenv(variable, odd if odd.startswith(("~", "/", ".", "gone")) else str(place / odd))
    if odd == "gone":
        monkeypatch.chdir(place / "gone")
        (place / "gone").rmdir()
    is_cache = "CACHE" in variable
    doors: list[Callable[[], object]] = [
        lambda: LLM("random-tiny" if is_cache and odd != "gone" else model.directory),
        cache_dir,
        lambda: find_engine("none"),
        lambda: AsyncLLM.attach("none"),
        list_engines,
    ]
    said_by_door: dict[bool, list[str]] = {True: [], False: []}
    for door in doors:
        try:
            door()
        except NBEngineError as error:
            said_by_door[isinstance(error, Launched)].append(short_line(error))
    remedy = "NBENGINE_CACHE_DIR" if is_cache else "NBENGINE_RUNTIME_DIR"
    assert all(remedy in message or "'none'" in message for message in said_by_door[False])
    for command in COMMANDS:
        assert cli.main(command) in (0, 1)
        said = capsys.readouterr().err
        assert said.count("\n") <= 1
        assert len(said) <= LONGEST


# Names of engines, and command lines.


def test_an_odd_name_is_no_engines(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "loop.json").symlink_to(place / "loop.json")
    (place / "deep.json").write_text("[" * 10**5)
    (place / "dir.json").mkdir()
    monkeypatch.chdir(place)
    further = [
        "loop.json",
        "deep.json",
        "dir.json",
        "~/x.json",
        LARGE,
        [],
        nested(),
        Path("a\0b"),
        Path(HUGE),
    ]
    for value in [*PATHS, *further]:
        for door in (find_engine, AsyncLLM.attach):
            path = [str(value)[:50]] if isinstance(value, str | Path) else []
            error = refused(functools.partial(door, value), "name_or_file", "no engine", *path)
            assert isinstance(value, str | Path) or isinstance(error, TypeError)
    for session in ARGUMENTS["session"]:
        refused(functools.partial(AsyncLLM.attach, "a", session=session), "session")


LINES = [
    *(
        [*command, odd]
        for odd in PATHS
        if isinstance(odd, str)
        for command in (["fetch"], ["stop"], ["logs"], [])
    ),
    *(["fetch", "x", "--revision", odd] for odd in (SURROGATE, "a\0b", HUGE)),
    *(["stop", "a", "--timeout", odd] for odd in ("nan", "inf", "-1", "1e400", HUGE, "", SURROGATE)),
    *(
        ["logs", "a", option, odd]
        for option in ("-n", "--rank")
        for odd in ("-5", "9" * 400, "9" * 5000, HUGE, "x")
    ),
    ["ps", HUGE],
    ["ps", "a\nb"],
    ["fit", HUGE],
    ["fit", "random-tiny", "--seed", "nan"],
    ["start", HUGE],
    ["start", "random-tiny", "--seed", "nan"],
    ["chat", "random-tiny", "--engine", HUGE],
    ["attach", "--interval", "nan"],
    ["models", HUGE],
    ["fit", "random-tiny", "--max-model-len", "9" * 400],
]


def test_an_odd_command_line_gets_a_line_and_a_status(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    (log_dir() / "a-20200101-000000-000000.log").write_text("hello\n")
    for line in LINES:
        try:
            status = cli.main(line)
        except SystemExit as exit_:
            status = exit_.code
        said = [text for text in capsys.readouterr().err.splitlines() if not text.startswith(("usage:", " "))]
        assert len(said) == 1, line
        assert len(said[0]) <= LONGEST, line
        assert status == 2 or (status == 1 and line[:-1] in (["fetch"], ["stop"], ["logs"])), line


def test_output_that_cannot_be_written_is_an_error_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main(["ps"]) == 1
    assert capsys.readouterr().err == "nbengine: [Errno 28] No space left on device\n"


# Requests.

ODD_PARAMS: dict[str, list[Any]] = {
    **{
        name: [LARGE, -LARGE, math.nan, math.inf, -math.inf, "5", [], None, nested()]
        for name in (
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
    },
    **{
        name: [LARGE, -LARGE, math.nan, math.inf, "5", [], nested()]
        for name in ("seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
    },
    **{name: [-LARGE, math.nan, math.inf, "5", [], nested()] for name in ("max_tokens", "min_tokens")},
    **{name: [[SURROGATE], [5], [HUGE, SURROGATE], 5, math.nan] for name in ("stop", "bad_words")},
    **{name: [[LARGE], [-LARGE], [math.nan], ["x"], 5] for name in ("stop_token_ids", "allowed_token_ids")},
    "logit_bias": [{LARGE: 1.0}, {10**5000: math.nan}, {1: LARGE}, {1: math.inf}, {HUGE: 1}, [], 5],
    "extra_args": [
        nested(),
        circle(),
        {"a": LARGE},
        {"a": SURROGATE},
        {SURROGATE: 1},
        {HUGE: object()},
        {5: 1},
    ],
    "output_kind": [LARGE, HUGE, math.nan, nested()],
    "structured_outputs": [nested(), 5, HUGE],
}
ODD_CONSTRAINTS: dict[str, list[Any]] = {
    "json": [
        nested(),
        circle(),
        {"a": math.nan},
        {"a": SURROGATE},
        "[" * 10**5,
        SURROGATE,
        HUGE,
        5,
    ],
    "regex": [SURROGATE, "", 5],
    "grammar": [SURROGATE, "", 5],
    "choice": [[SURROGATE], [5], [""], [], HUGE],
    "json_object": [5, HUGE],
    "whitespace_pattern": [SURROGATE, "", 5],
}


@pytest.fixture(scope="module")
def processor(model: ModelConfig) -> InputProcessor:
    tokenizer = load_tokenizer(model)
    return InputProcessor(EngineConfig(model=model), tokenizer, TextEncoder(tokenizer.backend_tokenizer), 64)


def send(processor: InputProcessor, prompt: Any = "x", request_id: Any = "r", **params: Any) -> Any:
    """Make the bytes that the engine gets, and return what it reads."""
    params = {"temperature": 1.0} | params
    request = processor.process_inputs(request_id, prompt, SamplingParams(**params))
    return MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))


def test_every_odd_parameter_of_a_request_is_refused_by_name(processor: InputProcessor) -> None:
    send(processor)
    for name, values in ODD_PARAMS.items():
        for value in values:
            error = refused(functools.partial(send, processor, **{name: value}), name)
            assert isinstance(error, ValueError)
    for name, values in ODD_CONSTRAINTS.items():
        for value in values:
            constraint = {"json_object": True} if name == "whitespace_pattern" else {}

            def ask(given: dict[str, Any] = {**constraint, name: value}) -> None:  # noqa: B006
                send(processor, structured_outputs=StructuredOutputsParams(**given))

            refused(ask, f"structured_outputs.{name}")


def test_every_odd_prompt_is_refused_by_name(processor: InputProcessor) -> None:
    prompts = [
        SURROGATE,
        "",
        5,
        None,
        math.nan,
        LARGE,
        b"x",
        [LARGE],
        [-1],
        [math.nan],
        ["x"],
        [[1]],
        HUGE,
        {},
        nested(),
    ]
    prompts += [
        {"prompt": 5},
        {"prompt": SURROGATE},
        {"prompt_token_ids": [LARGE]},
        {SURROGATE: 1},
        {HUGE: 1},
        {5: 1},
    ]
    for prompt in prompts:
        refused(functools.partial(send, processor, prompt), "prompt")
    for salt in (SURROGATE, "", 5, nested()):
        refused(functools.partial(send, processor, {"prompt": "x", "cache_salt": salt}), "cache_salt")
    for request_id in (SURROGATE, "", 5, None):
        refused(functools.partial(send, processor, "x", request_id), "request_id")


PARAMS = st.dictionaries(st.sampled_from([*ODD_PARAMS, *("ignore_eos", "detokenize")]), ANYTHING, max_size=2)


@given(prompt=st.just("x") | ANYTHING, params=PARAMS)
def test_whatever_is_asked_is_sent_or_refused(
    processor: InputProcessor, prompt: Any, params: dict[str, Any]
) -> None:
    try:
        request = send(processor, prompt, **params)
    except (InvalidArgumentError, NotSupportedError) as error:
        short_line(error)
    else:
        assert (request.request_id, bool(request.prompt_token_ids)) == ("r", True)


@given(
    arguments=st.dictionaries(st.sampled_from(sorted(EngineOptions.__annotations__)), ANYTHING, max_size=2)
)
def test_whatever_an_engine_is_to_be_it_is_written_down_or_refused(arguments: dict[str, Any]) -> None:
    try:
        config = EngineArgs.from_kwargs(arguments).create_engine_config(bound=True)
    except (InvalidArgumentError, NotSupportedError) as error:
        short_line(error)
    else:
        assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
