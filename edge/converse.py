"""Runs a source against a conversation: revise as words come, reply at the end, barge-in."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from edge.reply import Reply
from edge.sources import Source
from edge.talk import Talk
from shared.errors import TurnError


@dataclass(frozen=True, slots=True)
class Observer:
    """What an application may want to see. All calls are made in the event loop."""

    on_text: Callable[[str], None] = lambda _text: None
    """The turn's text so far, once it was relayed."""
    on_piece: Callable[[str], None] = lambda _piece: None
    """A piece of the reply."""
    on_reply: Callable[[str, Reply], None] = lambda _text, _reply: None
    """The turn's text and its reply, when the reply is over (or was interrupted)."""
    on_error: Callable[[TurnError], None] = lambda _error: None
    """A turn could not be answered; the conversation goes on."""


async def converse(
    talk: Talk, source: Source, observer: Observer, *, whole: bool = False, overlap: bool = False
) -> None:
    """Hold a conversation until the source is exhausted.

    Args:
        whole: send every turn only at its end, as systems without a relay do.
        overlap: go on reading the source while a reply is given, so that new words interrupt it;
            otherwise the source waits for the reply.

    Raises:
        DeltarelayError: the conversation cannot go on, whether or not anybody speaks.
    """
    following = asyncio.create_task(
        _follow(talk, source, observer, whole=whole, overlap=overlap), name="follow"
    )
    watching = asyncio.create_task(talk.watch(), name="watch")
    try:
        await asyncio.wait((following, watching), return_when=asyncio.FIRST_COMPLETED)
        await (following if following.done() else watching)
    finally:
        for task in (following, watching):
            task.cancel()
        await asyncio.gather(following, watching, return_exceptions=True)


async def _follow(
    talk: Talk, source: Source, observer: Observer, *, whole: bool, overlap: bool
) -> None:
    """Revise as words come, reply at the end of turns."""
    speaking: asyncio.Task[None] | None = None
    async for reading in source.readings():
        if speaking is not None and not overlap:
            await speaking
            speaking = None
        if not reading.ended:
            if not whole:
                await talk.revise(reading.text, reading.stable or None)
            observer.on_text(reading.text)
            continue
        if speaking is not None and not speaking.done() and whole:
            await talk.revise("")  # interrupts
        pieces = talk.finish(reading.text)
        assert talk.reply is not None
        speaking = asyncio.create_task(
            _speak(pieces, talk.reply, reading.text, observer), name="reply"
        )
    if speaking is not None:
        await speaking


async def _speak(
    pieces: AsyncGenerator[str, None], reply: Reply, text: str, observer: Observer
) -> None:
    try:
        async for piece in pieces:
            observer.on_piece(piece)
    except TurnError as error:
        observer.on_error(error)
    observer.on_reply(text, reply)
