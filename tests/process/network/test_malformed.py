"""Malformed frames from peers that have the keys: they end as messages, and everybody else goes on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_support.engine_under_test import FAKE_EXECUTOR, EngineUnderTest
from process_support.raw_client import RawClient

from nbengine.client.sync_mp import SyncMPClient
from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import (
    Attach,
    ClientLost,
    EngineReady,
    Heartbeat,
    Hello,
    LeaseLost,
    Progress,
    ReadHistory,
    ScaleElasticEP,
)
from nbengine.ipc.handshake import encode_control
from nbengine.ipc.liveness import ProcessIdentity
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    FIRST_REQ,
    KV_TOPIC,
    STATS_TOPIC,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
    UtilityRequest,
    engine_identity,
)
from nbengine.ipc.protocol import PROTOCOL
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import SchedulerStats
from nbengine.runtime.connection import ConnectionInfo
from nbengine.sampling_params import SamplingParams
from tests.support.thorough import amount

NUM_EXAMPLES = amount(50, thorough=100)
STRANGE_RANK = 300
"""Of a peer that claims to be an engine core which is not there."""

StartEngine = Callable[..., EngineUnderTest]
Frames = list[bytes]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["attach", "heartbeat", "scaled", "ready", "dead", "hello", "client_lost", "type"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FRAME = st.binary(max_size=64) | VALUES.map(msgspec.msgpack.encode)
HUGE = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000]
"""msgpack that announces more than there is, or is nested too deep."""


def damaged(valid: list[Frames]) -> st.SearchStrategy[Frames]:
    """Valid messages with something cut, changed, added or left out."""

    @st.composite
    def damage(draw: Any) -> Frames:
        frames = list(draw(st.sampled_from(valid)))
        place = draw(st.integers(0, len(frames) - 1))
        frame = frames[place]
        match draw(st.integers(0, 4)):
            case 0:
                frames[place] = frame[: draw(st.integers(0, len(frame)))]
            case 1 if frame:
                at = draw(st.integers(0, len(frame) - 1))
                frames[place] = frame[:at] + draw(st.binary(min_size=1, max_size=2)) + frame[at + 1 :]
            case 2:
                frames.insert(place, draw(FRAME))
            case 3 if len(frames) > 1:
                del frames[place]
            case _:
                frames[place] = frame + draw(FRAME)
        return frames

    return damage()


def messages(valid: list[Frames]) -> st.SearchStrategy[Frames]:
    frames = st.lists(FRAME | st.sampled_from(HUGE), min_size=1, max_size=4)
    return frames | damaged(valid)


def send_all(strategy: st.SearchStrategy[Frames], send: Callable[[Frames], None]) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(strategy)
    def send_one(frames: Frames) -> None:
        send(frames)

    send_one()


TO_HOST = [
    [encode_control(message)]
    for message in (
        Attach("s", ProcessIdentity(1, 1), "ipc:///nowhere/a", "ipc:///nowhere/b", protocol=PROTOCOL),
        Attach("s", ProcessIdentity(1, 1), "ipc:///nowhere/a", "ipc:///nowhere/b", protocol=-1),
        Attach("s", ProcessIdentity(-1, -(2**63)), "tcp://127.0.0.1:1", "udp://x", -5, PROTOCOL),
        Heartbeat(),
        ScaleElasticEP(-(2**40)),
        *(ReadHistory(last, -1, (-1, -(2**63))) for last in (math.nan, -math.inf, math.inf)),
    )
]
STATS = EngineCoreOutputs(engine_index=1, scheduler_stats=SchedulerStats(), wave_complete=3)
REQUEST = EngineCoreRequest("x", [1, 2], SamplingParams(max_tokens=1))
TO_COORDINATOR = [[bytes(f) for f in MsgpackEncoder().encode(STATS)], [KV_TOPIC, b"\x90"], [KV_TOPIC]]
TO_FRONT = [[FIRST_REQ, msgspec.msgpack.encode((0, 0))], [b"\x01" + STATS_TOPIC], [b"\x00" + KV_TOPIC]]
FROM_CORE = [
    [encode_control(message)]
    for message in (Hello(STRANGE_RANK, 1, PROTOCOL), Progress("load"), ClientLost(10**9), ClientLost(-1))
] + [[encode_control(EngineReady(0, 1, 1, 1, 1, 1, "cpu", "float32", [], 1))]]
TO_CORE = [
    [EngineCoreRequestType.ADD.value, *map(bytes, MsgpackEncoder().encode(REQUEST))],
    [EngineCoreRequestType.ABORT.value, *map(bytes, MsgpackEncoder().encode(["x"]))],
    [
        EngineCoreRequestType.UTILITY.value,
        *map(bytes, MsgpackEncoder().encode(UtilityRequest(0, 1, "no", []))),
    ],
    [EngineCoreRequestType.START_DP_WAVE.value, b"\x92\x00\x00"],
]
OUTPUTS = EngineCoreOutputs(outputs=[EngineCoreOutput("nobody", [1])], returned=["nobody"], incarnation=5)
TO_CLIENT = [
    [bytes(f) for f in MsgpackEncoder().encode(OUTPUTS)],
    [
        bytes(f)
        for f in MsgpackEncoder().encode(EngineCoreOutputs(utility_output=UtilityOutput(10**6, None, 1)))
    ],
    [ENGINE_CORE_DEAD],
    [ENGINE_CORE_DEAD, engine_identity(STRANGE_RANK), bytes(4)],
]


@pytest.fixture(scope="module", params=["one machine", "network"])
def engine(request: pytest.FixtureRequest, start_shared_engine: StartEngine) -> EngineUnderTest:
    """One for all tests, since each of them shows that the engine outlives what they send."""
    # Mutated requests for shutdown or scaling would end it rightly; so would stats of a rank that is there.
    return start_shared_engine(
        parallel=ParallelConfig(
            distributed_executor_backend=FAKE_EXECUTOR,
            data_parallel_address=None if request.param == "one machine" else "127.0.0.1",
        ),
        lease=60.0,
    )


@pytest.fixture(autouse=True)
def clients_leave(engine: EngineUnderTest) -> Iterator[None]:
    """Close the clients of each test."""
    yield
    while engine.clients:
        engine.clients.pop().leave()


class Peer:
    """Sockets with the engine's keys, each of which sends what it likes."""

    def __init__(self, info: ConnectionInfo) -> None:
        self.info = info
        self.context = info.make_context()

    def connect(self, kind: int, address: str, identity: bytes | None = None) -> zmq.Socket:
        return make_socket(self.context, address, kind, bind=False, identity=identity, linger=5000)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def peer(engine: EngineUnderTest) -> Any:
    peer = Peer(engine.info)
    yield peer
    peer.close()


