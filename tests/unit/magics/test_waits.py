"""A cell that waits says once that its engine stands, and once that it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, UtilityError
from nbengine.ipc.utilities import QueuePlace
from nbengine.magics.generation import result, stream, waits
from nbengine.magics.generation.waits import HELD_UP, QUIET_LOOKS, WaitNotice
from nbengine.metrics.stats import EngineStats, SchedulerStats
from tests.unit.magics.conftest import FakeBackend, FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until

Capture = pytest.CaptureFixture[str]
STALL = "core 0: no progress for 42 s, in step 1,234"


class Standing:
    """An engine that stands for the looks `stands`, counted from 0, and then answers."""

    def __init__(self, engine: FakeClient, stands: range, looks: int) -> None:
        self.engine, self.stands, self.looks, self.num_looks = engine, stands, looks, 0

    @property
    def name(self) -> str:
        return self.engine.name

    def stats_within(self, timeout: float) -> tuple[EngineStats, list[int]]:
        return EngineStats(engines=[SchedulerStats()]), []

    def place_within(self, request_ids: Sequence[str], timeout: float) -> QueuePlace | None:
        return None

    @property
    def engine_ranks(self) -> Sequence[int]:
        return self.engine.engine_ranks

    @property
    def stall(self) -> str | None:
        index, self.num_looks = self.num_looks, self.num_looks + 1
        if self.num_looks == self.looks:
            self.engine.emit("done", "stop")
        return STALL if index in self.stands else None


@pytest.fixture
def standing(engine: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """Put a standing engine in the place of what a cell looks at, with looks in quick succession."""
    for module in (stream, waits):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    engine.words = None
    standing = Standing(engine, range(2, 6), 9)
    monkeypatch.setattr("nbengine.magics.generation.stream.WaitNotice", lambda _: WaitNotice([standing]))
    return standing


def check(printed: str) -> None:
    assert printed.count("makes no progress") == 1
    assert f"engine 'random-tiny' makes no progress: {STALL}" in printed
    assert printed.count("engine 'random-tiny' goes on") == 1


def test_a_cell_that_blocks_says_once_that_its_engine_stands_and_goes_on(
    shell: InteractiveShell, standing: Standing, capsys: Capture
) -> None:
    shell.run_cell("%%generate\nhello\n").raise_error()
    check(capsys.readouterr().out)


async def test_a_cell_that_is_awaited_says_once_that_its_engine_stands_and_goes_on(
    kernel_shell: InteractiveShell, standing: Standing, capsys: Capture
) -> None:
    (await run(kernel_shell, "%%generate\nhello\n")).raise_error()
    check(capsys.readouterr().out)


def test_a_request_in_the_background_says_once_that_its_engine_stands_and_goes_on(
    shell: InteractiveShell, standing: Standing, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = shell.user_ns["notices"] = []

    def make(_: object) -> WaitNotice:
        notices.append(WaitNotice([standing]))
        return notices[-1]

    monkeypatch.setattr("nbengine.magics.generation.stream.WaitNotice", make)
    shell.run_cell("%%generate -a -o handle\nhello\n").raise_error()
    assert shell.user_ns["handle"].result().text == "done"
    # Other cells can wake or resume an engine meanwhile.
    assert not shell.user_ns["notices"][-1].holds_up
    check(capsys.readouterr().out)


@pytest.mark.parametrize("code", ["await asyncio.to_thread(handle.result)", "await handle"])
@pytest.mark.parametrize("line", ["%%generate", "%%generate --seed 1,2"])
async def test_a_cell_that_waits_for_what_runs_in_the_background_says_why_it_does_not_come(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, line: str, code: str
) -> None:
    for module in (result, stream, waits):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    engine.words = None
    (await run(kernel_shell, f"{line} -a -o handle\nhello\n")).raise_error()
    engine.engine_stats = [SchedulerStats(is_paused=True)]
    said: list[str] = []

    def note(text: str) -> None:
        # The cell in which the request was sent does not hold up others.
        if text.endswith(HELD_UP):
            said.append(text)
            for index in range(len(engine.collectors)):
                engine.emit("done", "stop", index)

    monkeypatch.setattr(waits, "print_quietly", note)
    (await run(kernel_shell, f"import asyncio\n{code}")).raise_error()
    assert said == [f"engine 'random-tiny' is paused: `%engine resume random-tiny` lets it go on{HELD_UP}"]


class Busy:
    """An engine whose cores say what they are told to."""

    stall = None
    engine_ranks: Sequence[int] = (0,)
    place: QueuePlace | None = QueuePlace(0, 3)

    def __init__(self, *states: SchedulerStats) -> None:
        self.name = "busy"
        self.states = list(states)

    def stats_within(self, timeout: float) -> tuple[EngineStats, list[int]]:
        assert 0 < timeout < 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return EngineStats(engines=[state]), []

    def place_within(self, request_ids: Sequence[str], timeout: float) -> QueuePlace | None:
        assert 0 < timeout < 1
        assert list(request_ids) == ["mine"]
        return self.place


def looks(*engines: Busy) -> WaitNotice:
    """A notice of a cell that has sent each engine a request."""
    notice = WaitNotice(engines)
    notice.requests = lambda name: ["mine"]
    return notice


def reasons(capsys: Capture, monkeypatch: pytest.MonkeyPatch, notice: WaitNotice, looks: int) -> list[str]:
    monkeypatch.setattr(waits, "LOOK_SECONDS", 0.0)
    notice._due = 0.0
    for _ in range(looks):
        notice.look()
    return [line.strip("[]") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (
            SchedulerStats(sleep_level=1, is_paused=True),
            "sleeps: `%engine wake busy` wakes it, in another notebook or",
        ),
        (SchedulerStats(is_paused=True, num_waiting_reqs=1), "is paused: `%engine resume busy`"),
        (
            SchedulerStats(num_running_reqs=4, num_waiting_reqs=1),
            "is busy: 4 requests run, 1 request waits, 3 ahead",
        ),
    ],
)
def test_until_something_comes_a_cell_says_once_what_it_waits_for(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, state: SchedulerStats, word: str
) -> None:
    notice = looks(Busy(state))
    (line,) = reasons(capsys, monkeypatch, notice, 3)
    assert line.startswith(f"engine 'busy' {word}")
    background = WaitNotice([Busy(state)])
    background.holds_up = False
    assert "another notebook" not in "".join(reasons(capsys, monkeypatch, background, 3))
    begun = WaitNotice([Busy(state)])
    begun.has_begun = True
    assert reasons(capsys, monkeypatch, begun, 3) == []


def test_a_request_that_waits_for_no_other_one_is_about_to_begin(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reasons(capsys, monkeypatch, WaitNotice([Busy(SchedulerStats(num_waiting_reqs=1))]), 3) == []


def test_a_request_that_is_in_no_queue_has_begun(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Busy(SchedulerStats(num_running_reqs=4, num_waiting_reqs=9))
    engine.place = None
    assert reasons(capsys, monkeypatch, looks(engine), 3) == []


def test_of_several_ranks_the_line_names_the_one_whose_queue_it_is(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Busy(SchedulerStats(num_running_reqs=4, num_waiting_reqs=9))
    engine.engine_ranks, engine.place = (0, 1), QueuePlace(1, 2)
    (line,) = reasons(capsys, monkeypatch, looks(engine), 3)
    assert line.endswith("4 requests run, 9 requests wait, 2 ahead on rank 1")


def test_a_line_a_reason_whatever_the_numbers(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [SchedulerStats(num_running_reqs=4, num_waiting_reqs=n) for n in (9, 8, 7)]
    states += [SchedulerStats(sleep_level=1), SchedulerStats()]
    said = reasons(capsys, monkeypatch, looks(Busy(*states)), 6)
    assert [line.split()[2].rstrip(":") for line in said] == ["is", "sleeps"]


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (SchedulerStats(sleep_level=1), "sleeps: `%engine wake busy` wakes it"),
        (SchedulerStats(is_paused=True), "is paused: `%engine resume busy` lets it go on"),
        (SchedulerStats(num_running_reqs=4, num_waiting_reqs=1), None),
    ],
)
def test_an_answer_that_is_held_up_in_its_middle_says_so_each_time(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, state: SchedulerStats, word: str | None
) -> None:
    notice = WaitNotice([Busy(state)])
    said = []
    for _ in range(2):
        notice.note_output("busy")
        said.append(reasons(capsys, monkeypatch, notice, QUIET_LOOKS - 1))
        said.append(reasons(capsys, monkeypatch, notice, 3 * QUIET_LOOKS))
    assert [len(lines) for lines in said] == [0, word is not None, 0, word is not None]
    assert all(line.startswith(f"engine 'busy' {word}") for lines in said for line in lines)


def test_engines_that_a_comparison_waits_for_are_looked_at_each_by_itself(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, quick = Busy(SchedulerStats(is_paused=True)), Busy(SchedulerStats(is_paused=True))
    quick.name = "quick"
    notice = WaitNotice([paused, quick])
    said = []
    for _ in range(QUIET_LOOKS):
        notice.note_output("quick")
        said += reasons(capsys, monkeypatch, notice, 1)
    notice.leave("quick")
    said += reasons(capsys, monkeypatch, notice, 3 * QUIET_LOOKS)
    assert [line.partition(":")[0] for line in said] == ["engine 'busy' is paused"]


def test_a_comparison_looks_no_more_at_an_engine_that_has_answered(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run_cell("%engine start random-tiny --name second").raise_error()
    second = backend.clients["second"]
    engine.words = second.words = None
    left: list[str] = []

    def leave(notice: WaitNotice, name: str) -> None:
        left.append(name)
        del notice.clients[name]
        second.emit("done", "stop")

    monkeypatch.setattr(WaitNotice, "leave", leave)
    shell.run_cell("%%generate -a --engine random-tiny,second -o both\nhi\n").raise_error()
    engine.emit("done", "stop")
    shell.user_ns["both"].result()
    assert left == ["random-tiny", "second"]


def test_one_that_does_not_answer_is_told_of_and_one_that_has_died_is_not(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Busy(SchedulerStats())
    monkeypatch.setattr(engine, "stats_within", lambda timeout: (EngineStats(engines=[]), [0]))
    (line,) = reasons(capsys, monkeypatch, WaitNotice([engine]), 2)
    assert "does not say what it does" in line

    def dead(timeout: float) -> tuple[EngineStats, list[int]]:
        raise EngineDeadError("it was killed")

    monkeypatch.setattr(engine, "stats_within", dead)
    assert reasons(capsys, monkeypatch, WaitNotice([engine]), 2) == []


@pytest.mark.parametrize(
    "line",
    [
        "%%generate",
        "%%generate --no-stream",
        "%%generate --format markdown",
        "%%generate --logprobs 2",
        "%%generate --seed 1,2",
        "%%chat",
    ],
)
async def test_an_output_says_why_and_where_its_request_waits_until_the_answer_takes_its_place(
    kernel_shell: InteractiveShell,
    engine: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    line: str,
) -> None:
    for module in (stream, waits):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    engine.words = None

    def newest() -> str:
        messages = publisher(kernel_shell).messages
        return messages[-1][1]["text/plain"] if messages else ""

    cell = asyncio.create_task(run(kernel_shell, f"{line}\nhello\n"))
    await until(lambda: bool(engine.collectors))
    for state, ahead, shown in (
        (SchedulerStats(num_running_reqs=2, num_waiting_reqs=4), 3, "waiting: 3 ahead, 2 requests run"),
        (
            SchedulerStats(num_running_reqs=2, num_waiting_reqs=1),
            0,
            "waiting: next in the queue, 2 requests run",
        ),
        (
            SchedulerStats(sleep_level=1),
            None,
            f"waiting: asleep: `%engine wake random-tiny` wakes it{HELD_UP}",
        ),
        (
            SchedulerStats(is_paused=True),
            None,
            f"waiting: paused: `%engine resume random-tiny` lets it go on{HELD_UP}",
        ),
        (UtilityError("no engine core takes calls"), None, "waiting: engine starting"),
    ):
        engine.num_ahead = ahead
        if isinstance(state, SchedulerStats):
            engine.engine_stats = [state]
        else:
            monkeypatch.setattr(engine, "stats_within", Mock(side_effect=state))
        await until(lambda shown=shown: shown in newest())
    for index in range(len(engine.collectors)):
        engine.emit("Hello", "stop", index)
    (await cell).raise_error()
    (output,) = publisher(kernel_shell).outputs()
    assert "Hello" in output["text/plain"]
    assert not any("waiting" in str(form) for form in output.values())
    # What the output says is not printed, too.
    assert "engine 'random-tiny'" not in capsys.readouterr().out


@pytest.mark.parametrize("line", ["%%generate", "%%generate --temperature 0,1"])
async def test_a_cell_whose_answer_has_begun_says_no_more_what_it_waits_for(
    kernel_shell: InteractiveShell,
    engine: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
) -> None:
    for module in (stream, waits):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    engine.words = None
    engine.engine_stats = [SchedulerStats(num_running_reqs=2, num_waiting_reqs=1)]
    submit, looks = engine.submit, 0

    def begin_at_once(*args: object, **options: object) -> object:
        collector = submit(*args, **options)  # type: ignore[arg-type]
        engine.emit("begun")
        return collector

    class Standing(type(engine)):  # type: ignore[misc]
        @property
        def stall(self) -> str | None:
            nonlocal looks
            looks += bool(begun)
            # Many looks after the first word has been taken.
            if looks == 200:
                for index in range(len(self.collectors)):
                    self.emit("done", "stop", index)
            return None

    monkeypatch.setattr(engine, "submit", begin_at_once)
    monkeypatch.setattr(engine, "__class__", Standing)
    begun: list[str] = []
    asked = 0
    note, find = WaitNotice.note_output, WaitNotice._find_reasons

    def note_output(notice: WaitNotice, name: str) -> None:
        note(notice, name)
        begun.append(name)

    def find_reasons(notice: WaitNotice) -> object:
        nonlocal asked
        asked += bool(begun) and engine in notice.clients.values()
        return find(notice)

    monkeypatch.setattr(WaitNotice, "note_output", note_output)
    monkeypatch.setattr(WaitNotice, "_find_reasons", find_reasons)
    (await run(kernel_shell, f"{line}\nhello\n")).raise_error()
    # Of those that were asked before, one may have been on its way.
    assert asked - 1 <= looks / QUIET_LOOKS
