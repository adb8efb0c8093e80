"""The orders that spare processes wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbengine.runtime.spare import CoreOrder, HostOrder, await_order, give_order

WAIT = """
import os
from nbengine.runtime.spare import CoreOrder, await_order
print(await_order(0, CoreOrder))
os.write(2, b"an error of a library\\n")
"""


def test_a_process_reads_its_order_and_writes_to_the_log_from_then_on(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("before\n")
    order = CoreOrder(run_dir="/run/x", log_path=str(log), rank=3, secret=bytes(range(16)))
    reader, line = os.pipe()
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=reader, stdout=subprocess.PIPE) as process:
        os.close(reader)
        give_order(line, order)
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b""
    os.close(line)
    assert sorted(log.read_text().splitlines()) == sorted(["before", repr(order), "an error of a library"])


def test_the_end_of_the_line_is_no_order() -> None:
    reader, line = os.pipe()
    os.close(line)
    assert await_order(reader, HostOrder) is None
    os.close(reader)


def test_an_order_may_come_in_parts(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.touch()
    order = CoreOrder(run_dir="/run/x", log_path=str(log), rank=0, secret=b"s" * 16)
    whole, line = os.pipe()
    give_order(line, order)
    content = os.read(whole, 4096)
    theirs, parts = os.pipe()
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=theirs) as process:
        os.close(theirs)
        for byte in content:
            os.write(parts, bytes([byte]))
        assert process.wait(60) == 0
    for descriptor in (whole, line, parts):
        os.close(descriptor)
    assert repr(order) in log.read_text()


def test_an_order_for_which_a_pipe_may_have_no_room_is_refused() -> None:
    reader, line = os.pipe()
    with pytest.raises(OSError, match="is longer than 4096"):
        give_order(line, HostOrder("/" + "x" * 4096, "/log", bound=False))
    for descriptor in (reader, line):
        os.close(descriptor)


def test_an_order_to_a_process_that_has_ended_is_an_error() -> None:
    reader, line = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        give_order(line, HostOrder("/run/x", "/log", bound=True))
    os.close(line)