def assert_goes_on(engine: EngineUnderTest, client: RawClient, name: str) -> None:
    client.add(name, [1])
    client.wait_finished(name)
    assert client.tokens(name) == list(range(2, 10))
    assert engine.host.poll() is None
    assert "Traceback" not in engine.log()


def not_asked_for(frames: Frames) -> bool:
    """Return whether a message is none that ends the engine, by chance or by damage."""
    return not any(word in b"".join(frames) for word in (b"shutdown", b"SCALE"))


def test_the_host_outlives_what_clients_and_cores_send(engine: EngineUnderTest, peer: Peer) -> None:
    client = engine.client().attach()
    dealer = peer.connect(zmq.DEALER, engine.info.address("host.sock"))
    core = peer.connect(zmq.DEALER, engine.info.address("core.sock"), engine_identity(STRANGE_RANK))
    nobody = peer.connect(zmq.DEALER, engine.info.address("core.sock"), b"x" * 40)
    send_all(messages(TO_HOST).filter(not_asked_for), dealer.send_multipart)
    send_all(messages(FROM_CORE), core.send_multipart)
    send_all(messages(FROM_CORE), nobody.send_multipart)
    # All of it has been read when this is answered; answers to attachments come before it.
    dealer.send(encode_control(Heartbeat()))
    assert dealer.poll(60_000)
    assert_goes_on(engine, client, "r")
    for socket in (dealer, core, nobody):
        socket.close(linger=0)


def test_the_coordinator_outlives_what_cores_and_subscribers_send(
    engine: EngineUnderTest, peer: Peer
) -> None:
    client = engine.client().attach()
    subscriber = client.subscribe()
    pusher = peer.connect(zmq.PUSH, engine.info.address("back-out.sock"))
    front = peer.connect(zmq.XSUB, engine.info.address("stats.sock"))
    back = peer.connect(zmq.XSUB, engine.info.address("back-pub.sock"))
    send_all(messages(TO_COORDINATOR), pusher.send_multipart)
    send_all(messages(TO_FRONT), front.send_multipart)
    send_all(messages(TO_FRONT), back.send_multipart)
    assert_goes_on(engine, client, "r")
    client.read_stats(subscriber, lambda stats: stats.engines[0].step_counter > 0)
    for socket in (pusher, front, back):
        socket.close(linger=0)


def test_a_core_outlives_what_a_client_sends(engine: EngineUnderTest) -> None:
    fuzzer, client = engine.client().attach(), engine.client().attach()

    def send(frames: Frames) -> None:
        fuzzer.send_frames(*frames)

    send_all(messages(TO_CORE), send)
    # Read by the same thread, in order.
    assert fuzzer.call("ping", call_id=2**40) == (None, "pong")
    assert_goes_on(engine, client, "r")


def test_a_client_outlives_what_its_peers_send(engine: EngineUnderTest, peer: Peer) -> None:
    client = SyncMPClient(engine.read_connection())
    try:
        client.wait_ready()
        input_address, output_address = client.cores.addresses
        dealer = peer.connect(zmq.DEALER, input_address, engine_identity(STRANGE_RANK))
        odd = peer.connect(zmq.DEALER, input_address, b"x")
        pusher = peer.connect(zmq.PUSH, output_address)
        for socket in (dealer, odd):
            send_all(messages([[bytes(4)]]), socket.send_multipart)
        send_all(messages(TO_CLIENT), pusher.send_multipart)
        client.add_request(EngineCoreRequest("r", [1], SamplingParams(max_tokens=8, temperature=0.0)))
        tokens: list[int] = []
        while len(tokens) < 8:
            for output in client.get_output().outputs:
                if output.request_id == "r":
                    assert output.error is None
                    tokens += output.new_token_ids
        assert tokens == list(range(2, 10))
        client.check_alive()
        for socket in (dealer, odd, pusher):
            socket.close(linger=0)
    finally:
        client.detach()


def test_a_frame_that_is_too_long_ends_its_senders_connection_alone(
    engine: EngineUnderTest, peer: Peer
) -> None:
    client = engine.client().attach()
    dealer = peer.connect(zmq.DEALER, engine.info.address("host.sock"))
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.send(random.Random(0).randbytes(17 << 20))
    assert monitor.poll(60_000), "it was taken in"
    assert_goes_on(engine, client, "r")
    assert client.tell(Heartbeat()) is None
    assert not isinstance(client.hear(), LeaseLost)
    dealer.disable_monitor()
    monitor.close()
    dealer.close(linger=0)
