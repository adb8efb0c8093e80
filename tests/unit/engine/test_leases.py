"""Leases: renewed by heartbeats, ended for one reason each, epochs never reused."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nbengine.engine.leases import LIVENESS_INTERVAL, LeaseTable
from nbengine.ipc.control_messages import Attach

DURATION = 10.0


def attach(session: str = "s", pid: int = 1) -> Attach:
    return Attach(session, pid, 0.0, "in", "out")


def table(dead: set[int] | None = None) -> LeaseTable:
    return LeaseTable(DURATION, lambda pid, _: pid not in (dead or set()))


def test_a_lease_lapses_exactly_after_its_duration() -> None:
    leases = table()
    leases.grant(attach(), b"a", 0.0)
    assert leases.expire(9.99) == []
    ended = leases.expire(10.0)
    assert [item.reason for item in ended] == ["no heartbeat for 10 s"]
    assert not ended[0].final
    assert len(leases) == 0
    assert leases.next_deadline() is None


def test_a_heartbeat_renews_and_a_stranger_has_nothing_to_renew() -> None:
    leases = table()
    leases.grant(attach(), b"a", 0.0)
    assert leases.renew(b"a", 9.0)
    assert not leases.renew(b"b", 9.0)
    assert leases.expire(18.9) == []


def test_a_dead_process_is_noticed_at_the_next_look() -> None:
    dead: set[int] = set()
    leases = table(dead)
    leases.grant(attach(pid=7), b"a", 0.0)
    leases.expire(0.0)
    dead.add(7)
    assert leases.expire(LIVENESS_INTERVAL / 2) == []
    assert leases.next_deadline() == LIVENESS_INTERVAL
    ended = leases.expire(LIVENESS_INTERVAL)
    assert [item.reason for item in ended] == ["process 7 is gone"]
    assert ended[0].final


def test_a_newer_attachment_of_a_session_or_connection_ends_the_older_one() -> None:
    leases = table(dead={2})
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
        self.dead: set[int] = set()
        self.leases = table(self.dead)
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

    @precondition(lambda self: len(self.dead) < 3)
    @rule(pid=st.integers(1, 4))
    def die(self, pid) -> None:
        self.dead.add(pid)

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds) -> None:
        """Time passes as in the host: `expire` is called when `next_deadline` says so."""
        until = self.now + seconds
        while (due := self.leases.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            for item in self.leases.expire(self.now):
                _, pid, seen = self.held.pop(item.lease.identity)
                assert pid in self.dead or seen + DURATION <= self.now
        self.now = until

    @invariant()
    def only_live_leases_remain(self) -> None:
        assert {lease.identity for lease in self.leases.leases} == set(self.held)
        assert all(seen + DURATION >= self.now for _, _, seen in self.held.values())

    @invariant()
    def epochs_only_grow(self) -> None:
        assert self.epochs == sorted(set(self.epochs))
        assert all(epoch >= 1 for epoch in self.epochs)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, deadline=None)


def test_a_client_on_another_machine_has_no_process_to_look_at() -> None:
    leases = LeaseTable(DURATION, lambda pid, _: False)
    leases.grant(attach(pid=0), b"a", 0.0)
    assert leases.expire(LIVENESS_INTERVAL) == []
    assert [item.reason for item in leases.expire(10.0)] == ["no heartbeat for 10 s"]


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
