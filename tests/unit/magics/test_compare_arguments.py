"""From a line with lists in it to its requests: which, in which order, with which settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError

from nbengine.magics.arguments import values_of
from nbengine.magics.comparison.arguments import ComparisonPlan, parse_request
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.arguments import generate_parser


class Column:
    """A stand-in for a DataFrame's column: values with an index, no mapping."""

    def __init__(self, values: list[Any], name: str) -> None:
        self.values = values
        self.name = name
        self.index = [f"i{position}" for position in range(len(values))]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def items(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.index, self.values, strict=True)


@dataclass
class Table:
    """A stand-in for a DataFrame, as far as `--each` looks at it."""

    rows: dict[Any, dict[str, Any]]

    def __getitem__(self, name: str) -> Column:
        return Column([row[name] for row in self.rows.values()], name)

    @property
    def question(self) -> Column:
        return self["question"]

    def iterrows(self) -> Iterator[tuple[Any, Any]]:
        for index, row in self.rows.items():
            yield index, SimpleNamespace(**row)


TABLE = Table({"a": {"question": "Q1", "hint": "H1"}, "b": {"question": "Q2", "hint": "H2"}})


def parse(
    line: str, body: str | None = "ask\n", config: NBEngine | None = None, **names: object
) -> ComparisonPlan:
    return parse_request(line, body, config or NBEngine(), names)


def plan(
    line: str, body: str | None = "ask\n", config: NBEngine | None = None, **names: object
) -> ComparisonPlan:
    found = parse(line, body, config, **names)
    assert found.axes
    return found


def prompts(found: ComparisonPlan) -> list[str]:
    return [combination.options.prompt for combination in found.combinations]


def settings(found: ComparisonPlan) -> list[dict[str, Any]]:
    return [combination.settings for combination in found.combinations]


def test_one_value_everywhere_is_one_request() -> None:
    for line in (
        "",
        "--temperature 0.5 --system S -n 4 --engine A",
        "--set stop=[1] --set bad_words='[\"a\"]'",
    ):
        assert parse(line).axes == ()
        assert settings(parse(line)) == [{}]
    assert parse("-n 300").options.sampling == {"n": 300}, "the limit is that of comparisons"


VALUES = {
    "system": st.lists(st.text("abc,; é", min_size=1, max_size=5), min_size=1, max_size=3, unique=True),
    "temperature": st.lists(st.floats(0, 2).map(lambda x: round(x, 3)), min_size=1, max_size=3, unique=True),
    "top_p": st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=1, max_size=3, unique=True),
    "top_k": st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
    "min_p": st.lists(st.sampled_from([0.0, 0.25]), min_size=1, max_size=2, unique=True),
    "max_tokens": st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True),
    "seed": st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
    "engine": st.lists(st.sampled_from(["A", "B", "C"]), min_size=1, max_size=3, unique=True),
}


