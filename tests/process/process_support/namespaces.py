"""Two machines, as far as a kernel can pretend them: network namespaces joined by a cable.

What runs on `there` has pids of its own, too, and does not see the directories it is told to hide.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from process_support.engine_under_test import SUPPORT_PATH

FAR_CLIENT = Path(__file__).with_name("far_client.py")


def why_not() -> str:
    """Say what keeps this machine from having network namespaces; an empty text if nothing does."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"nbx{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    cable = ["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    strung = subprocess.run(cable, capture_output=True, text=True, check=False)
    inside = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount", "--mount-proc", "true"]
    entered = subprocess.run(inside, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=True)
    failed = strung if strung.returncode else entered
    return f"no network namespaces here: {failed.stderr.strip()}" if failed.returncode else ""


class TwoMachines:
    """Namespaces `here` and `there` with an address each. `close` removes them, whatever runs there."""

    def __init__(self) -> None:
        token = secrets.token_hex(3)
        self.here, self.there = f"nbx{token}a", f"nbx{token}b"
        self._ends = (f"v{token}a", f"v{token}b")
        # Set aside for tests of networks (RFC 2544).
        net = f"198.18.{secrets.randbelow(256)}"
        self.here_address, self.there_address = f"{net}.1", f"{net}.2"
        self.clients: list[FarClient] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for name in (self.here, self.there):
            _ip("netns", "add", name)
        a, b = self._ends
        _ip("-n", self.here, "link", "add", a, "type", "veth", "peer", "name", b, "netns", self.there)
        ends = ((self.here, a, self.here_address), (self.there, b, self.there_address))
        for name, end, address in ends:
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def on_here(self) -> list[str]:
        """Return the beginning of a command that runs here."""
        return ["ip", "netns", "exec", self.here]

    def pull_cable(self) -> None:
        _ip("-n", self.here, "link", "set", self._ends[0], "down")

    def plug_cable(self) -> None:
        _ip("-n", self.here, "link", "set", self._ends[0], "up")

    def client(self, connection_file: Path, home: Path, hidden: Sequence[Path]) -> FarClient:
        """A client there, with a copy of a connection file; its own files are in `home`."""
        self.clients.append(FarClient(self.there, connection_file, home, hidden))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        present = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split()
        for name in {self.here, self.there} & set(present):
            _ip("netns", "del", name)


class FarClient:
    """`far_client.py` in a namespace. `hear` gives what it says, a message a time."""

    def __init__(self, namespace: str, connection_file: Path, home: Path, hidden: Sequence[Path]) -> None:
        home.mkdir(mode=0o700)
        copy = home / "copied.json"
        shutil.copyfile(connection_file, copy)
        copy.chmod(0o600)
        self.errors = open(home / "stderr", "w+")  # noqa: SIM115
        hide = " && ".join(f"mount -t tmpfs none {path}" for path in hidden)
        self.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", namespace),
                *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"),
                *("sh", "-c", f'{hide} && exec "$@"', "sh"),
                *(sys.executable, str(FAR_CLIENT), str(copy)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"PYTHONPATH": SUPPORT_PATH, "NBENGINE_RUNTIME_DIR": str(home)},
        )
        self._kept: list[dict] = []

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def hear(self, name: str | None = None, **wanted: object) -> dict:
        """The next message about `name` or, without one, with these keys; others are kept for later."""
        assert self.process.stdout is not None
        keys = {"name": name} if name is not None else wanted
        while True:
            for message in self._kept:
                if all(key in message and value in (..., message[key]) for key, value in keys.items()):
                    self._kept.remove(message)
                    return message
            line = self.process.stdout.readline()
            assert line, f"the client there has ended: {self.stderr()}"
            self._kept.append(json.loads(line))

    def collect(self, name: str) -> tuple[list[int], dict]:
        """All tokens of a request, and its last message."""
        tokens: list[int] = []
        while True:
            message = self.hear(name)
            if "tokens" not in message:
                return tokens, message
            tokens += message["tokens"]

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        end = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
