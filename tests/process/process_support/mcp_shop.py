"""An MCP server with a shop's tools, for the tests of `%%chat --mcp`."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    """Tell the price of an item."""
    return f"{item}: 3 euros"


@server.tool()
def burn() -> str:
    """End the shop."""
    os._exit(3)


if "--broken" in sys.argv:
    sys.exit("the shop is closed")
server.run("stdio")