@given(
    st.fixed_dictionaries({}, optional=VALUES),
    st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_the_requests_are_the_product_of_all_lists_the_last_changing_fastest(
    lists: dict[str, list[Any]], elements: list[int] | None
) -> None:
    words = []
    for name, values in reversed(lists.items()):
        flag = "--" + name.replace("_", "-")
        if name == "system":
            words += [f"{flag}='{value}'" for value in values]
        else:
            words.append(f"{flag} {','.join(map(str, values))}")
    if elements is not None:
        words.append("--each item=xs")
    found = parse(" ".join(words), "ask {item}\n", NBEngine(max_answers=10_000), xs=elements)
    varied = {name: lists[name] for name in VALUES if len(lists.get(name, ())) > 1}
    if elements is not None:
        varied = {"item": elements, **varied}
    expected = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    assert settings(found) == expected
    assert [axis.name for axis in found.axes] == list(varied)
    assert found.num_each == (elements is not None)
    for combination in found.combinations:
        asked = {name: values[0] for name, values in lists.items()} | combination.settings
        options = combination.options
        assert options.prompt == f"ask {asked.pop('item', '{item}')}"
        got = {"system": options.system, "engine": options.engine, **options.sampling}
        assert {name: value for name, value in got.items() if value is not None} == asked


def test_a_list_may_be_written_or_named_in_several_ways() -> None:
    for line in (
        "--temperature 0,0.5",
        "--temperature '0, 0.5'",
        "--temperature [0,0.5]",
        "--temperature {ts}",
    ):
        assert settings(plan(line, ts=[0, 0.5])) == [{"temperature": 0.0}, {"temperature": 0.5}]
    assert [c.options.sampling for c in plan("--set min_tokens=[1,2]").combinations] == [
        {"min_tokens": 1},
        {"min_tokens": 2},
    ]
    found = plan('--set stop=[["a"],["b","c"]] --set ignore_eos=true'.replace('"', '\\"'))
    assert [c.options.sampling for c in found.combinations] == [
        {"stop": ["a"], "ignore_eos": True},
        {"stop": ["b", "c"], "ignore_eos": True},
    ]


@pytest.mark.parametrize(
    ("spec", "body", "expected", "given"),
    [
        ("qs", "{qs}!", ["Q1!", "Q2!"], {"qs": ["Q1", "Q2"]}),
        ("qs", "{each}!", ["Q1!", "Q2!"], {"qs": ["Q1", "Q2"]}),
        (
            "item=qs",
            "{item} of {{item}} {x}",
            ["Q1 of {item} {x}", "Q2 of {item} {x}"],
            {"item": ["Q1", "Q2"]},
        ),
        ("item=by_name", "{item}", ["Q1", "Q2"], {"item": ["one", "two"]}),
        ("df.question", "{question}", ["Q1", "Q2"], {"question": ["Q1", "Q2"]}),
        ('df["question"]', "{question}", ["Q1", "Q2"], {"question": ["Q1", "Q2"]}),
        ("q=df['question']", "{q}", ["Q1", "Q2"], {"q": ["Q1", "Q2"]}),
        ("row=df", "{row.question}/{row.hint}", ["Q1/H1", "Q2/H2"], {"row": ["a", "b"]}),
        ("deep.lists[0]", "{each}", ["x", "y"], {"each": ["x", "y"]}),
        ("w=tree,house", "{w}", ["tree", "house"], {"w": ["tree", "house"]}),
        ("tree,house", "{each}", ["tree", "house"], {"each": ["tree", "house"]}),
        ("""'w=["a, b", "c"]'""", "{w}", ["a, b", "c"], {"w": ["a, b", "c"]}),
        ('w=["a","b"]', "{w}", ["a", "b"], {"w": ["a", "b"]}),
        ("p=pairs", "{p[0]}-{p[1]}", ["1-2", "3-4"], {"p": [0, 1]}),
        ("numbers", "{numbers}", ["3", "4"], {"numbers": [3, 4]}),
        ("n=array", "{n}", ["3", "0", "1"], {"n": [3, 0, 1]}),
        ("b=array_of_truths", "{b}", ["True", "False"], {"b": [True, False]}),
        ("x=column", "{x}", ["2", "0.5", "a"], {"x": [2, 0.5, "a"]}),
        ("k=by_number", "{k}", ["Q1", "Q2"], {"k": [7, 5]}),
        ("d=days", "{d}", ["2026-01-02", "2026-01-01"], {"d": [0, 1]}),
    ],
)
def test_each_goes_through_a_collection(
    spec: str, body: str, expected: list[str], given: dict[str, list[Any]]
) -> None:
    names = {
        "qs": ["Q1", "Q2"],
        "by_name": {"one": "Q1", "two": "Q2"},
        "df": TABLE,
        "deep": SimpleNamespace(lists=[("x", "y")]),
        "pairs": [(1, 2), (3, 4)],
        "numbers": range(3, 5),
        "array": np.array([3, 0, 1]),
        "array_of_truths": np.array([True, False]),
        "column": Column([np.int32(2), np.float32(0.5), np.str_("a")], "x"),
        "by_number": {np.int64(7): "Q1", np.int64(5): "Q2"},
        "days": np.array(["2026-01-02", "2026-01-01"], "datetime64[D]"),
    }
    found = plan(f"--each {spec}", body + "\n", **names)
    assert prompts(found) == expected
    ((name, values),) = given.items()
    # By their `repr`, which tables have: `3` and no `np.int64(3)`.
    assert repr(settings(found)) == repr([{name: value} for value in values])


def test_elements_reach_flags_too_and_several_collections_multiply() -> None:
    found = plan(
        '--each a=xs --each b=1,2 --system "You are {a}" --max-tokens {b}', "{b}\n", xs=["x", "y"], b="outer"
    )
    assert [(c.options.system, c.options.sampling, c.options.prompt) for c in found.combinations] == [
        (f"You are {a}", {"max_tokens": b}, str(b)) for a in "xy" for b in (1, 2)
    ]
    assert settings(found)[1] == {"a": "x", "b": "2"}


def test_a_line_prompt_can_be_compared_too() -> None:
    found = plan("--each w=tree,house --temperature 0,1 Translate {w}", None)
    assert prompts(found) == ["Translate tree"] * 2 + ["Translate house"] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--each nothing", "--each nothing: no variable 'nothing'"),
        ("--each question", "no variable 'question'; did you mean questions?"),
        ("--each len(xs)", "no variable 'len(xs)'"),
        ("--each name", "--each name: needs a list, dict or column to go through, got str"),
        ("--each number", "got int"),
        ("--each empty", "--each empty: empty is empty"),
        (
            "--each endless",
            "--each endless: more than 8 elements (`%config NBEngine.max_answers` allows more)",
        ),
        ("--each", "argument --each: expected one argument"),
        ("--each other=questions", "--each: neither the prompt nor a flag names {other}"),
        ("--each questions --each questions", "two lists are called 'questions'"),
        ("--each seed=questions --seed 1,2", "two lists are called 'seed'"),
        ("--temperature 0,1,0.0", "--temperature: 0.0 appears twice"),
        ("--temperature 0,,1", "invalid float value: '0,,1'"),
        ("--top-k 1,two", "invalid int value: '1,two'"),
        ("--engine A,A", "--engine: 'A' appears twice"),
        ("--temperature 0,1,2 --seed 1,2,3", "9 answers (3 × temperature, 3 × seed), more than 8"),
        ("--seed 1,2,3 -n 3", "9 answers (3 × seed, -n 3), more than 8"),
        ("--set n=[1,2]", "--set n takes one value, which all requests share"),
        ("-n 1,2", "invalid int value: '1,2'"),
        ("--set tempratur=[1,2]", "no sampling parameter 'tempratur'; did you mean temperature?"),
        ("--raw --system a --system b", "--system needs a chat prompt"),
        ("--each counts --temperature {counts}", "the lists in flags must be the same for each element"),
        ("--diff -a", "--diff needs the answer, so it cannot go with -a"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(line: str, message: str) -> None:
    names = {
        "questions": ["a", "b"],
        "name": "text",
        "number": 3,
        "empty": [],
        "endless": itertools.count(),
        "counts": [[0, 1], [0, 1, 2]],
    }
    with pytest.raises(UsageError) as caught:
        parse(line, "ask {questions}\n", NBEngine(max_answers=8), **names)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_limit_is_a_setting() -> None:
    assert len(plan("--seed 1,2,3,4", config=NBEngine(max_answers=4)).combinations) == 4
    with pytest.raises(UsageError, match="5 answers"):
        plan("--seed 1,2,3,4,5", config=NBEngine(max_answers=4))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--each", "a", "--temperature", "--each", "--each=b=c"], ["a", "b=c"]),
        (["--system", "--each", "x"], []),
        (["-a", "--each", "x", "--json", "--each", "y", "-o"], ["x", "y"]),
        (["--each"], []),
    ],
)
def test_values_of_a_flag_are_found_before_the_line_is_read(words: list[str], values: list[str]) -> None:
    assert values_of("--each", words, generate_parser()) == values
