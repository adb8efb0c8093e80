"""Comparisons of many rows: how many are in flight, what is sent again, and what a resumed one asks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine import runs
from nbengine.errors import EngineDeadError, RequestError, RequestLostError
from nbengine.magics.comparison import sending
from nbengine.magics.comparison.arguments import parse_request
from nbengine.magics.comparison.axes import Axis, Choice
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.comparison.sending import Sender, kept_by_position
from nbengine.magics.comparison.view import GridState
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.request import Origin, Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.session import AttachedEngine
from nbengine.outputs import CompletionOutput, RequestOutput
from nbengine.sampling_params import SamplingParams
from nbengine.widgets.grid.grid import MOST_DRAWN, GridCell, layout_of
from nbengine.widgets.grid.html import GridHtml
from nbengine.widgets.grid.pace import AnswerCount, AnswerTotals, Pace
from nbengine.widgets.grid.text import final_text
from tests.unit.magics.conftest import FakeClient


def blank(number: int) -> ComparisonResult:
    axis = Axis("row", tuple(Choice(row, row) for row in range(number)))
    settings = [{"row": row} for row in range(number)]
    return ComparisonResult([axis], settings, [GenerationResult("", str(row)) for row in range(number)])


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine have no more than twice as many requests as it computes at once."""
    monkeypatch.setattr(sending, "LEAST_ROOM", 1)


class Flights:
    """A sender over an engine with room for four requests, whose answers come by hand."""

    def __init__(self, client: FakeClient, number: int, **options: int) -> None:
        client.words = None
        scheduler = replace(client.config.scheduler, max_num_seqs=2)
        client.config = replace(client.config, scheduler=scheduler)
        self.client, self.result = client, blank(number)
        self.sent: list[int] = []
        engines = [AttachedEngine(client, {})] * number
        self.sender = Sender(
            self.result,
            engines,
            self.prepare,
            lambda position, _: self.sent.append(position),
            foreground=True,
            **options,
        )
        self.refusals: dict[int, Exception] = {}

    def prepare(self, position: int) -> Request:
        if position in self.refusals:
            raise self.refusals[position]
        return Request(Origin(self.client, SamplingParams()), str(position), str(position))

    def answer(self, position: int) -> None:
        request = self.sender.open[position]
        request.result.finished = True
        request.stop()
        self.sender.ended(position)


def test_as_many_are_in_flight_as_the_engine_takes_and_others_follow(engine: FakeClient) -> None:
    flights = Flights(engine, 10)
    flights.sender.fill()
    assert flights.sent == [0, 1, 2, 3]
    flights.sender.fill()
    assert (flights.sent, flights.sender.num_waiting) == ([0, 1, 2, 3], 6)
    flights.answer(2)
    flights.answer(0)
    flights.sender.fill(1)
    assert flights.sent[4:] == [4]
    while flights.sender.open:
        flights.answer(min(flights.sender.open))
        flights.sender.fill()
        assert len(flights.sender.open) <= 4
    assert flights.sent == list(range(10))
    assert flights.sender.engines_in_use == set()


def test_a_lost_request_is_sent_again_and_a_refused_one_is_not(engine: FakeClient) -> None:
    flights = Flights(engine, 5, retries=2)
    flights.refusals[1] = UsageError("too long")
    flights.sender.fill()
    assert flights.sent == [0, 2, 3, 4]
    lost, refused = RequestLostError("r-1", "its engine core ended"), RequestError("no")
    for _ in range(2):
        flights.sender.failed(0, lost)
        flights.sender.fill()
        assert 0 in flights.sender.open
    flights.sender.failed(0, lost)
    flights.sender.failed(2, refused)
    flights.sender.fill()
    assert flights.sent == [0, 2, 3, 4, 0, 0]
    assert {position: str(error) for position, error in flights.result.errors.items()} == {
        0: str(lost),
        1: "too long",
        2: "no",
    }
    assert flights.sender.num_retried == 2
    assert flights.result.results[0].finish_reason == "error"


def test_the_end_of_an_engine_ends_all_that_waits_for_it(engine: FakeClient) -> None:
    flights = Flights(engine, 8)
    flights.sender.fill()
    dead = EngineDeadError("gone")
    for position in range(4):
        flights.sender.failed(position, dead)
    assert set(flights.result.errors) == set(range(8))
    assert flights.result.finished
    assert flights.sender.engines_in_use == set()


def test_what_is_stopped_sends_nothing_more(engine: FakeClient) -> None:
    flights = Flights(engine, 8)
    flights.sender.fill()
    flights.sender.abandon()
    flights.sender.fill()
    assert flights.sent == [0, 1, 2, 3]
    assert len(engine.aborted) == 4
    assert {result.finish_reason for result in flights.result} == {"abort"}


def test_each_kept_run_answers_one_position() -> None:
    first, second = {"run": 1}, {"run": 2}
    found = kept_by_position(["a", "b", "a", "a"], {"a": [second, first]})
    assert found == {0: second, 2: first}


