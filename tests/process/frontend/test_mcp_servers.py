"""MCP servers, real programs: their tools are called, and they end with what has started them."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from IPython.core.error import UsageError

from nbengine.errors import NBEngineError
from nbengine.magics.generation.waiting import awaited_elsewhere, without_a_loop
from nbengine.magics.tools.mcp_servers import McpServers, McpToolError
from nbengine.magics.tools.toolbox import NotebookTool, Toolbox

SHOP = shlex.join([sys.executable, str(Path(__file__).parents[1] / "process_support" / "mcp_shop.py")])

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def servers() -> Iterator[McpServers]:
    made = McpServers()
    yield made
    made.close()


def shops() -> list[psutil.Process]:
    """Return the servers that are children of this process."""
    return [child for child in psutil.Process().children() if "mcp_shop" in " ".join(child.cmdline())]


async def test_tools_are_described_and_called_until_their_server_ends_and_then_again(
    servers: McpServers,
) -> None:
    toolbox = Toolbox(servers.tools([SHOP]))
    function = toolbox.schemas[0]["function"]
    assert (function["name"], function["description"]) == ("price", "Tell the price of an item.")
    assert list(function["parameters"]["properties"]) == ["item"]
    price = toolbox.find("price")
    assert await price.call('{"item": "pear"}') == "pear: 3 euros"
    with pytest.raises(McpToolError):
        await price.call('{"thing": 1}')
    await check_a_call_that_is_given_up(price)
    check_a_call_without_a_loop(price)
    # The same command is the same program.
    servers.tools([SHOP])
    assert len(shops()) == 1
    with pytest.raises(McpToolError):
        await toolbox.find("burn").call("{}")
    with pytest.raises(McpToolError):
        await price.call('{"item": "pear"}')
    again = Toolbox(servers.tools([SHOP]))
    assert await again.find("price").call('{"item": "fig"}') == "fig: 3 euros"
    servers.close()
    assert shops() == []


async def check_a_call_that_is_given_up(price: NotebookTool) -> None:
    task = asyncio.ensure_future(price.call('{"item": "pear"}'))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await price.call('{"item": "fig"}') == "fig: 3 euros"


def check_a_call_without_a_loop(price: NotebookTool) -> None:
    async def call() -> bool:
        return await awaited_elsewhere(price.call('{"item": "pear"}')) == "pear: 3 euros"

    assert without_a_loop(call())


def test_what_is_no_server_says_why(servers: McpServers) -> None:
    with pytest.raises(NBEngineError, match="no MCP server") as raised:
        servers.tools([SHOP + " --broken"])
    assert "the shop is closed" in str(raised.value)
    with pytest.raises(NBEngineError, match="no MCP server: /no/such/program"):
        servers.tools(["/no/such/program"])
    with pytest.raises(UsageError, match="No closing quotation"):
        servers.tools(["'open"])
    with pytest.raises(UsageError, match="needs the command that starts a server"):
        servers.tools([" "])
    assert shops() == []


def test_a_server_that_finds_no_room_for_its_last_words_says_so_at_once(
    servers: McpServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(tempfile, "TemporaryFile", refuse)
        with pytest.raises(NBEngineError, match=r"no MCP server: .*No space left on device"):
            servers.tools([SHOP])
    assert {tool.name for tool in servers.tools([SHOP])} >= {"price", "burn"}
