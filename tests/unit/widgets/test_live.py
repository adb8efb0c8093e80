"""An output that is replaced in place, in all cells that show it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ipykernel.zmqshell import ZMQDisplayPublisher
from jupyter_client.session import Session

from nbengine.widgets import live as live_module
from nbengine.widgets.live import LiveDisplay


class Shell:
    """A shell that keeps what is published: whether it replaces something, the data, the output's id."""

    def __init__(self) -> None:
        self.display_pub = self
        self.messages: list[tuple[bool, dict[str, Any], str]] = []

    def publish(
        self, data: dict[str, Any], metadata: object, transient: dict[str, str], *, update: bool
    ) -> None:
        del metadata
        self.messages.append((update, data, transient["display_id"]))


def test_what_is_shown_later_replaces_every_copy() -> None:
    shell: Any = Shell()
    live = LiveDisplay(shell)
    assert not live.shown
    for text, again in (("first", True), ("second", False), ("copy", True), ("last", False)):
        assert live.show({"text/plain": text}, again=again) == len(text)
    assert live.shown
    assert [(update, data["text/plain"]) for update, data, _ in shell.messages] == [
        (False, "first"),
        (True, "second"),
        (False, "copy"),
        (True, "last"),
    ]
    assert len({display_id for _, _, display_id in shell.messages}) == 1


def test_without_a_shell_each_display_is_printed_and_nothing_replaces_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = LiveDisplay(None)
    for text, again in (("first", False), ("second", False), ("copy", True)):
        live.show({"text/plain": text}, again=again)
    assert capsys.readouterr().out == "first\ncopy\n"


class Thread:
    """A kernel's thread that sends: it keeps what it is told to do, and the messages that it has sent."""

    closed = False

    def __init__(self) -> None:
        self.socket = self
        self.due: list[Callable[[], None]] = []
        self.sent: list[list[bytes]] = []

    def schedule(self, function: Callable[[], None]) -> None:
        self.due.append(function)

    def send_multipart(self, frames: list[bytes], **options: object) -> None:
        del options
        self.sent.append(frames)

    def work(self) -> None:
        due, self.due = self.due, []
        for function in due:
            function()


class Outlet:
    """The socket that a publisher has: the thread sends."""

    def __init__(self, io_thread: Thread) -> None:
        self.io_thread = io_thread

    def send_multipart(self, frames: list[bytes], **options: object) -> None:
        del options
        self.io_thread.schedule(lambda: self.io_thread.send_multipart(frames))


@pytest.fixture
def kernel() -> tuple[Any, Session, Thread]:
    """A shell with a kernel's own publisher, its session, and the thread that sends."""
    thread, session = Thread(), Session(key=b"secret")
    shown = ZMQDisplayPublisher(session=session, pub_socket=Outlet(thread))
    shown.set_parent({"header": {"msg_id": "cell", "session": "s", "msg_type": "execute_request"}})
    return SimpleNamespace(display_pub=shown), session, thread


def read(session: Session, frames: list[bytes]) -> dict[str, Any]:
    """The parts of a message that say something, its signature checked."""
    topic, parts = session.feed_identities(frames)
    message = session.deserialize(parts)
    return {
        "topic": topic,
        "type": message["header"]["msg_type"],
        **{name: message[name] for name in ("parent_header", "metadata", "content")},
    }


def test_a_replacement_is_the_message_that_the_publisher_would_send_and_waits_for_nothing(
    kernel: tuple[Any, Session, Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, session, thread = kernel
    live = LiveDisplay(shell)
    live.show({"text/plain": "first"})
    bundle, metadata = {"text/plain": "ä", "text/html": "<b>ä</b>"}, {"text/html": {"isolated": True}}
    with monkeypatch.context() as patch:
        patch.setattr(ZMQDisplayPublisher, "_flush_streams", lambda self: pytest.fail("it waits"))
        live.show(bundle, metadata)
    shell.display_pub.publish(bundle, metadata, transient=live._transient, update=True)
    thread.work()
    first, ours, theirs = (read(session, frames) for frames in thread.sent)
    assert (first["type"], ours["type"]) == ("display_data", "update_display_data")
    assert ours == theirs


def test_hooks_of_the_publisher_see_replacements(kernel: tuple[Any, Session, Thread]) -> None:
    shell, _, thread = kernel
    live = LiveDisplay(shell)
    live.show({"text/plain": "first"})
    seen: list[str] = []
    shell.display_pub.register_hook(lambda message: seen.append(message["content"]["data"]["text/plain"]))
    live.show({"text/plain": "second"})
    thread.work()
    assert seen == ["second"]
    assert len(thread.sent) == 1


def test_what_a_thread_replaces_at_once_is_sent_at_once_in_order(
    kernel: tuple[Any, Session, Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, session, thread = kernel
    monkeypatch.setattr(live_module, "_of_thread", threading.local())
    displays = [LiveDisplay(shell) for _ in range(20)]
    for live in displays:
        live.show({"text/plain": "first"})
    thread.work()
    thread.sent.clear()
    later: list[Callable[[], None]] = []
    live_module.send_together(later.append)
    for text in ("second", "third"):
        for live in displays:
            live.show({"text/plain": text})
        assert thread.due == []
        (send,) = later
        later.clear()
        send()
        assert len(thread.due) == 1
        thread.work()
    said = [read(session, frames)["content"] for frames in thread.sent]
    ids = [live._transient["display_id"] for live in displays]
    assert [(each["transient"]["display_id"], each["data"]["text/plain"]) for each in said] == [
        (display_id, text) for text in ("second", "third") for display_id in ids
    ]


def test_a_kernel_that_ends_gets_nothing_more(
    kernel: tuple[Any, Session, Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, _, thread = kernel
    monkeypatch.setattr(live_module, "_of_thread", threading.local())
    later: list[Callable[[], None]] = []
    live_module.send_together(later.append)
    live = LiveDisplay(shell)
    live.show({"text/plain": "first"})
    thread.work()
    live.show({"text/plain": "second"})
    later[0]()
    thread.closed = True
    thread.work()
    assert len(thread.sent) == 1
