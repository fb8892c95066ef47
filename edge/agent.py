"""The library face of the edge: connect, hold conversations."""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from edge.link import Link, open_transport
from edge.talk import Talk
from shared import frames
from shared.channel import Traffic
from shared.errors import (
    ConfigError,
    ContextLengthError,
    DeltarelayError,
    LinkError,
    ModelError,
    RemoteProtocolError,
    TokenizerMismatchError,
)
from shared.frames import HelloBody, OpenBody, Sampling, WelcomeBody
from shared.models import cached_blob, store_blob
from shared.session import (
    BlobArrived,
    EdgeSession,
    EdgeStream,
    Event,
    Finished,
    Noticed,
    Refused,
    Replied,
)
from shared.tokenizer import MAX_BLOB, Tokenizer, load_tokenizer
from shared.transport import Transport
from shared.transport.credentials import Credentials
from shared.transport.mqtt import check_name

log = logging.getLogger(__name__)

FETCH_TIMEOUT = 30.0
GOODBYE = 0.5
"""Seconds a closing conversation waits for the decoder to confirm."""


class Agent:
    """A connected edge agent. Made by `connect`."""

    def __init__(self, session: EdgeSession) -> None:
        self._session = session
        self._link: Link | None = None
        self._talks: dict[int, Talk] = {}
        self._tokenizer: Tokenizer | None = None
        self._blob: bytearray = bytearray()
        self._blob_size = -1
        self._blob_changed = asyncio.Event()
        self._failure: DeltarelayError | None = None

    @property
    def welcome(self) -> WelcomeBody:
        """What the decoder said of itself."""
        assert self._session.welcome is not None
        return self._session.welcome

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer both ends use."""
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def num_reconnects(self) -> int:
        """How often the link was lost and found again."""
        return self._link.num_reconnects if self._link is not None else 0

    @property
    def traffic(self) -> Traffic:
        """Frames and bytes over the link so far."""
        return self._link.traffic if self._link is not None else Traffic()

    @asynccontextmanager
    async def conversation(
        self,
        *,
        system: str = "",
        max_tokens: int = 256,
        deadline: float = 0.0,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        schema: str | Mapping[str, Any] = "",
        adapter: str = "",
    ) -> AsyncGenerator[Talk, None]:
        """Hold a conversation; leaving the block says goodbye, and the decoder forgets it.

        Args:
            system: the system text of the model's chat template.
            max_tokens: most tokens of one reply.
            deadline: seconds from the end of a turn to the end of its reply; 0: none.
            sampling: how tokens are drawn; greedy by default.
            stop: strings that end a reply.
            schema: a JSON schema, as text or as a mapping, that replies follow.
            adapter: name of a LoRA adapter of the decoder that replies; empty: the base model does.
        """
        if max_tokens < 1 or deadline < 0:
            raise ConfigError(
                f"max_tokens = {max_tokens}, deadline = {deadline}: at least 1, at least 0"
            )
        if self._failure is not None:
            raise self._failure
        body = OpenBody(
            secrets.token_hex(16),
            system,
            sampling or Sampling(),
            max_tokens,
            list(stop),
            schema if isinstance(schema, str) else json.dumps(schema),
            adapter,
            deadline=deadline,
        )
        stream = self._session.open(body)
        talk = Talk(stream, self.tokenizer, lambda urgent: self._touch(stream, urgent=urgent))
        self._talks[stream.number] = talk
        self._pump()
        try:
            yield talk
        finally:
            await self._say_goodbye(stream)

    # --- used by `connect`

    async def start(self, link: Link, pinned: bytes | None) -> None:
        """Connect and agree on the tokenizer."""
        self._link = link
        await link.start()
        digest = self.welcome.tokenizer
        blob = pinned or cached_blob(digest) or await self._fetch(digest)
        tokenizer = load_tokenizer(blob)
        if tokenizer.digest != digest:
            raise TokenizerMismatchError(
                f"tokenizer here {tokenizer.digest}, at decoder {self.welcome.decoder} {digest}: "
                "leave `tokenizer` unset to fetch the decoder's"
            )
        if tokenizer.golden != self.welcome.golden:
            raise TokenizerMismatchError(
                f"tokenizer {digest}: the golden texts are split differently here "
                f"({tokenizer.golden}) and at decoder {self.welcome.decoder} "
                f"({self.welcome.golden}): install the same tokenizer library versions"
            )
        self._tokenizer = tokenizer
        self._session.use_tokenizer(digest, tokenizer.golden)

    async def close(self) -> None:
        """Hang up."""
        if self._link is not None:
            await self._link.close()

    def on_events(self, events: Sequence[Event]) -> None:
        """Follow what the session reports."""
        for event in events:
            match event:
                case BlobArrived():
                    self._take_blob(event)
                case Noticed(frames.CONNECTION, topic, text):
                    log.warning("decoder %s: %s: %s", self.welcome.decoder, topic, text)
                case Replied() | Finished() | Noticed() | Refused():
                    if (talk := self._talks.get(event.stream)) is not None:
                        _tell(talk, event)
                case _:
                    pass

    def on_lost(self, error: DeltarelayError) -> None:
        """The link will not come back."""
        self._failure = error
        for talk in self._talks.values():
            talk.failed(error)

    # --- inside

    def _touch(self, stream: EdgeStream, *, urgent: bool) -> None:
        self._session.touch(stream, time.monotonic(), urgent=urgent)
        self._pump()

    def _pump(self) -> None:
        if self._link is not None:
            self._link.pump()

    async def _say_goodbye(self, stream: EdgeStream) -> None:
        self._talks.pop(stream.number, None)
        stream.close()
        self._pump()
        until = time.monotonic() + GOODBYE
        while (  # noqa: ASYNC110 - acknowledgements are no events
            self._session.live and stream.unacknowledged and time.monotonic() < until
        ):
            await asyncio.sleep(0.005)
        self._session.forget(stream)

    async def _fetch(self, digest: str) -> bytes:
        """Fetch the tokenizer's blob from the decoder, verify and cache it."""
        self._blob.clear()
        self._blob_size = -1
        try:
            async with asyncio.timeout(FETCH_TIMEOUT):
                while len(self._blob) != self._blob_size:
                    self._blob_changed.clear()
                    self._session.fetch(digest, len(self._blob))
                    self._pump()
                    await self._blob_changed.wait()
        except TimeoutError:
            raise LinkError(f"tokenizer {digest} did not arrive in {FETCH_TIMEOUT:g} s") from None
        blob = bytes(self._blob)
        self._blob.clear()
        found = hashlib.sha256(blob).hexdigest()
        if found != digest:
            raise RemoteProtocolError(
                f"the decoder sent a tokenizer of digest {found}, not {digest}"
            )
        store_blob(digest, blob)
        return blob

    def _take_blob(self, event: BlobArrived) -> None:
        if event.size > MAX_BLOB:
            raise RemoteProtocolError(f"a blob of {event.size} bytes: at most {MAX_BLOB} are taken")
        if event.offset == len(self._blob) and event.data:
            self._blob += event.data
            self._blob_size = event.size
            self._blob_changed.set()


