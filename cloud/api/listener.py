"""Serves the API on the decoder's own event loop, with uvicorn."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from shared.errors import ConfigError, LinkError

_CLOSE_WITHIN = 2
"""Seconds that answers under way get when the decoder stops."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the decoder's own."""
        yield


class HttpListener:
    """Listens at one address.

    Raises:
        ConfigError: the address is not host:port.
        LinkError: it cannot be listened at.
    """

    def __init__(self, app: ASGIApp, address: str) -> None:
        self._socket = _bind(address)
        host, port = self._socket.getsockname()[:2]
        self.name = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # they would let clients choose who they are
            timeout_graceful_shutdown=_CLOSE_WITHIN,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve."""
        serving = self._server.serve(sockets=[self._socket])
        self._serving = asyncio.create_task(serving, name="http")

    async def close(self) -> None:
        """Let answers under way end, for a moment, then hang up."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"http = {address!r}: expected host:port, like 127.0.0.1:8000")
    host = host.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, int(port)))
        made.listen()  # who connects before uvicorn is ready waits
    except OSError as error:
        made.close()
        raise LinkError(f"http = {address!r}: {error.strerror}; choose another port") from None
    return made
