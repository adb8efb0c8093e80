"""The playground asks with two settings as `%generate` does, and writes what it asks as a cell and as a script."""

from __future__ import annotations

import argparse
from typing import Any, Self

import msgspec
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import nbengine
from nbengine.magics.comparison.arguments import parse_request
from nbengine.magics.config import NBEngine
from nbengine.magics.extension import Extension
from nbengine.magics.generation.arguments import generate_parser
from nbengine.magics.playground.controls import controls, words_of
from nbengine.magics.playground.magic import PlaygroundMagics
from nbengine.magics.playground.playground import Playground
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import until

TEXT = "system:\nBe {tone}.\nuser:\nWhat is {thing}?"


class RecordedWidget:
    """A widget that records what the script would get."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {"text": TEXT}
        self.answers: list[dict[str, Any]] = []

    def send(self, content: dict[str, Any]) -> None:
        self.frames.append(msgspec.json.decode(msgspec.json.encode(content)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["kind"] == kind]


def state(
    text: str = TEXT, *, name: str = "", values: dict[str, str] | None = None, **settings: str
) -> dict[str, Any]:
    given = {"tone": "brief", "thing": "an owl's {x}"} if values is None else values
    sides = [{"engine": "", "raw": False, "settings": settings}, {"engine": "", "raw": False, "settings": {}}]
    return {"name": name, "text": text, "values": given, "sides": sides}


@pytest.fixture
def played(shell: InteractiveShell, engine: FakeClient) -> tuple[Playground, RecordedWidget]:
    magics: Any = shell.magics_manager.registry["PlaygroundMagics"]
    assert isinstance(magics, PlaygroundMagics)
    playground = Playground(shell, magics._session, magics._config, magics._submitter, magics._shelf)
    widget = RecordedWidget()
    playground.widget = widget
    return playground, widget


Played = tuple[Playground, RecordedWidget]


def test_every_sampling_flag_is_a_setting_in_its_order() -> None:
    labels = [control["flag"] for control in controls()]
    parser = generate_parser()
    group = [max(action.option_strings, key=len) for action in parser._actions if action.option_strings]
    first, last = group.index("--temperature"), group.index("--set")
    flags = [flag for flag in group[first : last + 1] if flag != "--logprobs"]
    # Penalties have no flag of their own, and stand before the one that says them.
    penalties = ["presence_penalty", "frequency_penalty", "repetition_penalty"]
    assert labels == [*flags[:-1], *penalties, "--set", "--json", "--regex", "--choice"]
    kinds = {control["name"]: control["kind"] for control in controls()}
    assert (kinds["temperature"], kinds["top_k"], kinds["presence_penalty"], kinds["stop"], kinds["set"]) == (
        "number",
        "integer",
        "number",
        "lines",
        "lines",
    )


def test_every_quantity_has_a_slider_whose_ends_and_start_a_line_takes() -> None:
    sliders = {control["name"]: control for control in controls() if "low" in control}
    assert [control["name"] for control in controls() if control["name"] not in sliders] == [
        "seed",
        "stop",
        "set",
        "json",
        "regex",
        "choice",
    ]
    for name, slider in sliders.items():
        assert slider["low"] <= slider["start"] <= slider["high"]
        for value in (slider["low"], slider["start"], slider["high"], slider["low"] + slider["step"]):
            line = " ".join(words_of({name: str(value)}))
            options = parse_request(line, "hi", NBEngine(), {}).options
            assert options.sampling == {name: value}
            assert getattr(SamplingParams(**options.sampling), name) == value


def test_what_is_typed_behind_set_holds_before_a_slider() -> None:
    words = words_of({"set": "presence_penalty=1.5\nmin_tokens=2", "presence_penalty": "0.5", "seed": ""})
    assert words == ["--set=presence_penalty=0.5", "--set=presence_penalty=1.5", "--set=min_tokens=2"]
    sampling = parse_request(" ".join(words), "hi", NBEngine(), {}).options.sampling
    assert sampling == {"presence_penalty": 1.5, "min_tokens": 2}


def test_a_field_says_how_it_asks_for_any_json_object_and_keeps_the_spaces_of_a_regular_expression() -> None:
    (told,) = [control["help"] for control in controls() if control["name"] == "json"]
    assert told.endswith(' {"type": "object"} is any JSON object')
    assert words_of({"json": ' {"type": "object"} '}) == ['--json={"type": "object"}']
    assert words_of({"regex": " a+ ", "temperature": " 0.5 "}) == ["--temperature=0.5", "--regex= a+ "]
    assert words_of({"regex": "  "}) == []


def test_a_new_flag_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbengine.magics.playground import controls as module

    declared = module.add_sampling_flags

    def declare(parser: argparse.ArgumentParser, expand: Any) -> None:
        declared(parser, expand)
        parser.add_argument("--colour", help="the colour")

    monkeypatch.setattr(module, "add_sampling_flags", declare)
    assert {"name": "colour", "flag": "--colour", "help": "the colour", "kind": "text"} in controls()


async def test_both_sides_answer_and_are_runs(played: Played, engine: FakeClient) -> None:
    playground, widget = played
    engine.turns = [["A ", "bird"], ["B"]]
    for side in (0, 1):
        playground.receive(
            {"kind": "run", "side": side, "state": state(temperature="0.25", stop="END\nSTOP", n="1")}
        )
        await until(lambda: any(not f["running"] and f["side"] == side for f in widget.of("side")))  # noqa: B023
    texts = {0: "", 1: ""}
    for frame in widget.of("side"):
        if frame["texts"]:
            texts[frame["side"]] = texts[frame["side"]][: frame["start"][0]] + frame["texts"][0]
    assert texts == {0: "A bird", 1: "B"}
    assert [answer["texts"] for answer in widget.answers] == [["A bird"], ["B"]]
    first, second = nbengine.runs().rows()
    assert (first["temperature"], first["stop"], second["temperature"]) == (0.25, ["END", "STOP"], 0.5)
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is an owl's {x}?"},
    ]
    assert first["prompt_name"] == ""


async def test_a_side_is_stopped_and_keeps_what_it_has(played: Played, engine: FakeClient) -> None:
    playground, widget = played
    engine.words = None
    playground.receive({"kind": "run", "side": 0, "state": state()})
    engine.emit("one ")
    await until(lambda: any(frame["texts"] == ["one "] for frame in widget.of("side")))
    playground.receive({"kind": "run", "side": 0, "state": state()})
    assert len(engine.requests) == 1
    playground.receive({"kind": "hello"})
    (reset,) = widget.of("reset")
    assert (reset["variables"], reset["engines"]) == (["tone", "thing"], ["random-tiny"])
    assert (reset["sides"][0]["running"], reset["sides"][0]["texts"]) == (True, ["one "])
    playground.receive({"kind": "stop", "side": 0})
    await until(lambda: not widget.of("side")[-1]["running"])
    assert widget.answers[0]["texts"] == ["one "]
    assert engine.aborted


def test_what_is_not_possible_is_told_where_it_was_asked(played: Played, engine: FakeClient) -> None:
    playground, widget = played
    playground.receive(
        {"kind": "run", "side": 1, "state": {**state(), "sides": [{}, {"settings": {"temperature": "-1"}}]}}
    )
    assert "temperature" in widget.of("side")[-1]["error"]
    playground.receive({"kind": "run", "side": 0, "state": state(temperature="0,1")})
    assert "a side takes one value" in widget.of("side")[-1]["error"]
    playground.receive({"kind": "run", "side": 0, "state": state("user:\n")})
    assert "must be followed by a text" in widget.of("side")[-1]["error"]
    playground.receive({"kind": "keep", "state": state(name="1 x")})
    assert widget.of("notice")[-1]["error"]
    playground.receive({"kind": "read", "text": "user:\n"})
    assert widget.of("read")[-1]["error"]
    playground.receive({"kind": "run", "side": 0, "state": state(regex="a+", choice="yes,no")})
    assert "not allowed with" in widget.of("side")[-1]["error"]
    assert engine.requests == []
    with pytest.raises(msgspec.ValidationError):
        playground.receive({"kind": "other"})


def test_a_text_is_a_cell_as_it_is(
    played: Played, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    playground, widget = played
    inserted: list[str] = []
    monkeypatch.setattr(shell, "set_next_input", inserted.append)
    playground.receive(
        {"kind": "cell", "side": 0, "state": state("Why?\n\\user:", temperature="0", stop="a b")}
    )
    code = widget.of("code")[0]
    assert code["text"] == "%%generate --temperature=0 '--stop=a b'\nWhy?\nuser:"
    assert inserted == [code["text"]]
    monkeypatch.setattr(shell, "set_next_input", lambda _: None)
    for braces in ("{{x}}", "{{{{x}}}}"):
        playground.receive({"kind": "cell", "side": 1, "state": state(f"say {braces}", name="braces")})
        assert widget.of("code")[-1]["text"].startswith("%%generate @braces:")
    line, _, body = code["text"].removeprefix("%%generate ").partition("\n")
    options = parse_request(line, body, NBEngine(), {}).options
    assert (options.prompt, options.sampling) == ("Why?\nuser:", {"temperature": 0.0, "stop": ["a b"]})


def test_a_prompt_with_variables_is_a_cell_by_its_name(
    played: Played, shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    playground, widget = played
    monkeypatch.setattr(shell, "set_next_input", lambda _: None)
    playground.receive({"kind": "cell", "side": 0, "state": state(name="owl", temperature="0.25")})
    text = widget.of("code")[0]["text"]
    assert text.startswith("%%generate @owl:1 tone=brief ")
    shell.run_cell(text).raise_error()
    row = nbengine.runs().rows()[-1]
    assert (row["prompt_name"], row["prompt"], row["temperature"]) == ("owl", "What is an owl's {x}?", 0.25)


def test_a_side_is_a_script(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    playground, widget = played
    calls: list[Any] = []

    class LLM:
        def __init__(self, model: str) -> None:
            calls.append(model)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def chat(self, messages: Any, params: Any) -> list[Any]:
            calls.append((messages, params))
            return []

        def generate(self, prompts: Any, params: Any) -> list[Any]:
            calls.append((prompts, params))
            return []

    playground.receive({"kind": "python", "side": 0, "state": state(temperature="0.25", seed="7")})
    raw = {**state("Once {x}", values={"x": "upon"}), "sides": [{"raw": True}, {}]}
    playground.receive({"kind": "python", "side": 0, "state": raw})
    playground.receive({"kind": "python", "side": 0, "state": {**state(), "sides": [{"raw": True}, {}]}})
    assert "which only a chat template can say" in widget.of("notice")[-1]["text"]
    monkeypatch.setattr(nbengine, "LLM", LLM, raising=False)
    for frame in widget.of("code"):
        exec(frame["text"], {})  # noqa: S102 (the script is what is tested)
    model, (messages, params), _, (prompts, _) = calls
    assert model == "random-tiny"
    assert messages[1]["content"] == "What is an owl's {x}?"
    assert (params.temperature, params.seed, params.max_tokens) == (0.25, 7, 512)
    assert prompts == ["Once upon"]


async def test_the_form_of_an_answer_is_a_setting_like_any_other(
    played: Played, shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    playground, widget = played
    monkeypatch.setattr(shell, "set_next_input", lambda _: None)
    shell.user_ns["City"] = {"type": "object"}
    for settings in ({"json": "City"}, {"json": '{"type": "object"}'}, {"choice": "yes, no"}):
        for kind in ("run", "cell", "python"):
            playground.receive({"kind": kind, "side": 0, "state": state("Is it?", **settings)})
        await until(lambda: not widget.of("side")[-1]["running"])
    asked = [params.structured_outputs for _, params in engine.requests]
    assert asked == [
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(json='{"type": "object"}'),
        StructuredOutputsParams(choice=["yes", "no"]),
    ]
    cells = [frame["text"] for frame in widget.of("code") if frame["what"] == "cell"]
    flags = ["--json=City", """'--json={"type": "object"}'""", "'--choice=yes, no'"]
    assert cells == [f"%%generate {each}\nIs it?" for each in flags]
    for frame, constraint in zip([f for f in widget.of("code") if f["what"] == "python"], asked, strict=True):
        given: dict[str, Any] = {}
        exec(frame["text"].partition("with LLM")[0], given)  # noqa: S102 (the script is what is tested)
        assert given["params"].structured_outputs == constraint


async def test_examples_are_shown_edited_asked_and_kept(
    played: Played, shell: InteractiveShell, engine: FakeClient
) -> None:
    playground, widget = played
    shell.user_ns["shots"] = [{"thing": "a {crow}", "answer": "a bird"}]
    shell.run_cell("%%prompt owl --examples shots\nWhat is {thing}?\n").raise_error()
    magics: Any = shell.magics_manager.registry["PlaygroundMagics"]
    begun = magics._state(("owl", None))
    assert begun["examples"] == [{"question": "What is a {crow}?", "answer": "a bird"}]
    begun["examples"] += [{"question": "A cod?", "answer": "a fish"}, {"question": "", "answer": ""}]
    begun["values"] = {"thing": "an owl"}
    playground.receive({"kind": "run", "side": 0, "state": begun})
    await until(lambda: not widget.of("side")[-1]["running"])
    assert [message["content"] for message in nbengine.runs().rows()[-1]["messages"]] == [
        "What is a {crow}?",
        "a bird",
        "A cod?",
        "a fish",
        "What is an owl?",
    ]
    playground.receive({"kind": "keep", "state": begun})
    kept = nbengine.prompts()["owl"]
    assert (kept.version, [each.answer for each in kept.examples]) == (2, ["a bird", "a fish"])


def test_a_prompt_is_kept_under_its_name(played: Played) -> None:
    playground, widget = played
    playground.receive({"kind": "keep", "state": state(name="owl")})
    assert "prompt owl:1 with tone, thing is kept" in widget.of("notice")[-1]["text"]
    assert nbengine.prompts()["owl"].source == TEXT


def test_a_terminal_and_a_raw_prompt_are_refused(shell: InteractiveShell, engine: FakeClient) -> None:
    with pytest.raises(UsageError, match="a terminal shows none"):
        shell.run_cell("%playground").raise_error()
    shell.run_cell("%%prompt a --raw\n{x}\n").raise_error()
    with pytest.raises(UsageError, match="which the editor cannot"):
        shell.run_cell("%playground a").raise_error()
    with pytest.raises(UsageError, match=r"none is kept yet|lists them"):
        shell.run_cell("%playground b").raise_error()
    assert Extension.loaded[shell].completion.complete("%playground a") == ("a", ["a"])
