"""A cell can ask a real model for answers that parse, several answers, and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

from notebook_support.kernel import Kernel

StartKernel = Callable[[], Kernel]
SCHEMA = (
    '{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, '
    '"required": ["n"], "additionalProperties": false}'
)


def test_a_cell_gets_json_a_choice_several_answers_and_log_probabilities(
    kernel: Kernel, clean_afterwards: None
) -> None:
    kernel.run("%engine start random-tiny --num-blocks 256 --dtype float32")

    kernel.run(f"schema = {SCHEMA.replace('false', 'False')}")
    kernel.run(
        "%%generate -o as_json --json schema --raw --temperature 1 --seed 1 --max-tokens 100\na number\n"
    )
    value = kernel.value("as_json.value")
    assert list(value) == ["n"]
    assert 0 <= value["n"] <= 99
    cut = kernel.run_any("%%generate -o cut --json schema --raw --max-tokens 2\na number\n")
    assert cut.status == "ok"
    assert "raise --max-tokens" in kernel.run_any("cut.value").text

    kernel.run("%%generate -o chosen --choice red,green,blue --raw --temperature 1 --seed 3\na colour\n")
    assert kernel.value("chosen.value") in ("red", "green", "blue")
    kernel.run("%%generate -o matched --regex '[0-9]{4}-[0-9]{2}' --raw --temperature 1 --seed 3\na month\n")
    year, month = kernel.value("matched.value").split("-")
    assert len(year) == 4
    assert len(month) == 2

    several = kernel.run(
        "%%generate -o several -n 3 --logprobs 2 --raw --temperature 1 --seed 5 --max-tokens 8\nhi\n"
    )
    texts = kernel.value("[output.text for output in several.outputs]")
    assert len(set(texts)) == 3
    for number in "123":
        assert number in several.text
    entries = kernel.value(
        "[[(entry[token].logprob, len(entry)) for token, entry in zip(o.token_ids, o.logprobs)] for o in several.outputs]"
    )
    assert [len(entry) for entry in entries] == kernel.value("[len(o.token_ids) for o in several.outputs]")
    for logprob, count in (pair for entry in entries for pair in entry):
        assert -math.inf < logprob < 0
        assert count in (2, 3)

    refused = kernel.run_any('%%generate --json \'{"type": "nothing"}\' --raw\nhi\n')
    assert refused.status == "error"
    assert "structured_outputs" in refused.text
    kernel.run("%engine stop")
