"""A message or file of another version of nbengine gets one line that says which versions meet and what to
do.

The frames and files of the first protocol, which had no field for its number, are recorded: they are what
processes of that version sent and wrote.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from nbengine.cli import main
from nbengine.client.engines import launch
from nbengine.client.engines.directory import find_engine, reap
from nbengine.client.link.host_link import HostLink
from nbengine.config import EngineConfig
from nbengine.engine.host.main import claim_name
from nbengine.engine.host.supervisor import Supervisor
from nbengine.errors import (
    EngineStartError,
    InvalidArgumentError,
    NBEngineError,
    ProtocolMismatchError,
    WireError,
)
from nbengine.ipc.control_messages import (
    Attach,
    Attached,
    ClientToHost,
    CoreToHost,
    Detach,
    EngineDead,
    EngineHandshakeMetadata,
    Hello,
    HostToClient,
    HostToCore,
    Refused,
)
from nbengine.ipc.handshake import ControlDecoder, encode_control, refusal_for, say_hello
from nbengine.ipc.liveness import ProcessIdentity, machine_id, this_process
from nbengine.ipc.messages import engine_identity
from nbengine.ipc.protocol import PROTOCOL, UNNAMED
from nbengine.runtime import other_protocols
from nbengine.runtime.connection import (
    ConnectionInfo,
    connection_file,
    list_connections,
    log_dir,
    read_connection,
    read_label,
    write_connection,
)

ATTACH_1 = (
    b"\x87\xa4type\xa6attach\xa7session\xa8notebook\xa3pid\xcd\x12g\xabcreate_time\xcbA\xdaH\x8a\xd6\x10\x00\x00"
    b"\xadinput_address\xb7ipc:///tmp/nbe-x/c-1.in\xaeoutput_address\xb8ipc:///tmp/nbe-x/c-1.out\xa8replaces\x00"
)
ATTACHED_1 = (
    b"\x84\xa4type\xa8attached\xacclient_index\x01\xacengine_ranks\x91\x00\xaatensor_dir\xae/dev/shm/nbe-x"
)
HELLO_1 = b"\x83\xa4type\xa5hello\xa4rank\x00\xa3pid\xcd\x12h"
HANDSHAKE_1 = (
    b"\x87\xa4type\xa9handshake\xb1coordinator_input\xbeipc:///tmp/nbe-x/back-pub.sock\xb2coordinator_output"
    b"\xbeipc:///tmp/nbe-x/back-out.sock\xaatensor_dir\xa0\xabincarnation\x00\xb2data_parallel_size\x01"
    b"\xabjoins_later\xc2"
)
FILE_1: dict[str, Any] = {
    "name": "old",
    "run_dir": "/tmp/nbe-abcdefgh",
    "log_path": "/tmp/old.log",
    "host_pid": 4711,
    "host_create_time": 1763847000.25,
    "config": {"model": {"model": "random-tiny", "dtype": "auto"}, "keep_alive": 600.0, "lease": 30.0},
    "tensor_dir": "",
    "ready": [
        {"type": "ready", "rank": 0, "num_blocks": 64, "block_size": 16, "max_model_len": 512}
        | {"kv_cache_bytes": 10, "weights_bytes": 6, "device": "cpu", "dtype": "float32"}
        | {"supported_tasks": ["generate"], "pid": 4712, "workers": [], "incarnation": 0, "machine": ""}
    ],
    "created": 1763847001.5,
    "machine": "",
    "keys": None,
    "addresses": {},
}
OPENINGS = [
    (ClientToHost, Attach("s", ProcessIdentity(1, 1), "in", "out", protocol=PROTOCOL), ATTACH_1),
    (HostToClient, Attached(1, [0], protocol=PROTOCOL), ATTACHED_1),
    (CoreToHost, Hello(0, 1, protocol=PROTOCOL), HELLO_1),
    (HostToCore, EngineHandshakeMetadata("in", "out", protocol=PROTOCOL), HANDSHAKE_1),
]


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")


def write_file(**fields: Any) -> Path:
    """A connection file of another protocol."""
    path = connection_file("old")
    path.write_text(json.dumps(FILE_1 | fields))
    path.chmod(0o600)
    return path


def check_line(text: str, *parts: str) -> None:
    assert "\n" not in text
    assert "Traceback" not in text
    for part in parts:
        assert part in text


# Messages.


@pytest.mark.parametrize(("messages", "message", "recorded"), OPENINGS)
def test_an_opening_of_another_protocol_is_known_whether_it_can_be_decoded_or_not(
    messages: Any, message: msgspec.Struct, recorded: bytes
) -> None:
    decoder: ControlDecoder[Any] = ControlDecoder(messages)
    assert decoder.decode(encode_control(message)) == message
    later = msgspec.msgpack.decode(encode_control(message)) | {"protocol": PROTOCOL + 1}
    unlike = {"type": later["type"], "protocol": PROTOCOL + 2, "rank": "another thing now"}
    frames = [recorded, msgspec.msgpack.encode(later), msgspec.msgpack.encode(unlike)]
    for frame, theirs in zip(frames, (UNNAMED, PROTOCOL + 1, PROTOCOL + 2), strict=True):
        with pytest.raises(ProtocolMismatchError) as caught:
            decoder.decode(frame)
        assert caught.value.theirs == theirs


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x81\xa4type\xa7nothing", msgspec.msgpack.encode({"type": "attach", "protocol": "x"})],
)
def test_nonsense_is_no_other_protocol(frame: bytes) -> None:
    with pytest.raises(WireError) as caught:
        ControlDecoder[Any](ClientToHost).decode(frame)
    assert not isinstance(caught.value, ProtocolMismatchError)


class EngineDead1(msgspec.Struct, tag="dead"):
    """The first protocol's `EngineDead`."""

    cause: str
    log_tail: str = ""
    started: bool = True
    expected: bool = False


