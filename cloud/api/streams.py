"""Answers that end their work when nobody is there to hear them any more."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client hung up before its answer was ready."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` does; cancel it when the client hangs up.

    Raises:
        ClientGoneError: it did.
    """
    working = asyncio.create_task(work, name="answer")
    watching = asyncio.create_task(_hang_up(receive), name="client")
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, each as it comes.

    Args:
        close: called at the end, or when the client hangs up, whatever came of the events.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await unless_gone(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            try:
                await self._events.aclose()
            finally:
                self._close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for event in self._events:
            body = b"data: " + event + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _hang_up(receive: Receive) -> None:
    """Return when the client has hung up; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
