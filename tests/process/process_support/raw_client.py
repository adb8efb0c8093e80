"""A client that speaks the protocol with bare sockets, as an oracle for the engine side."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import zmq

from nbengine.ipc.control_messages import (
    Attach,
    Attached,
    Detach,
    EngineDead,
    EngineReady,
    Heartbeat,
    HostToClient,
    LeaseLost,
)
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.liveness import ProcessIdentity, identity_of
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    STATS_TOPIC,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityRequest,
    engine_identity,
    new_secret,
)
from nbengine.ipc.protocol import PROTOCOL
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import bound_address
from nbengine.metrics.stats import EngineStats
from nbengine.runtime.connection import ConnectionInfo
from nbengine.sampling_params import SamplingParams

DEADLINE = 60.0


class RawClient:
    """Sockets of one client, of this process, of `pid`'s or (0) of one elsewhere. Everything that waits gives up after `DEADLINE` seconds with an AssertionError."""

    def __init__(self, info: ConnectionInfo, session: str | None = None, pid: int | None = None) -> None:
        self.info = info
        self.session = session or uuid.uuid4().hex
        self.process = ProcessIdentity(0, 0) if pid == 0 else identity_of(pid or os.getpid())
        assert self.process is not None
        self.context = info.make_context()
        self.sockets: list[zmq.Socket] = []
        self.secret = new_secret()
        self.client_index = -1
        self.ready: EngineReady | None = None
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.utility: dict[int, object] = {}
        self.dead_frames = 0
        self.host = self.open_socket(zmq.DEALER, info.address("host.sock"))
        name = f"c-{uuid.uuid4().hex[:8]}"
        self.input = self.open_socket(zmq.ROUTER, info.client_bind_address(f"{name}.in"), bind=True)
        self.input.router_mandatory = True
        # A core that is started again may come before its predecessor is known to have gone.
        self.input.router_handover = True
        self.output = self.open_socket(zmq.PULL, info.client_bind_address(f"{name}.out"), bind=True)
        self.input_address = bound_address(self.input)
        self.output_address = bound_address(self.output)
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.control_decoder = ControlDecoder(HostToClient)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)
        self.sockets.append(socket)
        return socket

    def open_socket(self, kind: int, address: str, *, bind: bool = False) -> zmq.Socket:
        """Open one more socket at an address of the engine's, over any kind of transport."""
        socket = make_socket(self.context, address, kind, bind=bind)
        self.sockets.append(socket)
        return socket

    def close(self) -> None:
        self.context.destroy(linger=0)
        for address in (self.input_address, self.output_address):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def leave(self) -> None:
        """Give the lease back, then close."""
        self.tell(Detach())
        assert self.hear(LeaseLost).reason == "detached"
        self.close()

    # The host.

    def tell(self, message) -> None:
        self.host.send(encode_control(message))

    def hear(self, kind: type | None = None, deadline: float = DEADLINE):
        """The next message of the host, or the next of one kind."""
        end = time.monotonic() + deadline
        while True:
            left = max(0, int((end - time.monotonic()) * 1000))
            assert self.host.poll(left), f"the host did not send {kind} within {deadline} s"
            message = self.control_decoder.decode(self.host.recv())
            if kind is None or isinstance(message, kind):
                return message

    def attach(self, deadline: float = DEADLINE, *, is_greeted: bool = True) -> RawClient:
        """Attach and wait until the engine takes requests and has greeted this client on its outputs."""
        self.tell(self.attach_message())
        attached = self.hear(Attached)
        self.client_index = attached.client_index
        for _ in attached.engine_ranks:
            self.ready = self.hear(EngineReady, deadline)
        for _ in attached.engine_ranks:
            assert self.input.poll(int(deadline * 1000)), "the core did not announce itself"
            assert len(self.input.recv_multipart()) == 2
        for _ in attached.engine_ranks if is_greeted else ():
            assert self.output.poll(int(deadline * 1000)), "the core did not send its greeting"
            outputs = self.decoder.decode(self.output.recv_multipart())
            assert not outputs.outputs
        return self

    def attach_message(self) -> Attach:
        return Attach(
            self.session,
            self.process,
            self.input_address,
            self.output_address,
            protocol=PROTOCOL,
            secret=self.secret,
        )

    def identity(self, rank: int) -> bytes:
        """Return the identity of an engine core at this client's input."""
        return engine_identity(rank, self.secret)

    def heartbeat(self) -> None:
        self.tell(Heartbeat())

    def expect_end(self, cause: str, *, expected: bool, started: bool = True) -> EngineDead:
        """Hear the host's notice that the engine has ended, check what it says, and return it."""
        dead = self.hear(EngineDead)
        assert cause in dead.cause
        assert (dead.expected, dead.started) == (expected, started)
        return dead

    # The core.

    def send(self, request_type: EngineCoreRequestType, payload, rank: int = 0) -> None:
        self.send_frames(request_type.value, *self.encoder.encode(payload), rank=rank)

    def send_frames(self, *frames, rank: int = 0) -> None:
        self.input.send_multipart([self.identity(rank), *frames])

    def add(self, request_id: str, prompt: list[int], *, rank: int = 0, wave: int = 0, **params) -> None:
        params = {"max_tokens": 8, "temperature": 0.0} | params
        request = EngineCoreRequest(request_id, prompt, SamplingParams(**params), current_wave=wave)
        self.send(EngineCoreRequestType.ADD, request, rank)

    def abort(self, *request_ids: str, rank: int = 0) -> None:
        self.send(EngineCoreRequestType.ABORT, list(request_ids), rank)

    def call(self, method: str, *args, call_id: int = 1, rank: int = 0, deadline: float = DEADLINE):
        """The answer to a utility call, as (failure message, result)."""
        self.start_call(method, *args, call_id=call_id, rank=rank)
        return self.wait_answer(call_id, deadline)

    def start_call(self, method: str, *args, call_id: int, rank: int = 0) -> None:
        call = UtilityRequest(0, call_id, method, list(args))
        self.send(EngineCoreRequestType.UTILITY, call, rank)

    def wait_answer(self, call_id: int, deadline: float = DEADLINE):
        self.read_until(lambda: call_id in self.utility, deadline)
        answer = self.utility.pop(call_id)
        return answer.failure_message, answer.result

    def read_until(self, condition, deadline: float = DEADLINE) -> None:
        """Read outputs until the condition holds."""
        end = time.monotonic() + deadline
        while not condition():
            left = int((end - time.monotonic()) * 1000)
            assert left > 0, f"not within {deadline} s; outputs so far: {list(self.outputs)[-5:]}"
            if self.output.poll(left):
                self.read_one()

    def read_one(self) -> None:
        frames = self.output.recv_multipart()
        if frames[0] == ENGINE_CORE_DEAD:
            self.dead_frames += 1
            return
        outputs = self.decoder.decode(frames)
        if outputs.utility_output is not None:
            self.utility[outputs.utility_output.call_id] = outputs.utility_output
        for output in outputs.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def finished(self, *request_ids: str) -> bool:
        return all(r in self.outputs and self.outputs[r][-1].finished for r in request_ids)

    def wait_finished(self, *request_ids: str, deadline: float = DEADLINE) -> None:
        self.read_until(lambda: self.finished(*request_ids), deadline)

    def wait_dead(self, deadline: float = DEADLINE) -> None:
        self.read_until(lambda: self.dead_frames > 0, deadline)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

    def finish_reason(self, request_id: str):
        return self.outputs[request_id][-1].finish_reason

    # The coordinator.

    def subscribe(self) -> zmq.Socket:
        socket = self.open_socket(zmq.SUB, self.info.address("stats.sock"))
        socket.subscribe(STATS_TOPIC)
        return socket

    @staticmethod
    def read_stats(socket: zmq.Socket, condition=lambda stats: True) -> EngineStats:
        """The next statistics for which the condition holds."""
        decoder = MsgpackDecoder(EngineStats)
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if socket.poll(100):
                stats = decoder.decode(socket.recv_multipart()[1:])
                if condition(stats):
                    return stats
        raise AssertionError("no such statistics came")
