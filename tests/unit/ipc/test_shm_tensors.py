"""Tensors through files in shared memory: both ends, and everything a handle may not reach."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.errors import NBEngineError, WireError
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.shm_tensors import ShmTensorReceiver, ShmTensorSender, remove_abandoned
from tests.support.thorough import amount

CAPACITY = 64 << 10
DATA = memoryview(bytes(range(256)) * 16)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "tensors"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def sender(directory: Path) -> Iterator[ShmTensorSender]:
    sender = ShmTensorSender(directory, 7, threshold=1000, capacity=CAPACITY)
    yield sender
    sender.close()


@pytest.fixture
def receiver(directory: Path) -> ShmTensorReceiver:
    return ShmTensorReceiver(directory)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def take(sender: ShmTensorSender, data: memoryview = DATA) -> dict[str, Any]:
    handle = sender(data)
    assert handle is not None
    return handle


def test_a_tensor_comes_back_equal_from_a_private_file_that_goes_with_its_sender(
    directory: Path, sender: ShmTensorSender, receiver: ShmTensorReceiver
) -> None:
    tensors = [torch.randn(50, 40), torch.arange(3000)]
    frames = MsgpackEncoder(oob_tensor_consumer=sender).encode(tensors)
    assert len(frames) == 1
    assert len(bytes(frames[0])) < 300
    (name,) = files(directory)
    assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    back = MsgpackDecoder(oob_tensor_provider=receiver).decode(frames)
    assert all(map(torch.equal, back, tensors))
    sender.close()
    sender.close()
    assert files(directory) == []
    assert sender(DATA) is None


def test_what_is_small_is_left_in_the_message(directory: Path, sender: ShmTensorSender) -> None:
    assert sender(DATA[:999]) is None
    assert files(directory) == []


def test_names_cannot_be_guessed_from_one_another(directory: Path) -> None:
    names = []
    for _ in range(20):
        sender = ShmTensorSender(directory, 7, threshold=1)
        names.append(take(sender)["name"])
        sender.close()
    assert len({name[:20] for name in names}) == 20
    assert all(name.startswith("7-") and len(name) == 34 for name in names)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=60), st.integers(0, 2**32))
@settings(max_examples=amount(20, thorough=2000), deadline=None)
def test_slots_are_reused_in_any_order_of_reception_and_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("arena")
    directory.chmod(0o700)
    sender = ShmTensorSender(directory, 1, threshold=1, capacity=CAPACITY)
    receiver = ShmTensorReceiver(directory)
    chooser = random.Random(seed)
    held: list[tuple[dict[str, Any], bytes]] = []
    for size, gap in steps:
        data = chooser.randbytes(size * 997)
        handle = sender(memoryview(data))
        if handle is not None:
            held.append((handle, data))
        else:
            # There may be gaps that a ring cannot use, but never half of the arena.
            assert sum(len(data) for _, data in held) + len(data) > CAPACITY // 4
        while held and len(held) > gap % 8:
            handle, expected = held.pop(chooser.randrange(len(held)))
            assert receiver(len(expected), handle) == expected
    for handle, expected in held:
        assert receiver(len(expected), handle) == expected
    assert sender(memoryview(bytes(CAPACITY - 64))) is not None
    sender.close()


def test_memory_is_taken_as_it_is_needed_and_used_again(
    directory: Path, sender: ShmTensorSender, receiver: ShmTensorReceiver
) -> None:
    for _ in range(50):
        receiver(len(DATA), take(sender))
    (name,) = files(directory)
    assert (directory / name).stat().st_blocks * 512 <= 2 * len(DATA)


@pytest.mark.parametrize("function", ["posix_fallocate", "ftruncate", "open"])
def test_without_room_the_message_carries_the_tensor_and_no_memory_is_touched(
    directory: Path, sender: ShmTensorSender, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tensor = torch.arange(1000)
    encoder = MsgpackEncoder(oob_tensor_consumer=sender)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        frames = encoder.encode(tensor)
    assert len(frames) == 2
    assert torch.equal(MsgpackDecoder().decode(frames), tensor)
    assert all((directory / name).stat().st_blocks == 0 for name in files(directory))
    assert len(encoder.encode(tensor)) == 1


def test_what_is_larger_than_the_arena_is_left_in_the_message(sender: ShmTensorSender) -> None:
    assert sender(memoryview(bytes(CAPACITY - 63))) is None
    assert sender(memoryview(bytes(CAPACITY - 64))) is not None
    assert sender(DATA) is None


def test_a_message_that_cannot_be_encoded_leaves_its_slots_free(sender: ShmTensorSender) -> None:
    encoder = MsgpackEncoder(oob_tensor_consumer=sender)
    for _ in range(10):
        with pytest.raises(WireError):
            encoder.encode([torch.zeros(4096), object()])
    assert take(sender)["offset"] == 0


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


GOOD = {"name": "7-" + "0" * 32, "offset": 0, "ticket": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"name": ""},
        {"name": "../secret"},
        {"name": "/etc/passwd"},
        {"name": "secret"},
        {"name": "7-" + "0" * 31},
        {"name": "7-" + "0" * 32 + "\n"},
        {"name": "7-" + "G" * 32},
        {"name": "٧-" + "0" * 32},
        {"offset": -64},
        {"offset": 1},
        {"offset": "0"},
        {"ticket": 0},
        {"ticket": -1},
        {"ticket": 2**63},
        {"path": "x"},
    ],
    ids=str,
)
def test_what_is_no_handle_reads_and_changes_nothing(
    directory: Path, receiver: ShmTensorReceiver, change: dict[str, Any]
) -> None:
    content = (1).to_bytes(8, "little") + bytes(120)
    paths = [directory.parent / "secret", directory / "secret", directory / GOOD["name"]]
    for path in paths:
        path.write_bytes(content)
    with pytest.raises(WireError, match="not a handle"):
        receiver(64, GOOD | change)
    receiver.discard(GOOD | change)
    with pytest.raises(WireError, match="not a handle"):
        receiver(64, {key: value for key, value in GOOD.items() if key != "ticket"})
    assert [path.read_bytes() for path in paths] == [content] * 3


def test_what_a_good_name_stands_for_must_be_a_plain_file_of_this_users(
    directory: Path, receiver: ShmTensorReceiver
) -> None:
    secrets = [directory.parent / "secret", directory.parent / "other"]
    for secret in secrets:
        secret.write_bytes((1).to_bytes(8, "little") + bytes(120))
    symlink, hardlink, fifo, folder, missing = (directory / f"7-{number:032x}" for number in range(5))
    symlink.symlink_to(secrets[0])
    hardlink.hardlink_to(secrets[1])
    os.mkfifo(fifo)
    folder.mkdir()
    for path in (symlink, hardlink, fifo, folder, missing):
        with pytest.raises(WireError, match="cannot be read"):
            receiver(64, GOOD | {"name": path.name})
        receiver.discard(GOOD | {"name": path.name})
    for secret in secrets:
        assert secret.read_bytes() == (1).to_bytes(8, "little") + bytes(120)


def test_a_slot_is_read_within_its_file_with_its_ticket_and_once(
    directory: Path, sender: ShmTensorSender, receiver: ShmTensorReceiver
) -> None:
    handle = take(sender)
    for num_bytes in (0, -1, CAPACITY - 63, 2**62):
        with pytest.raises(WireError, match=f"no arena with {num_bytes} bytes"):
            receiver(num_bytes, handle)
    for change in ({"ticket": 2}, {"offset": 64}):
        with pytest.raises(WireError, match="ticket"):
            receiver(len(DATA), handle | change)
        receiver.discard(handle | change)
    for outside in (CAPACITY, 2**62):
        with pytest.raises(WireError, match="no arena"):
            receiver(len(DATA), handle | {"offset": outside})
    assert receiver(len(DATA), handle) == DATA
    with pytest.raises(WireError, match="ticket"):
        receiver(len(DATA), handle)
    taken_back = take(sender)
    receiver.discard(taken_back)
    with pytest.raises(WireError, match="ticket"):
        receiver(len(DATA), taken_back)
    cut_short = take(sender)
    os.truncate(directory / cut_short["name"], cut_short["offset"] + 100)
    with pytest.raises(WireError, match="no arena"):
        receiver(len(DATA), cut_short)


@given(
    st.fixed_dictionaries(
        {"name": st.text() | st.just(GOOD["name"]), "offset": st.integers(), "ticket": st.integers()},
        optional={"more": st.integers()},
    )
    | st.dictionaries(st.text(), st.none() | st.floats() | st.binary(), max_size=3)
)
@settings(max_examples=amount(40, thorough=6000), deadline=None)
def test_random_handles_are_wire_errors(
    tmp_path_factory: pytest.TempPathFactory, handle: dict[str, Any]
) -> None:
    receiver = ShmTensorReceiver(tmp_path_factory.getbasetemp())
    with pytest.raises(WireError):
        receiver(10, handle)
    receiver.discard(handle)


def test_no_file_appears_after_a_sender_was_closed_by_another_thread(directory: Path) -> None:
    for _ in range(50):
        sender = ShmTensorSender(directory, 3, threshold=1)
        placing = threading.Thread(target=lambda sender=sender: [sender(DATA) for _ in range(20)])
        placing.start()
        sender.close()
        placing.join()
        assert files(directory) == []


def test_what_dead_clients_have_left_is_removed_and_nothing_else(directory: Path) -> None:
    senders = {index: ShmTensorSender(directory, index, threshold=1) for index in (1, 2, 12)}
    handles = {index: take(sender) for index, sender in senders.items()}
    (directory / "else").touch()
    remove_abandoned(directory, {2})
    assert files(directory) == [handles[2]["name"], "else"]
    remove_abandoned(directory / "missing", ())
    for sender in senders.values():
        sender.close()
    assert files(directory) == ["else"]
