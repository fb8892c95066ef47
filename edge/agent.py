"""The library face of the edge: connect, hold conversations."""

import asyncio
import json
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from edge.conversations import Conversations
from edge.door import Door, door_to
from edge.fetch import TokenizerFetch
from edge.link import Link
from edge.spool import Spool
from edge.talk import Talk
from shared import frames
from shared.channel import Traffic
from shared.errors import (
    ConfigError,
    DeltarelayError,
    LinkError,
)
from shared.frames import HelloBody, OpenBody, Sampling, WelcomeBody
from shared.session import (
    BlobArrived,
    Connected,
    EdgeSession,
    Event,
    Finished,
    Noticed,
    Refused,
    Replied,
)
from shared.tokenizer import Tokenizer
from shared.transport.credentials import Credentials
from shared.transport.mqtt_topics import check_name

log = logging.getLogger(__name__)


class Agent:
    """A connected edge agent. Made by `connect`.

    Args:
        spool: where conversations are kept on disk; None: nowhere. The agent closes it.
    """

    def __init__(self, session: EdgeSession, spool: Spool | None = None) -> None:
        self._session, self._spool = session, spool
        self._link: Link | None = None
        self._tokenizer: Tokenizer | None = None
        self._fetch = TokenizerFetch(session, self._pump)
        self._conversations = Conversations(session, spool, self._pump)
        self._failure: DeltarelayError | None = None
        if spool is not None:
            rewrite = self._conversations.rewrite
            spool.on_lost = partial(asyncio.get_running_loop().call_soon_threadsafe, rewrite)

    @property
    def welcome(self) -> WelcomeBody:
        """What the decoder said of itself; without one yet, what was last heard of it."""
        welcome = self._session.welcome or (self._spool.welcome if self._spool else None)
        assert welcome is not None
        return welcome

    @property
    def is_connected(self) -> bool:
        """A decoder answers now."""
        return self._session.live

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

    @property
    def spool(self) -> Spool | None:
        """What keeps conversations on disk; its `outbox` has the counts and says why it is red."""
        return self._spool

    @property
    def kept(self) -> list[str]:
        """Names of the conversations to go on with: those that are not in use."""
        return self._conversations.idle

    @asynccontextmanager
    async def conversation(
        self,
        name: str = "",
        *,
        system: str = "",
        max_tokens: int = 256,
        deadline: float = 0.0,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        schema: str | Mapping[str, Any] = "",
        adapter: str = "",
        keep: bool = False,
    ) -> AsyncGenerator[Talk, None]:
        """Hold a conversation; leaving the block says goodbye, and the decoder forgets it.

        Args:
            name: goes on with the conversation of this name, where an earlier block or process left
                it, if the agent keeps one; otherwise a new one begins.
            system: the system text of the model's chat template.
            max_tokens: most tokens of one reply.
            deadline: seconds from the end of a turn to the end of its reply; 0: none.
            sampling: how tokens are drawn; greedy by default.
            stop: strings that end a reply.
            schema: a JSON schema, as text or as a mapping, that replies follow.
            adapter: name of a LoRA adapter of the decoder that replies; empty: the base model does.
            keep: leaving the block says no goodbye; the next one of this name goes on.
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
        entry = self._conversations.enter(name, body, self.tokenizer)
        assert entry.talk is not None
        try:
            yield entry.talk
        finally:
            await self._conversations.leave(entry, keep=keep)

    # --- used by `connect`

    async def start(self, link: Link, pinned: bytes | None) -> None:
        """Connect and agree on the tokenizer. Who was here before may start without a decoder."""
        self._link = link
        remembered = self._spool.welcome if self._spool is not None else None
        has_ids = len(self._conversations) > 0
        if remembered is not None and has_ids:  # which mean something to one tokenizer only
            self._session.use_tokenizer(remembered.tokenizer, remembered.golden)
        try:
            await link.start()
        except LinkError as error:
            if remembered is None:
                raise
            self._tokenizer = await self._fetch.tokenizer(remembered, pinned)
            self._session.use_tokenizer(remembered.tokenizer, remembered.golden)
            link.start_alone(error)
            return
        welcome = self.welcome
        self._tokenizer = await self._fetch.tokenizer(welcome, pinned)
        self._session.use_tokenizer(welcome.tokenizer, welcome.golden)

    async def close(self) -> None:
        """Hang up. What is kept is on disk then."""
        if self._link is not None:
            await self._link.close()
        if self._spool is not None:
            await asyncio.to_thread(self._spool.close)

    def on_events(self, events: Sequence[Event]) -> None:
        """Follow what the session reports."""
        for event in events:
            match event:
                case BlobArrived():
                    self._fetch.take(event)
                case Connected(welcome):
                    if self._spool is not None:
                        self._spool.remember(welcome)
                case Noticed(frames.CONNECTION, topic, text):
                    log.warning("decoder %s: %s: %s", self.welcome.decoder, topic, text)
                case Replied() | Finished() | Noticed() | Refused():
                    self._conversations.follow(event)
                case _:
                    pass

    def on_lost(self, error: DeltarelayError) -> None:
        """The link will not come back."""
        self._failure = error
        self._conversations.fail(error)

    # --- inside

    def _pump(self) -> None:
        if self._link is not None:
            self._link.pump()


@asynccontextmanager
async def connect(
    url: str | Door,
    *,
    model: str = "",
    device: str = "",
    fleet: str = "fleet",
    decoder: str | None = None,
    tokenizer: bytes | None = None,
    spool: Path | None = None,
    credentials: Credentials | None = None,
    rng: Random | None = None,
) -> AsyncGenerator[Agent, None]:
    """Connect to a decoder.

    Args:
        url: `shm:///path` of a decoder on this host, or `mqtt[s]://[user:password@]host[:port]`;
            or a door of one's own, to which `fleet` and `decoder` mean nothing.
        model: refuse a decoder that serves another one; empty: take what it serves.
        device: this vehicle's name in its fleet (letters, digits, '.', '_', '-'; no VIN); must be
            unique.
        decoder: over MQTT, the decoder to use; by default one is chosen by rendezvous hashing.
        tokenizer: a tokenizer blob to insist on; by default the decoder's is fetched once and
            cached.
        spool: a folder of this device in which conversations outlive the process; then a reply is
            shown once what came before it is on disk, and an agent that was connected before starts
            without a decoder, too.
        credentials: how to get into the broker: TLS files, user name and password file. They are
            read again with every connection.
        rng: chooses the jitter of reconnecting.

    Raises:
        LinkError: nobody answers at `url`, or another process uses the spool.
        AccessError: the decoder does not let this device in.
        ConfigError: the device's name, the address or the credentials cannot be used.
        TokenizerMismatchError, ModelError: the decoder serves something else.
    """
    if spool is not None and not device:
        raise ConfigError("a spool is of one device: name the device, the same at every start")
    device = check_name("device", device or default_device())
    door = url
    if isinstance(door, str):
        door = door_to(door, fleet=fleet, device=device, decoder=decoder, credentials=credentials)
    kept = Spool(spool) if spool is not None else None
    welcome = kept.welcome if kept is not None else None
    epoch = welcome.epoch if welcome is not None else 0
    hello = HelloBody(device, secrets.token_hex(8), model=model, epoch=epoch)
    session = EdgeSession(hello, durable=kept is not None)
    agent = Agent(session, kept)
    link = Link(session, door, on_events=agent.on_events, on_lost=agent.on_lost, rng=rng)
    try:
        await agent.start(link, tokenizer)
        yield agent
    finally:
        await agent.close()


def default_device() -> str:
    """Return a name for this process that no other has."""
    host = "".join(c if c.isalnum() or c in "-_." else "-" for c in socket.gethostname())
    return f"{host[:32]}-{os.getpid()}-{secrets.token_hex(2)}"
