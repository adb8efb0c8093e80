"""The scripts in examples/scripts run as they are and show what they promise: one in an interpreter of its own, some in
this process beside the processes of their engine, the others in this process with the engine, and in `make thorough` all
of them by themselves."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_support.leaks import leftovers, take_snapshot

from nbengine import LLMEngine
from tests.support.thorough import amount

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
ALL = sorted(SCRIPTS.glob("*.py"))
BY_THEMSELVES = [
    path
    for path in ALL
    if path.stem
    in amount(
        # Its engine's process imports what the script registers, and nobody shuts it down.
        ("own_model",),
        thorough=[path.stem for path in ALL],
    )
]
IN_THIS_PROCESS = [path for path in ALL if path not in BY_THEMSELVES]
WITH_PROCESSES = ("async_streaming", "inside_the_scheduler", "sleep_mode")
"""The streams of AsyncLLM, what is seen from beside an engine, and the memory that its process holds."""

Check = Callable[[list[str]], None]


def check_generate(lines: list[str]) -> None:
    completions = [line for line in lines if line.startswith("completion:")]
    assert len(completions) == len([line for line in lines if line.startswith("prompt:")]) == 4
    assert len(set(completions)) == 4


def check_chat(lines: list[str]) -> None:
    assert "Paris" in lines[0]
    assert "5" in next(line for line in lines if line.startswith("What is 2 + 3? ->"))
    # An answer may have several lines.
    questions = [line.partition(" -> ")[0] for line in lines if " -> " in line]
    assert questions[1:] == ["What is 2 + 3?", "What is the opposite of hot?", "Say good morning in French."]


def check_parallel_sampling(lines: list[str]) -> None:
    completions = [line for line in lines if re.match(r"\[\d\] ", line)]
    assert [line[:3] for line in completions] == ["[0]", "[1]", "[2]", "[3]"]
    assert lines[-1] == "4 completions, 4 of them different"


def check_logprobs(lines: list[str]) -> None:
    generated, prompt = "\n".join(lines).split("prompt token")
    probabilities = [float(p) for p in re.findall(r"^'.*?'\s+([01]\.\d+)\s", generated, re.MULTILINE)]
    assert len(probabilities) == 6
    # Greedy: what was taken is the first of the most likely ones.
    for line in generated.splitlines()[1:7]:
        token, alternatives = re.match(r"('.*?'|\".*?\")\s+[\d.]+\s+(.*)", line).groups()
        assert alternatives.startswith(token)
    assert "' Paris'" in generated
    assert len(re.findall(r"^'.*?'\s+[\d.]+\s+\d+$", prompt, re.MULTILINE)) == 4


def check_structured_output(lines: list[str]) -> None:
    answers = {
        lines[i].rpartition("[")[2][:-1]: lines[i + 1] for i in range(len(lines)) if lines[i].endswith("]")
    }
    assert answers.keys() == {"choice", "regex", "grammar", "json"}
    assert answers["choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z.]+@[a-z]+\.com", answers["regex"])
    assert re.match(r"SELECT (name|age|city)", answers["grammar"])
    car = json.loads(answers["json"])
    assert car.keys() == {"brand", "model", "car_type", "year"}
    assert 1950 <= car["year"] <= 2030


def check_prefix_caching(lines: list[str]) -> None:
    found = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens from the cache", "\n".join(lines))]
    first, *others, after_reset = found
    assert first == after_reset == 0
    assert min(others) > 800


def check_async_streaming(lines: list[str]) -> None:
    pieces = [re.match(r"\[(stream-\d)\] (['\"].*)", line) for line in lines]
    names = [match[1] for match in pieces if match]
    assert set(names) == {"stream-1", "stream-2", "stream-3"}
    # All three ran at once: the first had not ended when the last began.
    # In one piece: the script got no processor while they ran.
    is_in_one_piece = names.count("stream-3") == 1
    assert is_in_one_piece or names.index("stream-3") < len(names) - 1 - names[::-1].index("stream-1")
    # A model may end its answer before the limit.
    ends = [re.fullmatch(r"\[stream-\d\] finished: (length|stop)", line) for line in lines]
    assert len([end for end in ends if end]) == 3


def check_llm_engine(lines: list[str]) -> None:
    shown = [re.match(r"step +\d+, request (\d)\.(\d): ", line) for line in lines]
    assert sorted((m[1], m[2]) for m in shown if m) == [
        ("1", "0"),
        ("2", "0"),
        ("3", "0"),
        ("3", "1"),
        ("4", "0"),
    ]
    steps = int(re.fullmatch(r"4 requests in (\d+) steps", lines[-1])[1])
    # One after another they would take 16 steps each.
    assert steps < 2 * 16


def check_sleep_mode(lines: list[str]) -> None:
    awake, asleep, awake_again = (int(n) for n in re.findall(r"holds (\d+) MiB", "\n".join(lines)))
    # The weights alone are 94 MiB.
    assert asleep < min(awake, awake_again) - 90
    assert lines[-1] == "the same"


def check_priority_scheduling(lines: list[str]) -> None:
    priorities = [int(n) for n in re.findall(r"priority (\d)", "\n".join(lines))]
    assert len(priorities) == 4
    # The first may have begun before the others came; of the rest, the urgent ones were first.
    assert priorities[1:] == sorted(priorities[1:])


def check_inside_the_scheduler(lines: list[str]) -> None:
    assert lines[0].startswith("random-tiny · engine ")
    (loads,) = (line for line in lines if line.startswith("requests, last "))
    assert int(re.search(r"preempted (\d+)×", loads)[1]) > 0
    (blocks,) = (line for line in lines if line.startswith("KV 40 blocks of 16 tokens: "))
    held, shared = map(int, re.search(r"(\d+) held \((\d+) shared\)", blocks).groups())
    assert held > shared > 0
    timeline = "\n".join(line for line in lines if re.match(r"  \w #\d+ question-", line))
    assert "◆" in timeline, "a prefix hit"
    assert "×" in timeline, "a preemption"
    assert any(re.match(r" +\d+ ● question-19", line) for line in lines)


def check_prompt_embeddings(lines: list[str]) -> None:
    assert [line.endswith("True") for line in lines if "the same as from its tokens" in line] == [True, True]
    assert "Paris" in lines[0]
    assert "Madrid" in lines[2]


def check_embeddings(lines: list[str]) -> None:
    assert len([line for line in lines if "(384 dimensions)" in line]) == 6
    nearest = dict(re.findall(r"^0\.\d+  (.+) -> (.+)$", "\n".join(lines), re.MULTILINE))
    # Sentences about the same thing find each other.
    assert len(nearest) == 6
    assert all(nearest[nearest[sentence]] == sentence for sentence in nearest)


def check_own_model(lines: list[str]) -> None:
    assert lines[-1] == "SquaredReluForCausalLM wrote 8 tokens of noise"


def check_score(lines: list[str]) -> None:
    scores = [float(line.split()[0]) for line in lines[1:]]
    assert scores == sorted(scores, reverse=True)
    assert "Paris is the capital" in lines[1]
    assert "France is a country" in lines[2]


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}


@pytest.mark.timeout(330)
@pytest.mark.parametrize("path", BY_THEMSELVES, ids=lambda path: path.stem)
def test_a_script_runs_by_itself_and_shows_what_it_promises(
    path: Path, private_runtime_dir: Path, private_socket_dir: Path
) -> None:
    directories = [private_runtime_dir, private_socket_dir]
    before = take_snapshot(directories)
    # Relative, as its docstring says.
    command = [sys.executable, f"examples/scripts/{path.name}"]
    done = subprocess.run(
        command, cwd=SCRIPTS.parents[1], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    # A script need not shut its engine down: it ends with the interpreter, which does not wait for it.
    found = leftovers(before, directories) and leftovers(before, directories)
    assert not found, "left behind: " + "; ".join(found)
    CHECKS[path.stem](done.stdout.splitlines())


@pytest.mark.parametrize("path", IN_THIS_PROCESS, ids=lambda path: path.stem)
def test_a_script_shows_what_it_promises(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[LLMEngine] = []
    make = LLMEngine.__init__

    def make_here(engine: LLMEngine, *args: Any, **options: Any) -> None:
        make(engine, *args, **{**options, "multiprocess": path.stem in WITH_PROCESSES})
        made.append(engine)

    monkeypatch.setattr("sys.argv", [str(path)])
    # The progress bar of a script would leave a thread that looks after it.
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    # What LLM has inside, too.
    monkeypatch.setattr(LLMEngine, "__init__", make_here)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        for engine in made:
            engine.shutdown()
    assert len(made) == ("AsyncLLM" not in path.read_text())
    CHECKS[path.stem](capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_script_says_how_it_is_run_and_is_checked(path: Path) -> None:
    assert path.read_text().splitlines()[2].startswith(f"python examples/scripts/{path.name}")
    assert path.stem in CHECKS


def test_every_check_has_its_script() -> None:
    assert {path.stem for path in ALL} == set(CHECKS)
