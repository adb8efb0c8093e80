"""The file at which workers meet is gone when the last of them has left, however many leave at a time."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nbengine.distributed import rendezvous
from nbengine.distributed.layout import RankLayout
from nbengine.distributed.rendezvous import Party, Rendezvous

SIZE = 3


def meet(place: Path, rank: int) -> Rendezvous:
    layout = RankLayout(rank, SIZE, 0, 1, 0, 1)
    return Rendezvous(f"file://{place}", Party.of_workers(layout), "engine", 30.0)


def test_nothing_is_left_however_members_leave(tmp_path: Path) -> None:
    with ThreadPoolExecutor(SIZE) as pool:
        for number in range(40):
            members = list(
                pool.map(lambda rank, place=tmp_path / f"{number}": meet(place, rank), range(SIZE))
            )
            assert [each.name for each in tmp_path.iterdir()] == [f"{number}"]
            list(pool.map(Rendezvous.leave, members))
            assert list(tmp_path.iterdir()) == []


def test_members_leave_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's lock is held by somebody who leaves: each of the others has been refused, and waits for it."""
    refused, all_refused, flock = set(), threading.Event(), fcntl.flock

    def noted(folder: int, operation: int) -> None:
        try:
            flock(folder, operation)
        except BlockingIOError:
            refused.add(threading.get_ident())
            if len(refused) == SIZE:
                all_refused.set()
            raise

    monkeypatch.setattr(rendezvous, "_TURN_SECONDS", 120.0)
    with ThreadPoolExecutor(SIZE) as pool:
        members = list(pool.map(lambda rank: meet(tmp_path / "place", rank), range(SIZE)))
        folder = os.open(tmp_path, os.O_RDONLY)
        flock(folder, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", noted)
        leaving = [pool.submit(member.leave) for member in members]
        try:
            assert all_refused.wait(60)
            assert not any(each.done() for each in leaving)
            assert (tmp_path / "place").exists()
        finally:
            os.close(folder)
        for each in leaving:
            each.result(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_a_stranger_holds_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_TURN_SECONDS", 0.05)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with ThreadPoolExecutor(SIZE) as pool:
            members = list(pool.map(lambda rank: meet(tmp_path / "place", rank), range(SIZE)))
        for member in members:
            member.leave()
    finally:
        os.close(folder)
    assert list(tmp_path.iterdir()) == []
