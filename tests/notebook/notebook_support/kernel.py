"""A real kernel, driven as a frontend drives it."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from stopping import stop

DEADLINE = 60.0
Outputs = list[dict[str, Any]]


@dataclass
class Cell:
    """A cell that runs or has run, and its outputs as the notebook would save them."""

    message_id: str
    outputs: Outputs = field(default_factory=list)
    updates: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """Time of arrival and data of each display or update."""
    reply: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def text(self) -> str:
        """All outputs in plain text."""
        return "\n".join(
            output.get("text") or output.get("data", {}).get("text/plain") or output.get("evalue", "")
            for output in self.outputs
        )

    @property
    def status(self) -> str:
        """ "ok" or "error", once it has ended."""
        return self.reply["content"]["status"]

    def take(self, message: dict[str, Any], displays: dict[str, list[dict[str, Any]]]) -> None:
        """Apply a message as a frontend does."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            last = self.outputs[-1] if self.outputs else {}
            if last.get("name") == content["name"]:
                last["text"] += content["text"]
            else:
                self.outputs.append({"kind": kind, **content})
        elif kind == "display_data":
            output = {"kind": kind, "data": content["data"]}
            self.outputs.append(output)
            displays.setdefault(content["transient"].get("display_id", ""), []).append(output)
            self.updates.append((time.monotonic(), content["data"]))
        elif kind == "update_display_data":
            for output in displays.get(content["transient"]["display_id"], []):
                output["data"] = content["data"]
            self.updates.append((time.monotonic(), content["data"]))
        elif kind in ("execute_result", "error"):
            self.outputs.append({"kind": kind, **content})


class Kernel:
    """A Python kernel with the extension loaded."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment)
        self.cells: dict[str, Cell] = {}
        self.displays: dict[str, list[dict[str, Any]]] = {}
        self.comm_messages: Callable[[dict[str, Any]], None] = lambda message: None
        """The function that gets widgets' messages."""
        self.client = self._connect()
        self.run("%load_ext nbengine")

    def _connect(self) -> BlockingKernelClient:
        client = self.manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=DEADLINE)
        return client

    def start(self, code: str) -> Cell:
        """Begin to run a cell."""
        cell = Cell(self.client.execute(code, store_history=True))
        self.cells[cell.message_id] = cell
        return cell

    def pump(self, condition: Callable[[], bool], what: str, deadline: float = DEADLINE) -> None:
        """Take messages until a condition holds."""
        end = time.monotonic() + deadline
        while not condition():
            remaining = end - time.monotonic()
            assert remaining > 0, f"{what}: not within {deadline} s"
            try:
                message = self.client.get_iopub_msg(timeout=min(remaining, 0.2))
            except Empty:
                continue
            if message["msg_type"].startswith("comm_"):
                self.comm_messages(message)
            cell = self.cells.get(message["parent_header"].get("msg_id", ""))
            if cell is None:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                cell.ended = time.monotonic()
            cell.take(message, self.displays)

    def finish(self, cell: Cell, deadline: float = DEADLINE) -> Cell:
        """Wait for the end of a cell."""
        self.pump(lambda: cell.ended > 0, "end of the cell", deadline)
        while cell.reply.get("parent_header", {}).get("msg_id") != cell.message_id:
            cell.reply = self.client.get_shell_msg(timeout=deadline)
        return cell

    def run(self, code: str, deadline: float = DEADLINE) -> Cell:
        """Run a cell that must succeed."""
        cell = self.run_any(code, deadline)
        assert cell.status == "ok", cell.outputs
        return cell

    def run_any(self, code: str, deadline: float = DEADLINE) -> Cell:
        """Run a cell that may fail."""
        return self.finish(self.start(code), deadline)

    def value(self, expression: str) -> Any:
        """The value of an expression of literals."""
        cell = self.run(f"print(repr({expression}))")
        return ast.literal_eval(cell.text.strip())

    def wait_for_text(self, cell: Cell, text: str) -> None:
        """Wait until a cell shows some text."""
        self.pump(lambda: text in cell.text or cell.ended > 0, f"text {text!r}")
        assert text in cell.text, cell.outputs

    def interrupt(self) -> None:
        """Interrupt the kernel, as the toolbar's button does."""
        self.manager.interrupt_kernel()

    def restart(self, *, now: bool = False) -> float:
        """Restart the kernel and load the extension; returns how long the old one took to end and the new to begin."""
        self.client.stop_channels()
        began = time.monotonic()
        self.manager.restart_kernel(now=now)
        took = time.monotonic() - began
        self.client = self._connect()
        self.run("%load_ext nbengine")
        return took

    def stop(self) -> None:
        """Stop the kernel's process with SIGSTOP: it does nothing more, until it is killed."""
        stop(self.manager.provisioner.pid)

    def kill(self) -> None:
        """End the kernel with SIGKILL, without a chance to say good-bye."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def close(self) -> float:
        """Shut the kernel down in good order; returns how long that took."""
        self.client.stop_channels()
        began = time.monotonic()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel()
        return time.monotonic() - began


class SharedKernel:
    """A kernel that serves one after another: to each it is as if it had just loaded the extension."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._kernel: Kernel | None = None

    def take(self) -> Kernel:
        """The kernel, with no variables and no engine."""
        if self._kernel is None:
            self._kernel = Kernel(self._environment)
        else:
            self._kernel.run("%load_ext nbengine")
        return self._kernel

    def give_back(self) -> None:
        """Detach it from its engines and forget everything; one that cannot do so is ended, and that is an error."""
        kernel, self._kernel = self._kernel, None
        assert kernel is not None
        try:
            kernel.run("%unload_ext nbengine\n%reset -f")
        except BaseException:
            kernel.kill()
            raise
        kernel.cells.clear()
        kernel.displays.clear()
        kernel.comm_messages = lambda message: None
        self._kernel = kernel

    def close(self) -> None:
        """End it in good order."""
        if self._kernel is not None:
            self._kernel.close()