CELL = "%%generate --each word=words --temperature 0 -o grid{flags}\nSay {{word}}"


def compare(shell: InteractiveShell, flags: str = "") -> None:
    shell.run_cell(CELL.format(flags=flags)).raise_error()


@pytest.fixture
def words(shell: InteractiveShell, engine: FakeClient) -> list[str]:
    found = [f"w{number}" for number in range(6)]
    shell.user_ns["words"] = found
    return found


def test_a_resumed_comparison_asks_only_what_has_no_answer(
    shell: InteractiveShell, engine: FakeClient, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["words"] = words[:4]
    compare(shell)
    first = shell.user_ns["grid"].rows()
    shell.user_ns["words"] = words
    engine.requests.clear()
    engine.words = ["New"]
    compare(shell, " --resume")
    assert [prompt["prompt"] for prompt, _ in engine.requests] == ["<user>Say w4", "<user>Say w5"]
    assert "4 of 6 answers have been kept; the others are asked" in capsys.readouterr().out
    rows = shell.user_ns["grid"].rows()
    assert [row["text"] for row in rows] == ["Hello world"] * 4 + ["New"] * 2
    assert [row["tokens"] for row in rows] == [3] * 4 + [1] * 2
    assert rows[:4] == first
    assert len(runs().rows()) == 6


@pytest.mark.parametrize("flags", ["--max-tokens 9", "--system Hi", "--set ignore_eos=true"])
def test_other_settings_are_another_question(
    shell: InteractiveShell, engine: FakeClient, words: list[str], flags: str
) -> None:
    compare(shell)
    engine.requests.clear()
    compare(shell, f" --resume {flags}")
    assert len(engine.requests) == 6


def test_what_has_failed_or_was_interrupted_is_asked_again(
    shell: InteractiveShell, engine: FakeClient, words: list[str]
) -> None:
    submit = engine.submit

    def picky(prompt: dict[str, str], params: SamplingParams, **options: object) -> object:
        if "w2" in prompt["prompt"]:
            raise RequestError("not now")
        return submit(prompt, params, **options)  # type: ignore[arg-type]

    engine.submit = picky  # type: ignore[method-assign,assignment]
    compare(shell)
    assert set(shell.user_ns["grid"].errors) == {2}
    engine.submit = submit  # type: ignore[method-assign]
    engine.requests.clear()
    compare(shell, " --resume")
    assert [prompt["prompt"] for prompt, _ in engine.requests] == ["<user>Say w2"]
    assert not shell.user_ns["grid"].errors


def test_kept_answers_are_scored_with_the_others(
    shell: InteractiveShell, engine: FakeClient, words: list[str]
) -> None:
    shell.user_ns["words"] = words[:3]
    compare(shell)
    shell.user_ns |= {"words": words, "size": lambda result, row: len(result.text)}
    compare(shell, " --resume --score size")
    assert [row["size"] for row in shell.user_ns["grid"].rows()] == [len("Hello world")] * 6


def questions(engine: FakeClient) -> int:
    """Count what a judge was asked since the last time."""
    number = sum(params.structured_outputs is not None for _, params in engine.requests)
    engine.requests.clear()
    return number


def test_scores_are_kept_with_the_runs_and_a_judge_is_asked_again_only_what_is_new(
    shell: InteractiveShell, engine: FakeClient, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns |= {"words": words[:2], "size": lambda result, row: len(result.text)}
    engine.turns = [["a"], ["bc"], ["4"], ["2"]]
    compare(shell, " --score size --judge kind")
    assert questions(engine) == 2
    assert [row["scores"] for row in runs()] == [{"size": 1, "judge": 4}, {"size": 2, "judge": 2}]
    assert [(row["size"], row["judge"]) for row in runs()] == [(1, 4), (2, 2)]
    capsys.readouterr()
    shell.run_cell("%runs show 1").raise_error()
    assert "\nscores: size 1, judge 4\n" in capsys.readouterr().out

    # As after a restart: the answers, and what the judge has said of them, are known by the store alone.
    shell.user_ns["words"] = words[:3]
    engine.turns = [["new"], ["5"]]
    compare(shell, " --resume --judge kind")
    assert questions(engine) == 1
    assert [row["judge"] for row in shell.user_ns["grid"].rows()] == [4, 2, 5]
    # Scores that this line does not ask for stay.
    assert [row["scores"] for row in runs()] == [
        {"size": 1, "judge": 4},
        {"size": 2, "judge": 2},
        {"judge": 5},
    ]
    # Another question is asked, and what the judge could not say is asked again.
    engine.turns = [["1"], ["x"], ["3"]]
    compare(shell, " --resume --judge polite")
    assert questions(engine) == 3
    engine.turns = [["2"]]
    compare(shell, " --resume --judge polite")
    assert questions(engine) == 1
    assert [row["judge"] for row in shell.user_ns["grid"].rows()] == [1, 2, 3]


def test_a_judge_of_pairs_is_not_asked_again_about_answers_that_are_kept(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    line = "%%generate --temperature 0.2,0.5,1 -n 2 -o grid --judge better --pairwise{flags}\nhi"
    engine.turns = [["a"], ["b"], ["c"], *[["A"], ["B"]] * 6]
    shell.run_cell(line.format(flags="")).raise_error()
    assert questions(engine) == 12
    judged = [row["judge"] for row in shell.user_ns["grid"].rows()]
    assert [row["scores"]["judge"] for row in runs()] == [judged[:2], judged[2:4], judged[4:]]
    shell.run_cell(line.format(flags=" --resume")).raise_error()
    assert engine.requests == []
    assert [row["judge"] for row in shell.user_ns["grid"].rows()] == judged


def test_where_no_runs_are_kept_no_scores_are(
    shell: InteractiveShell, engine: FakeClient, words: list[str]
) -> None:
    compare(shell)
    shell.user_ns["size"] = lambda result, row: len(result.text)
    shell.run_cell("%config NBEngine.keep_runs = False").raise_error()
    compare(shell, " --score size")
    assert [row["scores"] for row in runs()] == [{}] * 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--resume", "--resume is for comparisons"),
        ("--retries 3", "--retries is for comparisons"),
        ("--seed 1,2 --retries -1", "--retries must be at least 0, got -1"),
    ],
)
def test_a_wrong_flag_is_one_line(
    shell: InteractiveShell, engine: FakeClient, line: str, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        shell.run_cell(f"%%generate {line}\nhi").raise_error()
    assert not engine.requests


def test_nothing_is_resumed_where_nothing_is_kept(
    shell: InteractiveShell, engine: FakeClient, words: list[str]
) -> None:
    shell.run_cell("%config NBEngine.keep_runs = False").raise_error()
    with pytest.raises(UsageError, match="no runs are kept"):
        compare(shell, " --resume")
    assert not engine.requests


def test_many_cells_are_not_all_drawn_and_that_is_said() -> None:
    layout = layout_of([("row", list(map(str, range(10_000)))), ("seed", ["1", "2"])], 1)
    cells = [GridCell((f"answer {index}",), "done") for index in range(20_000)]
    html = GridHtml(layout)
    live = html.live("head", 0.5, cells, first=10_001)
    assert live.count("<tr") == MOST_DRAWN // 2
    assert "answer 10000<" in live
    assert "answer 0<" not in live
    assert "answer 19999<" in html.live("head", 1.0, cells, first=20_000)
    final = html.final("foot", cells[: html.num_drawn])
    assert "19,600 more answers are not drawn" in final
    assert len(final) < 600_000
    assert "19,600 more answers are not drawn" in final_text(layout, cells[: html.num_drawn], "foot")


def test_the_time_left_counts_those_that_have_ended_before() -> None:
    pace, before = Pace(), AnswerTotals()
    pace.take(0.0, 0)
    pace.take(1.0, 10)
    ended = [AnswerCount(4, 100, True), AnswerCount(6, 100, True)]
    going = [AnswerCount(0, 100, False)] * 5
    for answer in ended:
        before.add(answer)
    assert pace.seconds_left(going, before) == pace.seconds_left([*ended, *going]) == (2.5, True)


class Counting(list[GenerationResult]):
    """Results that count how often one of them is looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[GenerationResult]:
        for result in super().__iter__():
            self.num_looks += 1
            yield result


def test_rows_take_time_in_proportion_to_their_number() -> None:
    comparison = blank(500)
    looks = comparison.results = Counting(comparison.results)
    rows = comparison.rows()
    assert [row["row"] for row in rows] == list(range(500))
    assert looks.num_looks <= 5 * 500


def test_a_grid_counts_again_only_what_has_changed_and_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = GridState._counts_of

    def noted(state: GridState, index: int) -> list[AnswerCount]:
        counted.append(index)
        return count(state, index)

    monkeypatch.setattr(GridState, "_counts_of", noted)
    plan = parse_request("--each row=rows", "{row}\n", NBEngine(), {"rows": list(range(300))})
    comparison = blank(300)
    state = GridState(plan, [SamplingParams(max_tokens=5)] * 300, comparison)
    assert counted == list(range(300))
    rng, written = random.Random(0), [0] * 300
    for _ in range(400):
        changed = sorted(rng.sample(range(300), 3))
        counted.clear()
        going_on = [index for index in changed if not comparison.results[index].finished]
        for index in going_on:
            written[index] += 1
            reason = "stop" if rng.random() < 0.3 else "length" if written[index] == 5 else None
            delta = CompletionOutput(0, "x", [1], finish_reason=reason)
            comparison.results[index].absorb(
                RequestOutput(str(index), None, [1], [delta], reason is not None)
            )
        assert state.take(comparison) is bool(going_on)
        assert counted == going_on
        ended = sum(result.finished for result in comparison)
        assert state.num_ended == ended
        assert state.num_tokens == sum(written)
        assert state.head.startswith(f"{ended} of 300 answers")
    assert 0 < ended < 300
