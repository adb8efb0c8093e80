"""The browser's end of a widget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from notebook_support.kernel import DEADLINE, Kernel

from tests.unit.widgets.frame_decoder import FrameDecoder

VIEW = "application/vnd.jupyter.widget-view+json"


def model_of(output: dict[str, Any]) -> str:
    """The widget that a cell's output shows."""
    model_id: str = output["data"][VIEW]["model_id"]
    return model_id


def subshell_of(kernel: Kernel) -> str | None:
    """Make a subshell, to which JupyterLab sends widgets' messages beside the cell that runs; None without
    such."""
    client = kernel.client
    info = client.kernel_info(reply=True, timeout=DEADLINE)["content"]
    if "kernel subshells" not in info.get("supported_features", []):
        return None
    request = client.session.msg("create_subshell_request", {})
    client.control_channel.send(request)
    reply = client.get_control_msg(timeout=DEADLINE)
    assert reply["parent_header"]["msg_id"] == request["header"]["msg_id"]
    subshell_id: str = reply["content"]["subshell_id"]
    return subshell_id


class Browser:
    """A browser's side of a widget: it gets and sends messages, on a subshell if there is one."""

    def __init__(self, kernel: Kernel, model_id: str, subshell_id: str | None = None) -> None:
        self.kernel = kernel
        self.model_id = model_id
        self.subshell_id = subshell_id
        self.decoder = FrameDecoder()
        self.num_resets = 0
        self.answers: list[dict[str, Any]] = []
        self.closed = False
        kernel.comm_messages = self._take

    def say(self, **content: object) -> None:
        client = self.kernel.client
        data = {"method": "custom", "content": content}
        message = client.session.msg("comm_msg", {"comm_id": self.model_id, "data": data})
        if self.subshell_id is not None:
            message["header"]["subshell_id"] = self.subshell_id
        client.shell_channel.send(message)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        self.kernel.pump(condition, "message of the widget")

    def row(self, request_id: str) -> dict[str, Any] | None:
        """Find a request's row in the table."""
        rows = self.decoder.requests
        return next((row for row in rows if row["id"].startswith(request_id)), None)

    def running_row(self, after: int = -1) -> dict[str, Any]:
        """Wait until a request with a greater number than `after` writes; what the table says of it."""

        def find() -> dict[str, Any] | None:
            later = (row for row in self.decoder.requests if row["number"] > after)
            running = (row for row in later if row["state"] == "running")
            return next((row for row in running if row["num_output_tokens"] > 5), None)

        self.wait_for(lambda: find() is not None)
        row = find()
        assert row is not None
        return row

    def _take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if content.get("comm_id") != self.model_id:
            return
        if message["msg_type"] == "comm_close":
            self.closed = True
        elif content["data"].get("method") == "custom":
            said = content["data"]["content"]
            if said["kind"] == "frame":
                self.num_resets += said["reset"]
                self.decoder.take(said, [bytes(buffer) for buffer in message["buffers"]])
            else:
                self.answers.append(said)
