"""Bodies of HTTP requests: however they are cut, no application sees more than the limit."""

import asyncio

from starlette.types import Message, Receive, Scope, Send

from cloud.api.body_limit import BodyLimit
from tests.fuzz.choices import Choices

MOST = 1000
STATED = (b"0", b"1000", b"1001", b"-1", b"", b"\xb2", b" 5", b"9" * 5000, b"1e3")


def seeds() -> list[bytes]:
    """Stated and unstated, short and long."""
    return [bytes((0, 1, 200)), bytes((0, 2, 255)), bytes((9, *range(1, 200))), bytes((7, 1))]


def target(data: bytes) -> None:
    """The limit's answer is 413, and what the application takes is no longer than it."""
    choices = Choices(data)
    stated = choices.below(len(STATED) + 1)
    headers = [(b"content-length", STATED[stated])] if stated < len(STATED) else []
    taken, answers = 0, list[int]()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal taken
        more = True
        while more:
            message = await receive()
            taken += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        body = b"x" * (choices.byte() * choices.pick((1, 1, 10)))
        return {"type": "http.request", "body": body, "more_body": choices.more}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    scope: Scope = {"type": "http", "headers": headers, "method": "POST", "path": "/"}
    asyncio.run(BodyLimit(application, MOST)(scope, receive, send))
    assert taken <= MOST
    assert answers in ([200], [413])
