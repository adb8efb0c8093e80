"""An engine core keeps marked requests within limits, each for its session, with the way in which it
ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.engine.core.core import EngineCore
from nbengine.engine.core.transcripts import (
    ALL_ABORTED,
    CLIENT_LEFT,
    RECORD_OVERHEAD,
    TranscriptLimits,
    TranscriptStore,
    cost_of,
)
from nbengine.engine.core.work import GiveUpClient
from nbengine.errors import InvalidArgumentError
from nbengine.ipc.messages import EngineCoreRequest, FinishReason, TranscriptMark
from nbengine.ipc.transcripts import TranscriptRecord, decoding_params, pack_tokens, unpack_tokens
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.output import Fault, ModelRunnerOutput
from tests.unit.engine.test_core import add, make_core, run
from tests.unit.engine.test_core_proc import Rig
from tests.unit.scheduler.fake_grammar import FakeGrammar


def make_record(session: str, group: str, index: int = 0, num_tokens: int = 3) -> TranscriptRecord:
    mark = TranscriptMark(session, "why?", group, 1.0, index, num_completions=4)
    return TranscriptRecord(mark, pack_tokens(range(num_tokens)), 2, SamplingParams())


def groups_of(store: TranscriptStore, session: str) -> list[str]:
    return [record.mark.group for record in store.of(session)]


# The store.


@dataclass
class Reference:
    """The same rules, in the plainest form: a list, oldest first."""

    limits: TranscriptLimits
    records: list[TranscriptRecord] = field(default_factory=list)

    def fits(self, record: TranscriptRecord, records: list[TranscriptRecord], most: int, size: int) -> bool:
        return len(records) < most and sum(map(cost_of, records)) + cost_of(record) <= size

    def evict(self, candidates: list[TranscriptRecord]) -> None:
        read = [record for record in candidates if record.was_read]
        self.records.remove((read or candidates)[0])

    def add(self, record: TranscriptRecord) -> None:
        limits, session = self.limits, record.mark.session
        names = (record.mark.group, record.mark.index)
        self.records = [other for other in self.records if (other.mark.group, other.mark.index) != names]
        if cost_of(record) > min(limits.session_bytes, limits.bytes):
            return
        while not self.fits(record, self.of(session), limits.session_records, limits.session_bytes):
            self.evict(self.of(session))
        while not self.fits(record, self.records, limits.records, limits.bytes):
            self.evict(self.records)
        self.records.append(record)

    def of(self, session: str) -> list[TranscriptRecord]:
        return [record for record in self.records if record.mark.session == session]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "read", "forget", "forget all"]),
        st.sampled_from("AB"),
        st.integers(0, 5),
        st.integers(0, 1),
        st.integers(0, 600),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_the_store_keeps_to_its_limits_and_gives_up_what_was_read_before_the_oldest(operations) -> None:
    limits = TranscriptLimits(
        session_records=3, session_bytes=4 * RECORD_OVERHEAD, records=4, bytes=6 * RECORD_OVERHEAD
    )
    store, reference = TranscriptStore(limits), Reference(limits)
    for kind, session, number, index, num_tokens in operations:
        # An engine request id belongs to one session.
        group = f"{session}{number}"
        if kind == "add":
            record = make_record(session, group, index, num_tokens)
            store.add(record)
            reference.add(record)
        elif kind == "read":
            store.mark_read(session, [group])
        else:
            wanted = None if kind == "forget all" else [group]
            gone = [r for r in reference.of(session) if wanted is None or r.mark.group in wanted]
            reference.records = [record for record in reference.records if record not in gone]
            assert store.forget(session, wanted) == len(gone)
        assert [store.of(name) for name in "AB"] == [reference.of(name) for name in "AB"]
        assert len(store) == len(reference.records) <= limits.records
        assert store.num_bytes == sum(map(cost_of, reference.records)) <= limits.bytes
        sessions = {record.mark.session for record in reference.records}
        assert store.unread() == {s: sum(not r.was_read for r in reference.of(s)) for s in sessions}


def test_a_session_sees_and_changes_only_its_own() -> None:
    store = TranscriptStore()
    for session in ("mine", "yours"):
        store.add(make_record(session, f"{session}-1"))
    store.mark_read("mine", ["mine-1", "yours-1"])
    assert store.forget("mine", ["yours-1"]) == 0
    assert store.unread() == {"mine": 0, "yours": 1}
    assert store.forget("mine", None) == 1
    assert groups_of(store, "yours") == ["yours-1"]


def test_what_was_read_goes_first_and_then_the_oldest() -> None:
    store = TranscriptStore(TranscriptLimits(session_records=3))
    for number in (1, 2, 3):
        store.add(make_record("s", f"r{number}"))
    store.mark_read("s", ["r2", "r3"])
    for number, left in ((4, ["r1", "r3", "r4"]), (5, ["r1", "r4", "r5"]), (6, ["r4", "r5", "r6"])):
        store.add(make_record("s", f"r{number}"))
        assert groups_of(store, "s") == left
    assert store.unread() == {"s": 3}


def test_one_too_large_is_not_kept_and_pushes_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    store = TranscriptStore(TranscriptLimits(session_bytes=2 * RECORD_OVERHEAD))
    store.add(make_record("s", "small"))
    store.add(make_record("s", "huge", num_tokens=RECORD_OVERHEAD))
    assert groups_of(store, "s") == ["small"]
    assert "huge is too large" in caplog.text


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_packed_four_bytes_each(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert packed[:4] == b"".join(token.to_bytes(4, "little") for token in token_ids[:1])
    assert unpack_tokens(packed) == token_ids


# The engine core.


def add_marked(
    core: EngineCore, request_id: str, first: int, *, session: str = "s", client_index: int = 1, **params
) -> None:
    params = {"temperature": 0.0, "max_tokens": 4} | params
    mark = TranscriptMark(session, f"prompt {first}", request_id, 1.0)
    request = EngineCoreRequest(
        request_id, [first], SamplingParams(**params), client_index=client_index, transcript=mark
    )
    core.add_request(*core.preprocess_add_request(request))


def step(core: EngineCore, times: int = 1) -> None:
    for _ in range(times):
        core.post_step(core.step_fn()[1])


def listed(core: EngineCore, session: str = "s") -> dict[str, tuple[list[int], FinishReason | None, str]]:
    records = core.call_utility("transcripts", [session])
    return {r.mark.group: (unpack_tokens(r.tokens), r.finish_reason, r.cause) for r in records}


def test_a_request_is_kept_however_it_ends_with_all_that_was_written() -> None:
    core = make_core()
    add_marked(core, "length", 10)
    add_marked(core, "stop", 20, stop_token_ids=[22])
    add_marked(core, "left", 30, max_tokens=50)
    add_marked(core, "interrupted", 40, max_tokens=50, client_index=2)
    add_marked(core, "all", 50, max_tokens=50, client_index=3)
    add(core, "unmarked", [60])
    step(core, 4)
    core.abort_for_client(1, None)
    step(core, 1)
    core.abort_for_client(2, ["interrupted"])
    step(core, 1)
    assert listed(core) == {
        "length": ([11, 12, 13, 14], FinishReason.LENGTH, ""),
        "stop": ([21, 22], FinishReason.STOP, ""),
        "left": ([31, 32, 33, 34], FinishReason.ABORT, CLIENT_LEFT),
        "interrupted": ([41, 42, 43, 44, 45], FinishReason.ABORT, ""),
        "all": ([51, 52, 53, 54, 55, 56], None, ""),
    }
    core.abort_all()
    assert listed(core)["all"] == ([51, 52, 53, 54, 55, 56], FinishReason.ABORT, ALL_ABORTED)
    assert core.scheduler.ended_for_transcripts == []
    run(core)
    assert len(listed(core)) == 5


@pytest.mark.parametrize("has_grammar", [False, True])
def test_the_cause_of_a_failed_request_is_what_its_client_was_told(has_grammar: bool) -> None:
    core = make_core()
    add_marked(core, "r", 10)
    step(core, 1)
    if has_grammar:
        core.scheduler.requests["r"].grammar = FakeGrammar(5)
    plan = core.scheduler.schedule()
    answer = ModelRunnerOutput(["r"], [[]], faults={"r": Fault.NOT_FINITE})
    (output,) = core.scheduler.update_from_output(plan, answer)[1].outputs
    assert "NaN" in str(output.error)
    assert listed(core) == {"r": ([11], FinishReason.ERROR, output.error)}


def test_a_record_says_what_was_asked_when_and_by_whom() -> None:
    core = make_core()
    core.transcripts._clock = lambda: 1234.5
    add_marked(core, "r", 10, stop=["x"], min_tokens=2, skip_special_tokens=False, seed=7)
    (running,) = core.call_utility("transcripts", ["s"])
    assert (running.ended, running.finish_reason, running.tokens) == (None, None, b"")
    run(core)
    (record,) = core.call_utility("transcripts", ["s"])
    assert record.mark == TranscriptMark("s", "prompt 10", "r", 1.0)
    assert (record.ended, record.num_prompt_tokens, record.rank) == (1234.5, 1, 0)
    wanted = SamplingParams(max_tokens=None, stop=["x"], min_tokens=2, skip_special_tokens=False)
    assert record.decoding == wanted == decoding_params(wanted)


def test_nothing_is_kept_of_what_is_not_marked_refused_pooled_or_handed_back() -> None:
    core = make_core({"supported_tasks": ["generate", "embed"]})
    add(core, "unmarked", [1])
    with pytest.raises(Exception, match="vocabulary"):
        add_marked(core, "refused", 10_000)
    add_marked(core, "handed back", 10)
    assert core.scheduler.take_unbegun() == {0: ["unmarked"], 1: ["handed back"]}
    run(core)
    assert listed(core) == {}
    mark = TranscriptMark("s", "", "pooled", 1.0)
    pooled = EngineCoreRequest("pooled", [1], None, PoolingParams(task="embed"), transcript=mark)
    assert core.transcripts._record(_scheduled(pooled)) is None


def _scheduled(request: EngineCoreRequest):
    from nbengine.scheduler.request import Request

    return Request.from_engine_core_request(request, None)


def test_a_session_reads_and_forgets_its_own_by_utility() -> None:
    core = make_core()
    for number in (1, 2):
        add_marked(core, f"r{number}", number)
        add_marked(core, f"q{number}", number, session="other")
    run(core)
    core.call_utility("read_transcripts", ["s", ["r1", "q1", "unknown"]])
    assert [record.was_read for record in core.call_utility("transcripts", ["s"])] == [True, False]
    assert core.call_utility("transcript_sessions", []) == {"s": 1, "other": 2}
    assert core.call_utility("forget_transcripts", ["s", ["r1"]]) == 1
    assert list(listed(core)) == ["r2"]
    assert core.call_utility("forget_transcripts", ["s"]) == 1
    assert core.call_utility("transcript_sessions", []) == {"other": 2}


def test_wrong_arguments_of_the_utilities_are_named() -> None:
    core = make_core()
    for method, arguments in (
        ("transcripts", [""]),
        ("transcripts", [None]),
        ("read_transcripts", ["s", "r1"]),
        ("forget_transcripts", ["s", [1]]),
    ):
        with pytest.raises(InvalidArgumentError, match=r"session|groups"):
            core.call_utility(method, arguments)


def test_a_client_that_reads_too_slowly_finds_what_it_has_missed() -> None:
    rig = Rig()
    try:
        core = rig.core
        add_marked(core, "slow", 10)
        step(core, 2)
        core._handle(GiveUpClient(1, "it left 64 MiB unread"))
        assert listed(core) == {"slow": ([11, 12], FinishReason.ABORT, "it left 64 MiB unread")}
        assert core.call_utility("transcripts", ["s"])[0].rank == 2
    finally:
        rig.close()
