"""An output that is replaced in place, in all cells that show it."""

from __future__ import annotations

from typing import Any

import pytest

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
