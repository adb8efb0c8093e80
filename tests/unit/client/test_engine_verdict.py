"""A client calls its engine dead on the host's word, or without it after a while."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest

from nbengine.client.link.engine_verdict import LAST_OUTPUTS_TIMEOUT, LAST_WORDS_TIMEOUT, Death, EngineVerdict
from nbengine.engine.host.scaling import STOP_GRACE
from nbengine.engine.host.supervisor import KILLED_WAIT, LONGEST_LAST_WORDS
from nbengine.ipc.control_messages import EngineDead

NOW = 1000.0


class FakeWatch:
    """Sees the cores' processes end when it is told so."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.kept: set[int] = {0, 1}

    def keep(self, ranks: Collection[int]) -> None:
        self.kept = set(ranks)

    def core_gone(self) -> bool:
        return bool(self.ended & self.kept)


@pytest.fixture
def watch() -> FakeWatch:
    return FakeWatch()


@pytest.fixture
def verdict(watch: FakeWatch) -> EngineVerdict:
    """Make the verdict over an engine with two cores that are ready."""
    verdict = EngineVerdict(watch)  # type: ignore[arg-type]
    verdict.attached([0, 1])
    for rank in (0, 1):
        verdict.ready(rank, 1)
    return verdict


def unexplained(now: float, verdict: EngineVerdict) -> None:
    assert verdict.death(now + LAST_WORDS_TIMEOUT - 0.01) is None
    assert verdict.death(now + LAST_WORDS_TIMEOUT) == Death(
        "an engine core ended, and the host does not say why"
    )


def test_an_engine_of_which_nothing_bad_is_heard_lives(verdict: EngineVerdict) -> None:
    verdict.look(NOW)
    assert verdict.due == math.inf
    assert verdict.death(NOW + 1e9) is None


def test_a_farewell_that_the_host_does_not_explain_is_the_end(verdict: EngineVerdict) -> None:
    verdict.farewell(1, 1, NOW)
    unexplained(NOW, verdict)


def test_the_end_of_a_cores_process_that_the_host_does_not_explain_is_the_end(
    verdict: EngineVerdict, watch: FakeWatch
) -> None:
    watch.ended.add(0)
    verdict.look(NOW)
    # Later looks do not give the host more time.
    verdict.look(NOW + 1)
    unexplained(NOW, verdict)


def test_a_farewell_of_a_core_that_was_replaced_is_not_taken_for_its_successors(
    verdict: EngineVerdict,
) -> None:
    verdict.farewell(0, 0, NOW)
    assert verdict.due == math.inf
    verdict.farewell(0, 1, NOW)
    assert verdict.due == NOW + LAST_WORDS_TIMEOUT


def test_an_engine_goes_on_without_a_core_when_the_host_says_so(
    verdict: EngineVerdict, watch: FakeWatch
) -> None:
    verdict.farewell(1, 1, NOW)
    watch.ended.add(1)
    verdict.ranks_changed([0])
    verdict.look(NOW)
    assert verdict.death(NOW + 1e9) is None


def test_the_hosts_word_of_one_core_says_nothing_of_another_that_ended(verdict: EngineVerdict) -> None:
    for rank in (0, 1):
        verdict.farewell(rank, 1, NOW)
    verdict.ranks_changed([0])
    unexplained(NOW, verdict)


def test_a_farewell_before_a_core_is_called_ready_again_is_forgotten(verdict: EngineVerdict) -> None:
    verdict.ranks_changed([0])
    verdict.farewell(1, 1, NOW)
    verdict.ready(1, 2)
    verdict.ranks_changed([0, 1])
    verdict.look(NOW)
    assert verdict.death(NOW + 1e9) is None


def test_the_hosts_notice_of_a_death_holds_at_once(verdict: EngineVerdict) -> None:
    verdict.noticed(EngineDead("it fell over", "last lines"), NOW)
    assert verdict.death(NOW) == Death("it fell over", "last lines", started=True)
    verdict.noticed(EngineDead("no such file", started=False, explained=True), NOW)
    assert verdict.death(NOW) == Death("no such file", started=False, explained=True)


def test_after_an_end_in_good_order_all_cores_say_good_bye_first(verdict: EngineVerdict) -> None:
    verdict.is_end_expected = True
    verdict.noticed(EngineDead("asked for", expected=True), NOW)
    verdict.farewell(0, 1, NOW)
    assert verdict.death(NOW) is None
    verdict.farewell(1, 1, NOW)
    assert verdict.death(NOW) == Death("asked for", started=True)


def test_after_an_end_in_good_order_nobody_waits_for_good_byes_for_long(verdict: EngineVerdict) -> None:
    verdict.noticed(EngineDead("asked for", expected=True), NOW)
    assert verdict.death(NOW + LAST_OUTPUTS_TIMEOUT - 0.01) is None
    assert verdict.death(NOW + LAST_OUTPUTS_TIMEOUT) is not None


def test_cores_that_end_in_an_end_that_was_asked_for_need_no_explanation(
    verdict: EngineVerdict, watch: FakeWatch
) -> None:
    verdict.is_end_expected = True
    verdict.farewell(0, 1, NOW)
    watch.ended.add(1)
    verdict.look(NOW)
    assert verdict.death(NOW + 1e9) is None


def test_a_host_has_time_to_end_what_is_left_before_a_client_does_without_its_words() -> None:
    # It tells of the end when all other cores are gone.
    assert LAST_WORDS_TIMEOUT > STOP_GRACE + LONGEST_LAST_WORDS + KILLED_WAIT
