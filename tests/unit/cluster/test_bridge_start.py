"""The bridge starts without what only Ray's own checks of addresses would use."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from nbengine.runtime.processes import engine_command

pytest.importorskip("ray", reason="Ray is not installed")


def test_it_does_not_wait_for_the_grammar_of_international_addresses(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "rfc3987_syntax.py").write_text(f"open({str(imported)!r}, 'w').close()\nraise ImportError\n")
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        # Its owner is gone: it imports everything, and ends.
        subprocess.run(
            engine_command("bridge", str(theirs.fileno()), "tested"),
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            pass_fds=(theirs.fileno(),),
            check=True,
        )
    assert not imported.exists()