def _tell(talk: Talk, event: Replied | Finished | Noticed | Refused) -> None:
    match event:
        case Replied():
            talk.replied(event.ids)
        case Finished():
            talk.finished(event.turn, event.reason)
        case Noticed():
            talk.noticed(event.topic, event.text)
        case Refused():
            talk.failed(_refusal(event))


def _refusal(event: Refused) -> DeltarelayError:
    kinds = (ContextLengthError, ModelError, ConfigError)
    kind = next((k for k in kinds if k.code == event.code), RemoteProtocolError)
    return kind(event.text)


@asynccontextmanager
async def connect(
    url: str,
    *,
    model: str = "",
    device: str = "",
    fleet: str = "fleet",
    decoder: str | None = None,
    tokenizer: bytes | None = None,
    credentials: Credentials | None = None,
    rng: Random | None = None,
) -> AsyncGenerator[Agent, None]:
    """Connect to a decoder.

    Args:
        url: `shm:///path` of a decoder on this host, or `mqtt[s]://[user:password@]host[:port]`.
        model: refuse a decoder that serves another one; empty: take what it serves.
        device: this vehicle's name in its fleet (letters, digits, '.', '_', '-'; no VIN); must be
            unique.
        decoder: over MQTT, the decoder to use; by default one is chosen by rendezvous hashing.
        tokenizer: a tokenizer blob to insist on; by default the decoder's is fetched once and
            cached.
        credentials: how to get into the broker: TLS files, user name and password file. They are
            read again with every connection.
        rng: chooses the jitter of reconnecting.

    Raises:
        LinkError: nobody answers at `url`.
        AccessError: the decoder does not let this device in.
        ConfigError: the device's name, the address or the credentials cannot be used.
        TokenizerMismatchError, ModelError: the decoder serves something else.
    """
    device = check_name("device", device or default_device())
    session = EdgeSession(HelloBody(device, secrets.token_hex(8), model=model))
    agent = Agent(session)

    async def open_one() -> Transport:
        return await open_transport(
            url, fleet=fleet, device=device, decoder=decoder, credentials=credentials
        )

    link = Link(session, open_one, on_events=agent.on_events, on_lost=agent.on_lost, rng=rng)
    try:
        await agent.start(link, tokenizer)
        yield agent
    finally:
        await agent.close()


def default_device() -> str:
    """Return a name for this process that no other has."""
    host = "".join(c if c.isalnum() or c in "-_." else "-" for c in socket.gethostname())
    return f"{host[:32]}-{os.getpid()}-{secrets.token_hex(2)}"
