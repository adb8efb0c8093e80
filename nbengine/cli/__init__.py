"""The command `nbengine`: its parser and short commands (`command`), engines that stay (`staying`), conversations
(`chatting`)."""

from nbengine.cli.command import main

__all__ = ["main"]