def test_a_client_is_refused_in_words_that_it_knows() -> None:
    old, new = refusal_for("engine e", UNNAMED), refusal_for("engine e", PROTOCOL + 1)
    assert isinstance(old, EngineDead)
    known = msgspec.msgpack.decode(encode_control(old), type=EngineDead1)
    assert known == EngineDead1(old.cause, started=False)
    check_line(old.cause, f"protocol {PROTOCOL}", f"protocol {UNNAMED}", "restart this kernel")
    assert isinstance(new, Refused)
    check_line(new.reason, f"protocol {PROTOCOL}", f"protocol {PROTOCOL + 1}", "restart the engine")


def test_a_core_says_why_it_does_not_start_under_a_host_of_another_protocol() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as host, context.socket(zmq.PAIR) as core:
        host.bind("inproc://control")
        core.connect("inproc://control")
        host.send(HANDSHAKE_1)
        with pytest.raises(EngineStartError) as caught:
            say_hello(core, 0, 1)
        check_line(caught.value.cause, f"protocols {UNNAMED} and {PROTOCOL}", "restart the kernel")
        assert ControlDecoder[CoreToHost](CoreToHost).decode(host.recv()) == Hello(0, 1, PROTOCOL)


class FakeCore:
    secret = b""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_a_core_of_another_protocol_is_ended_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    host, core = Supervisor.__new__(Supervisor), FakeCore()
    host.info = ConnectionInfo(
        name="e", run_dir="/r", log_path="", host_pid=1, host_started=1, config=EngineConfig()
    )
    host._cores, host._core_decoder = {0: core}, ControlDecoder(CoreToHost)  # type: ignore[dict-item]
    with pytest.raises(ProtocolMismatchError):
        host._read_core(engine_identity(0), HELLO_1)
    assert core.signals == [signal.SIGKILL]
    check_line(caplog.messages[-1], "engine e", f"protocols {UNNAMED} and {PROTOCOL}", "restart the kernel")


class Listener:
    """Waits for the end of a link."""

    def __init__(self) -> None:
        self.error: NBEngineError | None = None
        self.is_dead = threading.Event()

    def on_dead(self, error: NBEngineError) -> None:
        self.error = error
        self.is_dead.set()


@pytest.mark.parametrize(
    "answer", [ATTACHED_1, encode_control(Refused("engine e speaks another protocol"))], ids=["old", "new"]
)
def test_a_client_that_is_not_understood_leaves_the_engine_alone(tmp_path: Path, answer: bytes) -> None:
    info = ConnectionInfo(
        name="e",
        run_dir=str(tmp_path),
        log_path="",
        host_pid=this_process().pid,
        host_started=0,
        config=EngineConfig(),
    )
    write_connection(info)
    listener = Listener()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as host:
        host.bind(info.address("host.sock"))
        link = HostLink(info, "s", "in", "out", listener)  # type: ignore[arg-type]
        link.start()
        identity, attach = host.recv_multipart()
        assert ControlDecoder[ClientToHost](ClientToHost).decode(attach).protocol == PROTOCOL
        host.send_multipart([identity, answer])
        assert listener.is_dead.wait(60)
        link.join()
        if answer is ATTACHED_1:
            _, detach = host.recv_multipart()
            assert ControlDecoder[ClientToHost](ClientToHost).decode(detach) == Detach()
    assert isinstance(listener.error, EngineStartError)
    check_line(str(listener.error), "protocol")
    assert connection_file("e").exists()


