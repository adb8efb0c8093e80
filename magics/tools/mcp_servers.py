"""Tools of MCP servers: programs that the notebook starts, and that tell over their standard streams what they can do.

The Model Context Protocol is spoken by the package `mcp`, the protocol's own; https://modelcontextprotocol.io has it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import shlex
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TextIO

from IPython.core.error import UsageError

from nbengine.errors import NBEngineError
from nbengine.magics.interrupts import Interrupted, interruptible
from nbengine.magics.tools.toolbox import NotebookTool
from nbengine.widgets.words import print_quietly

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

START_SECONDS = 120.0
"""Seconds that a server may take to start: the first time it may have to be installed."""
LISTING_SECONDS = 10.0
"""Seconds for which a server that runs may think about which tools it has."""
_TAIL_CHARACTERS = 2000


class McpToolError(NBEngineError):
    """A tool of an MCP server says that it has failed, or the server has ended."""


class McpServer:
    """One program, which runs until `close`, or until this process ends."""

    def __init__(self, command: str) -> None:
        """Start it.

        Raises:
            NBEngineError: it cannot be started, is no MCP server, or does not answer within `START_SECONDS`; the
                message ends with what it has written to its standard error.
        """
        self._words = shlex.split(command)
        self._begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
        self._ready: Future[Client] = Future()
        self._last_words = ""
        self._thread = threading.Thread(target=self._run, name=f"nbengine-mcp {self._words[0]}", daemon=True)
        self._thread.start()
        try:
            with interruptible():
                self._client = self._ready.result(START_SECONDS)
        except KeyboardInterrupt:
            self.close()
            raise Interrupted(f"the start of {command} was interrupted") from None
        except Exception as error:
            self.close()
            cause = (
                f"it has not answered within {START_SECONDS:g} s"
                if isinstance(error, TimeoutError)
                else error
            )
            raise NBEngineError(f"no MCP server: {command}: {cause}{self._last_words}") from error

    def tools(self) -> list[NotebookTool]:
        """Ask for its tools, whose calls are coroutines.

        Raises:
            McpToolError: the program has ended, or does not answer within `LISTING_SECONDS`.
        """
        loop, _ = self._begun.result()
        try:
            with interruptible():
                listing = asyncio.run_coroutine_threadsafe(_all_tools(self._client), loop)
                tools = listing.result(LISTING_SECONDS)
        except TimeoutError:
            raise McpToolError(f"it has not answered within {LISTING_SECONDS:g} s") from None
        return [NotebookTool(_schema(tool), self._caller(tool.name)) for tool in tools]

    def close(self) -> None:
        """End the program; another call does nothing."""
        if self._begun.exception() is None:
            loop, task = self._begun.result()
            with contextlib.suppress(RuntimeError):
                # The loop has ended by itself.
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
                self._run_with(log)
        except BaseException as error:  # noqa: BLE001 (the one who waits gets it)
            for awaited in (self._begun, self._ready):
                if not awaited.done():
                    awaited.set_exception(_first_of(error))

    def _run_with(self, log: TextIO) -> None:
        try:
            asyncio.run(self._serve(log))
        except BaseException:
            log.seek(0)
            tail = log.read()[-_TAIL_CHARACTERS:].strip()
            self._last_words = f"\nIts last words:\n{tail}" if tail else ""
            raise

    async def _serve(self, log: TextIO) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._begun.set_result((asyncio.get_running_loop(), task))
        from mcp import Client, StdioServerParameters, stdio_client

        server = StdioServerParameters(command=self._words[0], args=self._words[1:], env=dict(os.environ))
        async with Client(stdio_client(server, errlog=log)) as client:
            self._ready.set_result(client)
            await asyncio.Event().wait()

    def _caller(self, name: str) -> Any:
        async def call(arguments: Mapping[str, Any]) -> str:
            loop, _ = self._begun.result()
            answer = asyncio.run_coroutine_threadsafe(self._called(name, arguments), loop)
            return await asyncio.wrap_future(answer)

        return call

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError

        try:
            result = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            raise McpToolError(str(error)) from error
        text = _text_of(result)
        if result.is_error:
            raise McpToolError(text)
        return text


class McpServers:
    """The MCP servers of a notebook by their commands; each is started once."""

    def __init__(self) -> None:
        self._servers: dict[str, McpServer] = {}
        atexit.register(self.close)

    def tools(self, commands: Sequence[str]) -> list[NotebookTool]:
        """Return the tools of servers, which are started where they do not run.

        Raises:
            UsageError: the package `mcp` is not installed, or a command cannot be read.
            NBEngineError: a server cannot be started.
        """
        if commands and importlib.util.find_spec("mcp") is None:
            raise UsageError("%chat: --mcp needs the package mcp: pip install 'nbengine[mcp]'")
        return [tool for command in commands for tool in self._tools_of(command)]

    def close(self) -> None:
        """End all servers."""
        atexit.unregister(self.close)
        while self._servers:
            self._servers.popitem()[1].close()

    def _tools_of(self, command: str) -> list[NotebookTool]:
        try:
            is_empty = not shlex.split(command)
        except ValueError as error:
            raise UsageError(f"%chat: --mcp {command}: {error}") from None
        if is_empty:
            raise UsageError("%chat: --mcp needs the command that starts a server")
        if command in self._servers:
            try:
                return self._servers[command].tools()
            except McpToolError:
                # It has ended, so that another one has to be started.
                self._servers.pop(command).close()
        print_quietly(f"starting {command}")
        self._servers[command] = server = McpServer(command)
        return server.tools()


def _schema(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


async def _all_tools(client: Client) -> list[Tool]:
    from mcp import MCPError
    from mcp.types import PaginatedRequestParams

    try:
        # The session asks, where the client may know an earlier answer.
        page = await client.session.list_tools()
        tools = list(page.tools)
        while page.next_cursor is not None:
            page = await client.session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
            tools += page.tools
    except MCPError as error:
        raise McpToolError(str(error)) from error
    return tools


def _text_of(result: CallToolResult) -> str:
    """Join the texts of a result; other contents are named by kind."""
    return "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)


def _first_of(error: BaseException) -> BaseException:
    """Return the first error of nested groups."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
