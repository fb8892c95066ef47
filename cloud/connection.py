"""One device's connection to the decoder: routes what its session reports to its conversations."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from cloud.conversation import Conversation
from shared import frames
from shared.channel import Channel
from shared.errors import DeltarelayError, LinkError, SupersededError
from shared.frames import HelloBody, Load, WelcomeBody
from shared.session import (
    Closed,
    CloudSession,
    CloudStream,
    Event,
    FetchAsked,
    Greeted,
    Opened,
)
from shared.session.cloud_stream import IdCheck
from shared.transport import Transport

log = logging.getLogger(__name__)

GREET_WITHIN = 10.0
"""Seconds a connection gets until it says who it is: it holds one of a bounded number of places."""


class Held(Protocol):
    """The conversations of a decoder, as `cloud.conversations` has them."""

    def get(self, device: str, name: str) -> Conversation | None: ...
    def attach(self, connection: "Connection", hello: HelloBody) -> dict[int, CloudStream]: ...
    def begin(self, device: str, stream: CloudStream, connection: "Connection") -> Conversation: ...
    def forget(self, device: str, name: str) -> None: ...


class House(Protocol):
    """What a connection asks of the decoder it belongs to."""

    @property
    def check_ids(self) -> IdCheck: ...
    @property
    def conversations(self) -> Held: ...
    def greet(self, connection: "Connection", hello: HelloBody) -> WelcomeBody: ...
    def leave(self, connection: "Connection", device: str) -> None: ...
    def terms_of(self, device: str) -> tuple[int, Load]: ...
    def blob_of(self, digest: str) -> bytes | None: ...


class Connection:
    """One device's connection to the decoder; whoever does not greet is hung up on."""

    def __init__(self, decoder: House, transport: Transport) -> None:
        self._decoder, self._transport = decoder, transport
        self._held = decoder.conversations
        self._device = ""
        self._alarm: asyncio.TimerHandle | None = None
        self.session = CloudSession(decoder.check_ids)
        self._channel = Channel(
            self.session,
            transport,
            time.monotonic,
            on_events=self._on_events,
            on_closed=self._on_closed,
        )

    def start(self) -> None:
        """Let frames in."""
        self._channel.start()
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(GREET_WITHIN, self._check_greeted)

    def pump(self) -> None:
        """Send what the session owes."""
        self._channel.pump()

    def notice(self, topic: str, text: str) -> None:
        """Tell the device something."""
        self.session.notice(frames.CONNECTION, topic, text)
        self.pump()

    @property
    def peer(self) -> str:
        """Which device this is, where the transport can vouch for it."""
        return self._transport.peer

    def supersede(self) -> None:
        """Another connection of this device took over."""
        self.refuse(SupersededError(f"another agent connected as device {self._device}"))

    def refuse(self, error: DeltarelayError) -> None:
        """Say why it may not stay, and hang up."""
        self.session.refuse(error)
        self._channel.close(error)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def _check_greeted(self) -> None:
        if not self._device:
            self.refuse(LinkError(f"no HELLO within {GREET_WITHIN:g} s"))

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            self._on_event(event)
        if self._device:
            self.session.credit, self.session.load = self._decoder.terms_of(self._device)

    def _on_event(self, event: Event) -> None:
        match event:
            case Greeted(hello):
                self._greet(hello)
            case FetchAsked(digest, offset):
                self._fetch(digest, offset)
            case Opened(stream, body):
                self._open(stream, event, body.conversation)
            case Closed(_, name):
                self._held.forget(self._device, name)
            case _:
                about = self.session.streams.get(getattr(event, "stream", 0))
                if about is not None:
                    self._tell(about, event)

    def _tell(self, stream: CloudStream, event: Event) -> None:
        conversation = self._held.get(self._device, stream.body.conversation)
        if conversation is not None:
            conversation.on_event(event)

    def _greet(self, hello: HelloBody) -> None:
        try:
            body = self._decoder.greet(self, hello)
        except DeltarelayError as error:
            log.warning("%s: device %s refused: %s", self._transport.name, hello.device, error)
            self.session.refuse(error, hello.epoch)
            self._channel.close(error)
            return
        self._device = hello.device
        log.info("%s: device %s, epoch %d", self._transport.name, hello.device, body.epoch)
        self.session.welcome(body, self._held.attach(self, hello))

    def _fetch(self, digest: str, offset: int) -> None:
        content = self._decoder.blob_of(digest)
        if content is not None:
            self.session.blob(digest, offset, content)
        else:
            self.session.notice(frames.CONNECTION, "no-blob", f"blob {digest} is not held here")

    def _open(self, number: int, event: Opened, name: str) -> None:
        stream = self.session.streams[number]
        known = self._held.get(self._device, name)
        try:
            if known is not None and known.stream is stream:
                known.on_event(event)
            else:
                self._held.forget(self._device, name)
                self._held.begin(self._device, stream, self)
        except DeltarelayError as error:
            self._held.forget(self._device, name)
            self.session.refuse_stream(number, error)

    def _on_closed(self, reason: DeltarelayError) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        log.info("%s: device %s left: %s", self._transport.name, self._device or "?", reason)
        self.session.detach()
        self._decoder.leave(self, self._device)
