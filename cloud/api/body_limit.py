"""Bodies have a bound: nobody can fill the decoder's memory with a request."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloud.api.errors import ApiError

_DIGITS = 19
"""Most digits of a length that is read at all: 64 bits have no more."""


class BodyLimit:
    """Answers 413 to requests whose body is longer than `most` bytes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if not stated.isdigit() or len(stated) > _DIGITS or int(stated) > self._most:
            await self._refuse(scope, receive, send)
            return
        got, answered = 0, False

        async def count() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._most:
                raise _TooLongError
            return message

        async def note(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, count, note)
        except _TooLongError:
            if not answered:
                await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(413, f"the body has more than {self._most} bytes; send less at a time")
        await error.response()(scope, receive, send)


class _TooLongError(BaseException):
    """More came than was stated; not for the application to catch."""
