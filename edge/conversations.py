"""The conversations of one agent: who has them, what is on disk of them, who is told what."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from edge.spool import Kept, Moment, Recorder, Spool
from edge.talk import Talk
from shared.errors import (
    ConfigError,
    ContextLengthError,
    DeltarelayError,
    ModelError,
    RemoteProtocolError,
)
from shared.frames import OpenBody
from shared.session import EdgeSession, EdgeStream, Finished, Noticed, Refused, Replied
from shared.tokenizer import Tokenizer

GOODBYE = 0.5
"""Seconds a closing conversation waits for the decoder to confirm."""


@dataclass(slots=True, eq=False)
class Entry:
    """A conversation."""

    name: str
    stream: EdgeStream
    recorder: Recorder | None
    """Keeps it on disk; None: nothing does."""
    talk: Talk | None = None
    """What the application has of it; None: nothing now."""
    refused: bool = False
    """The decoder will not go on with it: whoever enters it again begins another one, with this
    history."""


class Conversations:
    """All conversations of one session.

    What comes for an application is told when it is on disk, in the order in which it came.

    Args:
        pump: sends what the session owes.
    """

    def __init__(self, session: EdgeSession, spool: Spool | None, pump: Callable[[], None]) -> None:
        self._session, self._spool, self._pump = session, spool, pump
        self._loop = asyncio.get_running_loop()
        self._entries: dict[int, Entry] = {}
        """By stream number."""
        for name, kept in list(spool.kept.items()) if spool is not None else ():
            self._add(name, kept.body, kept)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def idle(self) -> list[str]:
        """Names of those that nobody has now."""
        return sorted(entry.name for entry in self._entries.values() if entry.talk is None)

    def enter(self, name: str, body: OpenBody, tokenizer: Tokenizer) -> Entry:
        """Give the application the conversation of this name, begun now if there is none.

        Raises:
            ConfigError: the application has it already.
        """
        entry = self._find(name, body) or self._add(name or body.conversation, body)
        recorder, waited, unread = entry.recorder, 0.0, False
        if recorder is not None:
            waited = recorder.ended.age() if recorder.ended is not None else 0.0
            unread, recorder.unread = recorder.unread, False
            recorder.claim()
        entry.talk = Talk(
            entry.stream,
            tokenizer,
            lambda urgent: self.touch(entry, urgent=urgent),
            waited=waited,
            unread=unread,
        )
        self.touch(entry)
        return entry

    async def leave(self, entry: Entry, *, keep: bool) -> None:
        """The application has left it: say goodbye, or keep it for the next one."""
        talk, entry.talk = entry.talk, None
        if talk is not None:
            talk.close()
        if not keep:
            await self._say_goodbye(entry)
        elif entry.recorder is not None:
            entry.recorder.release()

    def touch(self, entry: Entry, *, urgent: bool = False) -> None:
        """It has changed: tell the decoder, then the disk."""
        self._session.touch(entry.stream, time.monotonic(), urgent=urgent)
        self._pump()
        if entry.recorder is not None:
            entry.recorder.record(sync=entry.stream.ended)

    def follow(self, event: Replied | Finished | Noticed | Refused) -> None:
        """Something came from the decoder."""
        entry = self._entries.get(event.stream)
        if entry is None:
            return
        talk = entry.talk
        match event:
            case Replied(_, ids):
                tell = partial(talk.replied, talk.reply, ids) if talk is not None else _nobody
                self._when_kept(entry, tell)
            case Finished(_, turn, reason):
                tell = partial(talk.finished, turn, reason) if talk is not None else _nobody
                if entry.recorder is not None:
                    entry.recorder.unread = talk is None
                self._when_kept(entry, partial(self._finished, entry, tell), sync=True)
            case Noticed(_, topic, text) if talk is not None:
                talk.noticed(topic, text)
            case Refused():
                entry.refused = True
                if talk is not None:
                    talk.failed(_refusal(event))
            case _:
                pass

    def fail(self, error: DeltarelayError) -> None:
        """No decoder will be reached any more."""
        for entry in self._entries.values():
            if entry.talk is not None:
                entry.talk.failed(error)

    def rewrite(self) -> None:
        """What was on disk may be gone: write all of it."""
        for entry in self._entries.values():
            if entry.recorder is not None:
                entry.recorder.begin()

    # --- inside

    def _find(self, name: str, body: OpenBody) -> Entry | None:
        """Return the conversation of this name, under the terms of `body`."""
        entry = next((e for e in self._entries.values() if name and e.name == name), None)
        if entry is None:
            return None
        if entry.talk is not None:
            raise ConfigError(f"conversation {name!r} is in use: leave its block first")
        old = entry.stream
        if not entry.refused and replace(old.body, conversation=body.conversation) == body:
            return entry
        # for the decoder it is another conversation, with this history
        kept = Kept(body, old.turns, list(old.log.committed), attempt=old.attempt)
        kept.reply = old.reply.ids
        if old.ended:
            ended = entry.recorder.ended if entry.recorder is not None else None
            kept.ended = ended or Moment.now()
        del self._entries[old.number]
        old.close()
        self._pump()
        return self._add(name, body, kept)

    def _add(self, name: str, body: OpenBody, kept: Kept | None = None) -> Entry:
        stream = self._session.open(body, kept.restore if kept is not None else None)
        recorder = None
        if self._spool is not None:
            recorder = Recorder(self._spool.outbox, name, stream, kept or Kept(body))
        entry = self._entries[stream.number] = Entry(name, stream, recorder)
        return entry

    def _when_kept(self, entry: Entry, then: Callable[[], None], *, sync: bool = False) -> None:
        if entry.recorder is None:
            then()
        else:
            entry.recorder.record(partial(self._loop.call_soon_threadsafe, then), sync=sync)

    def _finished(self, entry: Entry, tell: Callable[[], None]) -> None:
        if entry.recorder is not None:
            entry.stream.confirm()
            self.touch(entry)
        tell()

    async def _say_goodbye(self, entry: Entry) -> None:
        stream = entry.stream
        self._entries.pop(stream.number, None)
        stream.close()
        self._pump()
        if entry.recorder is not None:
            entry.recorder.drop()
        until = time.monotonic() + GOODBYE
        while (  # noqa: ASYNC110 - acknowledgements are no events
            self._session.live and stream.unacknowledged and time.monotonic() < until
        ):
            await asyncio.sleep(0.005)
        self._session.forget(stream)


def _nobody() -> None:
    """Nobody has the conversation now."""


def _refusal(event: Refused) -> DeltarelayError:
    kinds = (ContextLengthError, ModelError, ConfigError)
    kind = next((k for k in kinds if k.code == event.code), RemoteProtocolError)
    return kind(event.text)
