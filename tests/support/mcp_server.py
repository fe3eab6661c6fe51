"""A server of the Model Context Protocol: on its standard input, or on the port that is given."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("numbers")
TOTAL = [0]


@server.tool()
def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def remember(number: int) -> str:
    """Adds a number to those of this session.

    Only a server that has one session knows.
    """
    TOTAL[0] += number
    return f"{TOTAL[0]} {os.environ.get('NUMBERS_UNIT', '')}"


@server.tool()
def fail() -> str:
    """Raises."""
    raise KeyError("no such thing")


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(1000)
    return "late"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
