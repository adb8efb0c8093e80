"""Leases: renewed by heartbeats, ended for one reason each, epochs never reused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nbengine.engine.host.leases import LIVENESS_INTERVAL, EndedLease, LeaseTable
from nbengine.ipc.control_messages import Attach
from nbengine.ipc.liveness import ProcessIdentity, ProcessState
from tests.support.thorough import amount

DURATION = 10.0


def attach(session: str = "s", pid: int = 1) -> Attach:
    return Attach(session, ProcessIdentity(pid, 1), "in", "out")


class Processes(dict[int, ProcessState]):
    """The states of the clients' processes, by pid; those that are not listed run."""

    def state_of(self, process: ProcessIdentity) -> ProcessState:
        return self.get(process.pid, ProcessState.RUNNING)


def table(processes: Processes | None = None) -> LeaseTable:
    return LeaseTable(DURATION, (Processes() if processes is None else processes).state_of)


def pass_time(leases: LeaseTable, begin: float, end: float) -> list[tuple[float, EndedLease]]:
    """Let the host look as often as it is asked to; return what ends, and when."""
    ended, now = [], begin
    while (due := leases.next_deadline()) is not None and max(now, due) <= end:
        now = max(now, due)
        ended += [(now, item) for item in leases.expire(now)]
    return ended


def test_a_lease_of_another_machine_lapses_exactly_after_its_duration() -> None:
    leases = table()
    leases.grant(attach(pid=0), b"a", 0.0)
    ((when, ended),) = pass_time(leases, 0.0, 60.0)
    assert (when, ended.reason, ended.final) == (10.0, "no heartbeat for 10 s", False)
    assert len(leases) == 0
    assert leases.next_deadline() is None


@pytest.mark.parametrize("state", [ProcessState.RUNNING, ProcessState.TRACED])
def test_a_silent_process_keeps_its_lease_while_it_runs_or_is_debugged(state: ProcessState) -> None:
    leases = table(Processes({1: state}))
    leases.grant(attach(), b"a", 0.0)
    assert pass_time(leases, 0.0, 3600.0) == []


def test_a_stopped_process_loses_its_lease_after_the_duration_of_one() -> None:
    processes = Processes({2: ProcessState.STOPPED})
    leases = table(processes)
    leases.grant(attach("x", pid=1), b"a", 0.0)
    leases.grant(attach("y", pid=2), b"b", 0.0)
    ((when, stopped),) = pass_time(leases, 0.0, 100.0)
    assert (when, stopped.reason, stopped.final) == (
        10.0,
        "no heartbeat for 10 s; process 2 is stopped",
        False,
    )
    processes[1] = ProcessState.STOPPED
    ((when, stopped),) = pass_time(leases, 100.0, 200.0)
    assert stopped.lease.process.pid == 1
    assert 110.0 - LIVENESS_INTERVAL <= when <= 110.0


def test_a_process_that_goes_on_in_time_keeps_its_lease() -> None:
    processes = Processes({1: ProcessState.STOPPED})
    leases = table(processes)
    leases.grant(attach(), b"a", 0.0)
    assert pass_time(leases, 0.0, 9.0) == []
    processes[1] = ProcessState.RUNNING
    assert pass_time(leases, 9.0, 12.0) == []
    processes[1] = ProcessState.STOPPED
    assert pass_time(leases, 12.0, 21.0) == []


@pytest.mark.parametrize("pid", [0, 1])
def test_what_the_host_slept_through_is_not_counted(pid: int) -> None:
    leases = table(Processes({1: ProcessState.STOPPED}))
    leases.grant(attach(pid=pid), b"a", 0.0)
    assert pass_time(leases, 0.0, 5.0) == []
    # The host was stopped, or its machine slept, for a minute.
    assert leases.expire(65.0) == []
    ((when, _),) = pass_time(leases, 65.0, 100.0)
    assert 70.0 - LIVENESS_INTERVAL <= when <= 70.0 + LIVENESS_INTERVAL


def test_a_heartbeat_renews_and_a_stranger_has_nothing_to_renew() -> None:
    leases = table()
    leases.grant(attach(pid=0), b"a", 0.0)
    assert pass_time(leases, 0.0, 9.0) == []
    assert leases.renew(b"a", 9.0)
    assert not leases.renew(b"b", 9.0)
    assert pass_time(leases, 9.0, 18.9) == []


def test_a_dead_process_is_noticed_at_the_next_look() -> None:
    processes = Processes()
    leases = table(processes)
    leases.grant(attach(pid=7), b"a", 0.0)
    leases.expire(0.0)
    processes[7] = ProcessState.GONE
    assert leases.expire(LIVENESS_INTERVAL / 2) == []
    assert leases.next_deadline() == LIVENESS_INTERVAL
    ended = leases.expire(LIVENESS_INTERVAL)
    assert [item.reason for item in ended] == ["process 7 is gone"]
    assert ended[0].final


