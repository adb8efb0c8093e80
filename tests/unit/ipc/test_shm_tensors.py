"""Tensors through files in shared memory: both ends, and everything a handle may not reach."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.errors import NBEngineError, WireError
from nbengine.ipc import shm_tensors
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.shm_tensors import ShmTensorReceiver, ShmTensorSender, new_tensor_dir, remove_abandoned

DATA = memoryview(bytes(range(256)) * 16)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "tensors"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def sender(directory: Path) -> ShmTensorSender:
    return ShmTensorSender(directory, 7, threshold=1000)


@pytest.fixture
def receiver(directory: Path) -> ShmTensorReceiver:
    return ShmTensorReceiver(directory)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def take(sender: ShmTensorSender, data: memoryview = DATA) -> dict[str, Any]:
    handle = sender(data)
    assert handle is not None
    return handle


def test_a_tensor_takes_a_private_file_that_is_gone_when_it_was_received(
    directory: Path, sender: ShmTensorSender, receiver: ShmTensorReceiver
) -> None:
    tensor = torch.randn(50, 40)
    frames = MsgpackEncoder(oob_tensor_consumer=sender).encode(tensor)
    (name,) = files(directory)
    assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    assert (directory / name).read_bytes() == tensor.numpy().tobytes()
    assert len(frames) == 1
    assert len(bytes(frames[0])) < 150
    assert torch.equal(MsgpackDecoder(oob_tensor_provider=receiver).decode(frames), tensor)
    assert files(directory) == []


def test_what_is_small_is_left_in_the_message(directory: Path, sender: ShmTensorSender) -> None:
    assert sender(DATA[:999]) is None
    assert files(directory) == []


def test_names_cannot_be_guessed_from_one_another(sender: ShmTensorSender) -> None:
    names = [take(sender)["name"] for _ in range(20)]
    assert len({name[:20] for name in names}) == 20
    assert all(name.startswith("7-") and len(name) == 34 for name in names)


def test_without_room_the_message_carries_the_tensor(
    directory: Path, sender: ShmTensorSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = os.write, 0

    def write_until_full(descriptor: int, data: memoryview) -> int:
        nonlocal written
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[:100])
        return written

    monkeypatch.setattr(os, "write", write_until_full)
    tensor = torch.arange(1000)
    frames = MsgpackEncoder(oob_tensor_consumer=sender).encode(tensor)
    assert written == 100
    assert len(frames) == 2
    assert files(directory) == []
    assert torch.equal(MsgpackDecoder().decode(frames), tensor)


def test_without_the_directory_the_message_carries_the_tensor(
    directory: Path, sender: ShmTensorSender
) -> None:
    directory.rmdir()
    assert sender(DATA) is None
    sender.close()


def test_a_directory_that_others_can_reach_is_not_used(directory: Path, tmp_path: Path) -> None:
    directory.chmod(0o750)
    with pytest.raises(NBEngineError, match="not this user's alone"):
        ShmTensorSender(directory, 1)
    directory.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(NBEngineError, match="not this user's alone"):
        ShmTensorSender(link, 1)
    with pytest.raises(NBEngineError, match="not here"):
        ShmTensorSender(tmp_path / "missing", 1)


@pytest.mark.parametrize(
    "handle",
    [
        {},
        {"name": None},
        {"name": 3},
        {"name": ""},
        {"name": "../secret"},
        {"name": "/etc/passwd"},
        {"name": "secret"},
        {"name": "7-" + "0" * 31},
        {"name": "7-" + "0" * 32 + "\n"},
        {"name": "7-" + "G" * 32},
        {"name": "٧-" + "0" * 32},
        {"name": "7-" + "0" * 32, "offset": 0},
        {"path": "7-" + "0" * 32},
    ],
    ids=str,
)
def test_a_handle_that_is_no_name_of_ours_reads_and_removes_nothing(
    directory: Path, receiver: ShmTensorReceiver, handle: dict[str, Any]
) -> None:
    secret = directory.parent / "secret"
    inside = directory / "secret"
    for path in (secret, inside):
        path.write_bytes(DATA)
    with pytest.raises(WireError, match="is no handle"):
        receiver(len(DATA), handle)
    receiver.discard(handle)
    assert secret.exists()
    assert inside.exists()


def test_what_a_good_name_stands_for_must_be_a_plain_file_of_the_right_size(
    directory: Path, sender: ShmTensorSender, receiver: ShmTensorReceiver
) -> None:
    secret = directory.parent / "secret"
    secret.write_bytes(DATA)
    names = [f"7-{number:032x}" for number in range(5)]
    symlink, hardlink, fifo, folder, missing = (directory / name for name in names)
    symlink.symlink_to(secret)
    hardlink.hardlink_to(secret)
    os.mkfifo(fifo)
    folder.mkdir()
    for path, reason in (
        (symlink, "cannot be opened"),
        (hardlink, "no other name"),
        (fifo, "plain file"),
        (folder, "plain file"),
        (missing, "cannot be opened"),
    ):
        with pytest.raises(WireError, match=reason):
            receiver(len(DATA), {"name": path.name})
    assert files(directory) == [folder.name]
    assert secret.read_bytes() == DATA
    for wrong_size in (len(DATA) - 1, len(DATA) + 1, 0, 2**60):
        with pytest.raises(WireError, match="is in a file of 4096"):
            receiver(wrong_size, take(sender))
    assert files(directory) == [folder.name]


def test_a_handle_is_good_once(sender: ShmTensorSender, receiver: ShmTensorReceiver) -> None:
    handle = take(sender)
    assert receiver(len(DATA), handle) == DATA
    with pytest.raises(WireError, match="cannot be opened"):
        receiver(len(DATA), handle)


@given(
    st.dictionaries(st.text(max_size=6) | st.just("name"), st.text() | st.integers() | st.none(), max_size=2)
)
@settings(max_examples=200, deadline=None)
def test_random_handles_are_wire_errors(
    tmp_path_factory: pytest.TempPathFactory, handle: dict[str, Any]
) -> None:
    with pytest.raises(WireError):
        ShmTensorReceiver(tmp_path_factory.getbasetemp())(10, handle)


def test_closing_a_sender_removes_its_files_alone_and_ends_it(
    directory: Path, sender: ShmTensorSender
) -> None:
    other = take(ShmTensorSender(directory, 77, threshold=1000))
    take(sender)
    take(sender)
    sender.close()
    assert files(directory) == [other["name"]]
    assert sender(DATA) is None


def test_no_file_appears_after_a_sender_was_closed_by_another_thread(directory: Path) -> None:
    for _ in range(50):
        sender = ShmTensorSender(directory, 3, threshold=1)
        placing = threading.Thread(target=lambda sender=sender: [sender(DATA) for _ in range(20)])
        placing.start()
        sender.close()
        placing.join()
        assert files(directory) == []


def test_what_dead_clients_have_left_is_removed_and_nothing_else(directory: Path) -> None:
    handles = {index: take(ShmTensorSender(directory, index, threshold=1)) for index in (1, 2, 12)}
    (directory / "else").touch()
    remove_abandoned(directory, {2})
    assert files(directory) == [handles[2]["name"], "else"]
    remove_abandoned(directory / "missing", ())


def test_the_directory_is_in_shared_memory_if_that_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, run_dir = tmp_path / "shm", tmp_path / "nbe-abc"
    shared.mkdir()
    run_dir.mkdir()
    monkeypatch.setattr(shm_tensors, "SHARED_MEMORY", shared)
    created = new_tensor_dir(run_dir)
    assert created == shared / "nbe-abc"
    assert stat.S_IMODE(created.stat().st_mode) == 0o700
    # Somebody else's, from here on.
    assert new_tensor_dir(run_dir) == run_dir / "tensors"
    ShmTensorSender(run_dir / "tensors", 1)
