"""Command lines of the magics."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError

from nbengine.config import EngineArgs
from nbengine.config.engine import WITHOUT_EFFECT
from nbengine.magics.arguments import HelpRequested, key_value, literal, memory_size, split_prompt
from nbengine.magics.comparison.arguments import parse_request
from nbengine.magics.config import NBEngine
from nbengine.magics.engines.arguments import arguments_of, parse_start, start_parser
from nbengine.magics.generation.arguments import (
    GenerateOptions,
    generate_parser,
    sampling_params,
)


def parse(line: str, body: str | None = "hi\n") -> GenerateOptions:
    (combination,) = parse_request(line, body, NBEngine(), {}).combinations
    assert combination.settings == {}
    return combination.options


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("0.5", 0.5),
        ("true", True),
        ("True", True),
        ("None", None),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("bfloat16", "bfloat16"),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_a_literal_is_json_or_a_python_word_or_a_string(text: str, value: object) -> None:
    assert literal(text) == value


def test_key_value_wants_both_sides() -> None:
    assert key_value("long-prefill-token-threshold=4") == ("long_prefill_token_threshold", 4)
    assert key_value("stop=a=b") == ("stop", "a=b")
    for wrong in ("novalue", "=1"):
        with pytest.raises(argparse.ArgumentTypeError, match="key=value"):
            key_value(wrong)


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("1.5GiB", 3 << 29), ("2G", 2 * 10**9), ("800 MB", 8 * 10**8)]
)
def test_memory_sizes_have_units(text: str, size: int) -> None:
    assert memory_size(text) == size


def test_every_engine_argument_is_a_flag_of_start() -> None:
    samples = {
        "hf_overrides": ('{"a": 1}', {"a": 1}),
        "logits_processors": ("a:B,c.d:E", ["a:B", "c.d:E"]),
        "kv_cache_memory_bytes": ("1MiB", 1 << 20),
    }
    parser = start_parser()
    for argument in fields(EngineArgs):
        if argument.name == "model":
            continue
        flag = "--" + argument.name.replace("_", "-")
        if isinstance(argument.default, bool) or argument.name == "async_scheduling":
            assert parse_start([flag]).arguments == {argument.name: True}
            assert parse_start([flag.replace("--", "--no-", 1)]).arguments == {argument.name: False}
            continue
        is_text = isinstance(argument.default, str) or "str" in str(argument.type)
        text, value = samples.get(argument.name, ("x", "x") if is_text else ("7", 7))
        assert parse_start([flag, text]).arguments == {argument.name: value}
        assert parser.takes_value(flag)


def test_start_has_the_short_names_of_the_interface() -> None:
    line = "m --name N --tp 1 --pp 1 --dp 1 --num-blocks 9 --set enforce_eager=true -o llm"
    options = parse_start(line.split())
    assert (options.name, options.out) == ("N", "llm")
    assert options.arguments == {
        "model": "m",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "num_gpu_blocks_override": 9,
        "enforce_eager": True,
    }


def test_arguments_without_effect_are_taken_as_flags_too() -> None:
    line = "--enable-sleep-mode --no-trust-remote-code --runner pooling --set disable_log_stats=true"
    arguments = parse_start(line.split()).arguments
    assert arguments == {
        "enable_sleep_mode": True,
        "trust_remote_code": False,
        "runner": "pooling",
        "disable_log_stats": True,
    }
    assert set(arguments) <= set(WITHOUT_EFFECT)
    assert EngineArgs.from_kwargs(arguments) == EngineArgs()


_FLOAT32 = {"dtype": "float32", "activation_dtype": "int16"}
"""Two arguments that are refused together."""


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.sampled_from(["a", "b/c"]),
            "dtype": st.sampled_from(["auto", "float32"]),
            "max_model_len": st.none() | st.integers(1, 100),
            "seed": st.integers(0, 9),
            "hf_overrides": st.none()
            | st.dictionaries(st.text(max_size=3), st.integers(1 - 2**63, 2**63 - 1)),
            "logits_processors": st.none() | st.lists(st.just("a:B"), max_size=2),
            "block_size": st.sampled_from([8, 16]),
            "activation_dtype": st.sampled_from(["auto", "int16"]),
            "kv_cache_dtype": st.sampled_from(["auto", "int8"]),
            "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
            "max_num_batched_tokens": st.none() | st.integers(1, 9),
            "enable_prefix_caching": st.booleans(),
            "keep_alive": st.floats(0, 9),
            "data_parallel_backend": st.just("mp"),
        },
    ).filter(lambda arguments: not _FLOAT32.items() <= arguments.items())
)
def test_arguments_of_a_configuration_make_it_again(arguments: dict[str, object]) -> None:
    config = EngineArgs.from_kwargs(arguments).create_engine_config(bound=False)
    again = arguments_of(config)
    assert EngineArgs.from_kwargs(again).create_engine_config(bound=False) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-modl-len 3", "unknown flag --max-modl-len; did you mean --max-model-len?"),
        ("--zzz=3", "unknown flag --zzz ("),
        ("a b", "unexpected 'b'"),
        ("--max-model-len many", "invalid int value: 'many'"),
        ("--set blok_size=3", "no engine argument 'blok_size'; did you mean block_size?"),
        ("--set novalue", "not of the form key=value"),
        ("--hf-overrides 3", "not a JSON object"),
        ("--kv-cache-memory-bytes lots", "not a size such as 512MiB"),
        ("--kv-cache-memory-bytes 9000000000T", "'9000000000T' is more than a machine can have"),
        (f"--kv-cache-memory-bytes {'9' * 400}", "is more than a machine can have"),
        ("-o 1-x", "argument -o/--out: '1-x' is not a variable name"),
        ("-o class", "'class' is not a variable name"),
        ("--max-model-len", "expected one argument"),
    ],
)
def test_a_mistake_on_start_is_one_line_that_names_it(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_start(words.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_is_text_and_not_an_exit() -> None:
    with pytest.raises(HelpRequested, match="--max-num-batched-tokens"):
        parse_start(["-h"])
    with pytest.raises(HelpRequested, match="--temperature"):
        parse("--help")


def test_sampling_flags_reach_the_parameters() -> None:
    options = parse(
        "--temperature 0.3 --top-p .9 --top-k 5 --min-p 0.1 --max-tokens 7 --seed 3 --stop x --stop '\\n' "
        "--set min_tokens=2 --set ignore-eos=true"
    )
    params = sampling_params(options, {"top_p": 0.5, "repetition_penalty": 1.1}, NBEngine())
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.9, 5, 0.1)
    assert (params.max_tokens, params.seed, params.min_tokens, params.ignore_eos) == (7, 3, 2, True)
    assert params.stop == ["x", "\n"]
    assert params.repetition_penalty == 1.1


def test_the_line_wins_over_the_notebook_and_that_over_the_model() -> None:
    config = NBEngine(temperature=0.7)
    model = {"temperature": 0.2, "top_p": 0.8}
    assert sampling_params(parse(""), model, NBEngine()).temperature == 0.2
    assert sampling_params(parse(""), model, config).temperature == 0.7
    assert sampling_params(parse("--temperature 0"), model, config).temperature == 0
    assert sampling_params(parse(""), model, config).top_p == 0.8
    assert sampling_params(parse(""), {"max_tokens": 3}, NBEngine()).max_tokens == 512
    assert sampling_params(parse(""), {}, NBEngine(max_tokens=None)).max_tokens is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--json schema",
            "--json schema: neither a variable nor JSON in quotes, and as a file: No such file",
        ),
        ("--json '{\"type\": 1'", "structured_outputs.json must be a JSON schema"),
        ("--json . ", "as a file: Is a directory"),
        ("--regex ''", "structured_outputs.regex must be not empty"),
        ("--choice a,,b", "structured_outputs.choice must be a list of strings, none of them empty"),
        ("--choice '[1]'", "structured_outputs.choice must be a list of strings"),
        ("--json --regex a", "argument --regex: not allowed with argument --json"),
        ("--regex a --choice a,b", "argument --choice: not allowed with argument --regex"),
        ("--regex", "argument --regex: expected one argument"),
        ("--set structured_outputs=3", "--set structured_outputs: use --json, --regex or --choice"),
        ("-t first", "argument -t: invalid int value: 'first'"),
        ("-n many", "invalid int value: 'many'"),
        ("--logprobs x", "invalid int value: 'x'"),
        ("--set output_kind=null", "--set output_kind: nbengine sets it itself"),
        ("--set eos_token_id=3", "--set eos_token_id: nbengine sets it itself"),
        ("--set temprature=2", "no sampling parameter 'temprature'; did you mean temperature?"),
        ("--max-token 3", "unknown flag --max-token; did you mean --max-tokens?"),
        ("hello", "unexpected 'hello': the prompt is the cell's body"),
        ("--system 'a", "no closing quotation"),
        ("--json ~nobody-here/x", "as a file: Could not determine home directory"),
        ("-o 3x", "argument -o/--out: '3x' is not a variable name"),
        ("--raw --system S", "--system needs a chat prompt"),
        ("--raw --chat", "not allowed with argument"),
        ("-f latex", "invalid choice"),
    ],
)
def test_a_mistake_on_generate_is_one_line_that_names_it(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_out_of_range_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"temperature must be .*, got -1"):
        sampling_params(parse("--temperature -1"), {}, NBEngine())


def test_answers_and_log_probabilities_are_sampling_parameters() -> None:
    assert parse("-n 3 --logprobs 2").sampling == {"n": 3, "logprobs": 2}
    assert parse("--set n=3 --set logprobs=2 --set prompt_logprobs=1").sampling == {
        "n": 3,
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    with pytest.raises(UsageError, match="n must be 1 when using greedy sampling, got 2"):
        sampling_params(parse("-n 2 --temperature 0"), {}, NBEngine())


@pytest.mark.parametrize("body", ["", "\n", "  \n"])
def test_an_empty_prompt_is_refused(body: str) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        parse("", body)


def test_a_body_loses_only_the_line_break_that_ipython_adds() -> None:
    assert parse("", "  indented \n\n\n").prompt == "  indented \n\n"


@pytest.mark.parametrize(
    ("line", "words", "rest"),
    [
        ("Tell me what's up", [], "Tell me what's up"),
        ("--max-tokens 5 -a it's -o fine", ["--max-tokens", "5", "-a"], "it's -o fine"),
        ("--stop='a b' x", ["--stop=a b"], "x"),
        ('--system "be {kind}, don\'t shout" Hello', ["--system", "be {kind}, don't shout"], "Hello"),
        ("-- --not a flag", [], "--not a flag"),
        ("- list item", [], "- list item"),
        ("--max-tokens 5", ["--max-tokens", "5"], ""),
    ],
)
def test_a_line_prompt_begins_after_the_flags_and_stays_as_typed(
    line: str, words: list[str], rest: str
) -> None:
    assert split_prompt(line, generate_parser()) == (words, rest)


def test_flag_values_are_expanded_word_by_word() -> None:
    variables = {"t": 0.25, "who": "a 'pirate' --raw"}
    options = parse_request("--temperature {t} --system {who}", "x\n", NBEngine(), variables).options
    assert options.sampling == {"temperature": 0.25}
    assert options.system == "a 'pirate' --raw"
    assert options.chat is None