def test_a_newer_attachment_of_a_session_or_connection_ends_the_older_one() -> None:
    leases = table(Processes({2: ProcessState.GONE}))
    first, none = leases.grant(attach("x", pid=1), b"a", 0.0)
    second, by_session = leases.grant(attach("x", pid=2), b"b", 0.0)
    third, by_connection = leases.grant(attach("y", pid=3), b"b", 0.0)
    assert none == []
    assert [(item.lease, item.final) for item in by_session] == [(first, False)]
    assert [(item.lease, item.final) for item in by_connection] == [(second, True)]
    assert leases.leases == [third]


class Leases(RuleBasedStateMachine):
    """Any history against a plain model: what each connection holds, and since when."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.processes = Processes()
        self.leases = table(self.processes)
        self.held: dict[bytes, tuple[str, int, float]] = {}
        self.epochs: list[int] = []

    @rule(identity=st.sampled_from([b"a", b"b", b"c"]), session=st.sampled_from("xyz"), pid=st.integers(1, 4))
    def grant(self, identity, session, pid) -> None:
        lease, ended = self.leases.grant(attach(session, pid), identity, self.now)
        expected = {key for key, (s, _, _) in self.held.items() if s == session or key == identity}
        assert {item.lease.identity for item in ended} == expected
        for key in expected:
            del self.held[key]
        self.held[identity] = (session, pid, self.now)
        self.epochs.append(lease.client_index)

    @rule(identity=st.sampled_from([b"a", b"b", b"c"]))
    def heartbeat(self, identity) -> None:
        assert self.leases.renew(identity, self.now) == (identity in self.held)
        if identity in self.held:
            session, pid, _ = self.held[identity]
            self.held[identity] = (session, pid, self.now)

    @rule(identity=st.sampled_from([b"a", b"b", b"c"]))
    def release(self, identity) -> None:
        ended = self.leases.release(identity)
        assert (ended is not None) == (self.held.pop(identity, None) is not None)

    @rule(pid=st.integers(1, 4), state=st.sampled_from(ProcessState))
    def change(self, pid, state) -> None:
        """Change what a process does: it runs, stops, is debugged or ends; the dead stay so."""
        if self.processes.get(pid) is not ProcessState.GONE:
            self.processes[pid] = state

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds) -> None:
        """Time passes as in the host: `expire` is called when `next_deadline` says so."""
        until = self.now + seconds
        while (due := self.leases.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            for item in self.leases.expire(self.now):
                _, pid, heard = self.held.pop(item.lease.identity)
                state = self.processes.state_of(ProcessIdentity(pid, 1))
                silent = heard + DURATION <= self.now
                assert state is ProcessState.GONE or (state is ProcessState.STOPPED and silent)
        self.now = until

    @invariant()
    def only_live_leases_remain(self) -> None:
        assert {lease.identity for lease in self.leases.leases} == set(self.held)
        for _, pid, _ in self.held.values():
            gone = self.processes.state_of(ProcessIdentity(pid, 1)) is ProcessState.GONE
            assert not gone or self.leases.next_deadline() <= self.now + LIVENESS_INTERVAL

    @invariant()
    def epochs_only_grow(self) -> None:
        assert self.epochs == sorted(set(self.epochs))
        assert all(epoch >= 1 for epoch in self.epochs)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=amount(15, thorough=1200), deadline=None)


def test_a_client_on_another_machine_has_no_process_to_look_at() -> None:
    leases = LeaseTable(DURATION, lambda process: ProcessState.GONE)
    leases.grant(attach(pid=0), b"a", 0.0)
    assert pass_time(leases, 0.0, 9.9) == []
    assert [item.reason for _, item in pass_time(leases, 9.9, 10.0)] == ["no heartbeat for 10 s"]


def test_a_dropped_client_may_come_back_to_its_sockets() -> None:
    leases = table()
    lease, _ = leases.grant(attach(), b"a", 0.0)
    assert leases.drop(lease.client_index + 1, "broke") is None
    ended = leases.drop(lease.client_index, "broke")
    assert ended is not None
    assert (ended.reason, ended.final) == ("broke", False)
    assert leases.drop(lease.client_index, "broke") is None


def test_a_client_that_comes_over_a_new_connection_replaces_itself() -> None:
    leases = table()
    lease, _ = leases.grant(attach("s"), b"a", 0.0)
    message = attach("s#1")
    message.replaces = lease.client_index
    _, ended = leases.grant(message, b"b", 1.0)
    assert [item.lease for item in ended] == [lease]
    assert len(leases) == 1