# Files.


@pytest.mark.parametrize(
    ("protocol", "remedy"),
    [
        ({}, "restart the engine (`kill 4711` ends it)"),
        ({"protocol": PROTOCOL + 1}, "restart this kernel or program"),
    ],
    ids=["older", "newer"],
)
def test_a_connection_file_of_another_protocol_says_so(protocol: dict[str, int], remedy: str) -> None:
    path = write_file(**protocol)
    for read in (read_connection, find_engine):
        with pytest.raises(ProtocolMismatchError) as caught:
            read(path)
        theirs = protocol.get("protocol", UNNAMED)
        check_line(str(caught.value), "engine old", f"protocol {theirs}", f"protocol {PROTOCOL}", remedy)


def test_what_has_no_engines_name_is_no_connection_file_of_any_protocol() -> None:
    path = connection_file("old")
    path.write_text("{}")
    with pytest.raises(NBEngineError, match="is not a connection file") as caught:
        read_connection(path)
    assert not isinstance(caught.value, ProtocolMismatchError)


def test_a_living_engine_of_another_protocol_is_listed_and_keeps_its_name_and_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = log_dir() / "old-20250101-000000-1.log"
    log.touch()
    os.utime(log, (1, 1))
    for number in range(launch.KEPT_LOGS + 5):
        (log_dir() / f"e{number}-20260101-000000-1.log").touch()
    path = write_file(host_pid=os.getpid(), machine=machine_id(), log_path=str(log))
    assert list_connections() == []
    assert main(["ps"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith("NAME")
    check_line(line, "engine old", f"protocol {UNNAMED}", f"`kill {os.getpid()}`")
    with pytest.raises(InvalidArgumentError, match="the name of no running engine"):
        launch._choose_name("old", "x")
    info = ConnectionInfo(
        name="old", run_dir="/r", log_path="", host_pid=1, host_started=1, config=EngineConfig()
    )
    with pytest.raises(
        EngineStartError, match="an engine named 'old' is running: engine old speaks protocol 1"
    ):
        claim_name(info)
    launch._new_log_file("new")
    assert log.exists()
    assert reap().dead == []
    assert path.exists()


def test_an_engine_of_another_protocol_that_ends_while_it_is_looked_at_is_not_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(host_pid=os.getpid())
    assert other_protocols.other_engine(path) is not None

    def read(path: Path) -> Any:
        path.unlink()
        return read_label(path)

    monkeypatch.setattr(other_protocols, "read_label", read)
    assert main(["ps"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert not path.exists()


def test_a_dead_engine_of_another_protocol_is_in_nobodys_way(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    write_file(host_pid=dead.pid)
    assert main(["ps"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert launch._choose_name("old", "x") == "old"


def test_an_engine_of_another_protocol_from_before_a_boot_is_in_nobodys_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbengine.ipc.liveness.lasting_machine_id", lambda: "this")
    boot = "0b5ff58b-0d2c-4f4c-9ba1-6e2d25c71cc1"
    write_file(host_pid=os.getpid(), machine=f"{boot}:1", lasting_machine="this")
    assert main(["ps"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert launch._choose_name("old", "x") == "old"


class OldReady(msgspec.Struct, tag="ready"):
    """An engine core in a connection file of the first protocol."""

    rank: int


class OldConnectionInfo(msgspec.Struct, kw_only=True):
    """The fields of a connection file that the first protocol reads, and requires."""

    name: str
    run_dir: str
    host_pid: int
    host_create_time: float
    ready: list[OldReady] = []


def test_the_first_protocol_finds_the_line_in_the_files_of_this_one() -> None:
    info = ConnectionInfo(
        name="e", run_dir="/r", log_path="", host_pid=1, host_started=1, config=EngineConfig()
    )
    path = write_connection(info)
    assert read_connection(path) == info
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(path.read_bytes(), type=OldConnectionInfo)
    check_line(
        str(caught.value), f"protocol {PROTOCOL}", f"protocol {UNNAMED}", "restart this kernel or program"
    )
