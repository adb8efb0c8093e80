"""Structured outputs end to end: with temperature 1, every answer is what was asked for."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import lark
import numpy as np
import pytest
from safetensors.numpy import save_file

from nbengine import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nbengine.config import ModelConfig
from nbengine.errors import RefusedArgumentError
from nbengine.models.checkpoints.files import resolve_model
from tests.support.thorough import amount

SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "json_schemas.json").read_text(encoding="utf-8"))
MAY_BE_CUT_OFF = ("linked_list", "tree")
"""Recursive: a random text may go deeper than `max_tokens` allow."""
VOCAB_SIZE, HIDDEN = 49_152, 32
ANSWERS = amount(2, thorough=3)
"""Of each schema."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of one layer that writes noise in the default model's vocabulary: the hardest there is to guide."""
    directory = tmp_path_factory.mktemp("random")
    default = Path(resolve_model(ModelConfig("smollm2-135m")).directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(default / name, directory / name)
    config = json.loads((default / "config.json").read_text()) | {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN // 2,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0).standard_normal
    shapes = {"model.embed_tokens": (VOCAB_SIZE, HIDDEN), "model.norm": (HIDDEN,)}
    layer = "model.layers.0."
    shapes |= {layer + f"{norm}_layernorm": (HIDDEN,) for norm in ("input", "post_attention")}
    shapes |= {layer + f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"}
    shapes |= {layer + f"self_attn.{name}_proj": (HIDDEN // 2, HIDDEN) for name in "kv"}
    shapes |= {layer + f"mlp.{name}_proj": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    tensors = {
        f"{name}.weight": (draw(shape) * HIDDEN**-0.5).astype(np.float32) for name, shape in shapes.items()
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return str(directory)


@pytest.fixture(scope="module")
def llm(random_model: str) -> Iterator[LLM]:
    with LLM(
        random_model, multiprocess=False, max_model_len=1024, max_num_seqs=128, kv_cache_memory_bytes=64 << 20
    ) as engine:
        # Tests are checked for processes that they leave behind: the one that checks grammars comes first.
        engine.generate("x", structured(regex="a"), use_tqdm=False)
        yield engine


def structured(seed: int | None = None, temperature: float = 1.0, **constraint: Any) -> SamplingParams:
    outputs = StructuredOutputsParams(**constraint)
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=600, min_tokens=1, structured_outputs=outputs
    )


def generate(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(["Some JSON:\n"] * len(params), params, use_tqdm=False)


def check_json(name: str, output: RequestOutput) -> bool:
    """Check an answer under a schema, and return whether it is complete."""
    completion = output.outputs[0]
    if completion.finish_reason == "length" and name in MAY_BE_CUT_OFF:
        return False
    assert completion.finish_reason == "stop", completion.text
    schema = SCHEMAS[name]["schema"]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema).validate(json.loads(completion.text))
    # RFC 3339 has leap seconds, the validator has not.
    text = completion.text.replace(":60", ":59")
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    return True


def test_every_answer_under_a_schema_parses_and_validates(llm: LLM) -> None:
    assert len(SCHEMAS) >= 30
    names = [name for name in SCHEMAS for _ in range(ANSWERS)]
    outputs = generate(
        llm, [structured(seed, json=SCHEMAS[name]["schema"]) for seed, name in enumerate(names)]
    )
    complete = {name for name, output in zip(names, outputs, strict=True) if check_json(name, output)}
    assert complete == set(SCHEMAS)
    texts = [output.outputs[0].text for output in outputs]
    assert len(set(texts)) > (ANSWERS - 1) * len(SCHEMAS)


def test_greedy_answers_follow_their_schemas_too(llm: LLM) -> None:
    names = [
        "flat",
        "nested",
        "array_bounds",
        "patterns",
        "formats",
        "unicode",
        "one_of_tagged",
        "scalar_integer",
    ]
    for name, output in zip(
        names,
        generate(llm, [structured(None, 0.0, json=SCHEMAS[name]["schema"]) for name in names]),
        strict=True,
    ):
        assert check_json(name, output)
    free = llm.generate("JSON:", structured(1, json_object=True, disable_any_whitespace=True), use_tqdm=False)
    text = free[0].outputs[0].text
    assert text.startswith("{")
    assert "\n" not in text


REGEXES = [
    r"[a-z]{3,9}@[a-z]{3,9}\.(com|org)",
    r"\d{4}-\d{2}-\d{2}",
    r"(yes|no)( indeed)?",
    r"#[0-9a-f]{6}",
    "é+🙂?",
]
CHOICES = ["positive", "negative", "very negative", 'say "no"']
ARITHMETIC = """
start: sum
sum: product | sum "+" product
product: NUMBER | product "*" NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""


def test_outputs_follow_regexes_choices_and_grammars(llm: LLM) -> None:
    params = [structured(seed, regex=regex) for regex in REGEXES for seed in range(4)]
    for param, output in zip(params, generate(llm, params), strict=True):
        assert param.structured_outputs is not None
        text = output.outputs[0].text
        if output.outputs[0].finish_reason == "stop":
            assert re.fullmatch(str(param.structured_outputs.regex), text), text
        else:
            assert param.structured_outputs.regex == "é+🙂?"
    chosen = {o.outputs[0].text for o in generate(llm, [structured(s, choice=CHOICES) for s in range(24)])}
    assert chosen <= set(CHOICES)
    assert len(chosen) > 1
    parser = lark.Lark(ARITHMETIC)
    sums = generate(llm, [structured(seed, grammar=ARITHMETIC) for seed in range(8)])
    finished = [output.outputs[0].text for output in sums if output.outputs[0].finish_reason == "stop"]
    assert finished
    for text in finished:
        parser.parse(text)


def test_requests_beside_structured_ones_get_what_they_get_alone(llm: LLM) -> None:
    free = [SamplingParams(temperature=t, seed=seed, max_tokens=40) for seed, t in enumerate((0.0, 1.0, 0.7))]
    alone = [output.outputs[0].token_ids for output in generate(llm, free)]
    mixed: list[SamplingParams] = []
    for position, name in enumerate(list(SCHEMAS)[:12]):
        mixed.append(structured(position, json=SCHEMAS[name]["schema"]))
        if position % 4 == 0:
            mixed.append(free[position // 4])
    outputs = generate(llm, mixed)
    beside = [
        o.outputs[0].token_ids for o, p in zip(outputs, mixed, strict=True) if p.structured_outputs is None
    ]
    assert beside == alone


def test_several_completions_follow_one_grammar_each_at_its_own_place(llm: LLM) -> None:
    params = structured(5, json=SCHEMAS["function_call"]["schema"])
    params.n = 5
    (output,) = llm.generate("A call: ", params, use_tqdm=False)
    values = [json.loads(completion.text) for completion in output.outputs]
    assert len(values) == 5
    for value in values:
        jsonschema.validate(value, SCHEMAS["function_call"]["schema"])
    assert len({json.dumps(value) for value in values}) > 1


def test_other_parameters_work_inside_a_grammar(llm: LLM) -> None:
    def ask(**settings: Any) -> RequestOutput:
        regex = StructuredOutputsParams(regex="[ab]{1,30}")
        given = {"temperature": 1.0, "seed": 1, "max_tokens": 60} | settings
        return llm.generate("x", SamplingParams(structured_outputs=regex, **given), use_tqdm=False)[0]

    cut = ask(max_tokens=1).outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 1)
    for settings in ({"min_tokens": 8}, {"ignore_eos": True}, {"min_tokens": 60}):
        whole = ask(**settings).outputs[0]
        assert whole.finish_reason == "stop"
        assert re.fullmatch("[ab]{1,30}", whole.text)
        assert len(whole.text) == 30 or len(whole.token_ids) > 8
    stopped = ask(stop="b", min_tokens=1).outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "b")
    assert set(stopped.text) <= {"a"}
    biased = ask(logit_bias=dict.fromkeys(llm.get_tokenizer().encode("a"), 100.0), min_tokens=20).outputs[0]
    assert set(biased.text) == {"a"}
    logged = ask(logprobs=0).outputs[0]
    assert logged.logprobs is not None
    assert len(logged.logprobs) == len(logged.token_ids)


def test_preemption_changes_nothing(llm: LLM, random_model: str) -> None:
    names = ["nested", "formats", "string_lengths", "pydantic_report", "many_properties", "unicode"] * 2
    params = [structured(seed, json=SCHEMAS[name]["schema"]) for seed, name in enumerate(names)]
    for param in params:
        param.max_tokens = 300
    roomy = generate(llm, params)
    with LLM(
        random_model, multiprocess=False, max_model_len=320, num_gpu_blocks_override=21, max_num_seqs=16
    ) as small:
        crowded = generate(small, params)
        assert small.stats().engines[0].num_preemptions > 0
    assert [o.outputs[0].token_ids for o in crowded] == [o.outputs[0].token_ids for o in roomy]


def test_the_default_model_answers_in_json() -> None:
    names = ["flat", "array_bounds", "nullable"]
    with LLM("smollm2-135m", multiprocess=False, kv_cache_memory_bytes=128 << 20) as llm:
        chats = [
            [{"role": "user", "content": f"Give me JSON like {json.dumps(SCHEMAS[name]['example'])}"}]
            for name in names
        ]
        params = [structured(seed, json=SCHEMAS[name]["schema"]) for seed, name in enumerate(names)]
        for name, output in zip(names, llm.chat(chats, params, use_tqdm=False), strict=True):
            assert check_json(name, output)


# In processes of their own.

BAD: list[dict[str, Any]] = [
    {"json": {"type": "strin"}},
    {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    {"json": {"$ref": "#/nope"}},
    {"json": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}},
    {"json": {"type": "string", "pattern": "("}},
    {"json": {"enum": []}},
    {"regex": "a{5,2}"},
    {"regex": "()"},
    {"grammar": "start: nothing"},
    {"grammar": "root ::= ("},
    {"choice": ["x" * 70_000]},
]
SLOW = {"type": "string", "allOf": [{"pattern": f".*a{i}.*"} for i in range(20)]}
"""The library would take hours and all memory to see whether these patterns can be met together."""


def test_a_bad_constraint_fails_alone_beside_a_running_stream(no_leftovers: None) -> None:
    client = AsyncLLM("random-tiny", num_gpu_blocks_override=64, max_model_len=1024)
    try:
        running = client.submit("hello", SamplingParams(temperature=0, max_tokens=600, ignore_eos=True))
        answer = running.get_blocking(timeout=60)
        cases = [*BAD, {"json": SLOW}, {"json": SLOW}]
        random.Random(0).shuffle(cases)
        for constraint in cases:
            (kind,) = constraint
            refused = client.submit("x", structured(**constraint))
            with pytest.raises(RefusedArgumentError, match="cannot be used") as caught:
                refused.get_blocking(timeout=60)
            assert caught.value.argument == f"structured_outputs.{kind}"
        fine = client.submit("x", structured(3, json=SCHEMAS["flat"]["schema"]))
        output = fine.get_blocking(timeout=60)
        while not output.finished:
            output = fine.get_blocking(timeout=60)
        assert check_json("flat", output)
        while not answer.finished:
            answer = running.get_blocking(timeout=60)
        assert len(answer.outputs[0].token_ids) == 600
        (engine,) = client.stats_blocking().engines
        assert engine.num_free_blocks == engine.num_blocks
    finally:
        client.shutdown()
