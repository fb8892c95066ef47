"""An edge, some decoders and bad links between them, in simulated time. No I/O, no clock, no sleep.

`Scribe` stands for what owns a conversation in the cloud: it sees nothing but the session's events,
and what it has written down in the end must be what the edge has.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from shared.errors import DeltarelayError, ProtocolError, RemoteProtocolError
from shared.frames import HelloBody, OpenBody, Reason, WelcomeBody
from shared.session import (
    Cancelled,
    Closed,
    CloudSession,
    CloudStream,
    Disconnected,
    EdgeSession,
    EdgeStream,
    Ended,
    Event,
    Finished,
    Greeted,
    HistorySet,
    Opened,
    Outgoing,
    Reopened,
    Replied,
    Revised,
)
from shared.session.cloud import greeting
from shared.session.edge import SILENCE

VOCABULARY = 1 << 30
SHA = "c0" * 32
ConversationEvent = Opened | Revised | Ended | Reopened | Cancelled | HistorySet
DecodedTurn = tuple[tuple[int, ...], tuple[int, ...]]


def check_ids(ids: object, *, reply: bool = False) -> None:
    """Refuse what is outside the vocabulary."""
    assert isinstance(ids, tuple)
    if ids and max(ids) >= VOCABULARY:
        raise RemoteProtocolError(f"token id {max(ids)}")


class Scribe:
    """Owns one conversation: follows its events, draws its replies."""

    def __init__(self, stream: CloudStream, decoder: "Decoder") -> None:
        self.stream, self._decoder = stream, decoder
        self.turns: list[DecodedTurn] = []
        self.replying = False

    def take(self, event: Event) -> None:
        """Follow what the session reports."""
        match event:
            case Opened():
                self.turns, self.replying = [], False
            case Ended():
                self.replying = True
            case Reopened(turn=turn):
                del self.turns[turn:]
                self.replying = False
            case Cancelled(turn=turn, heard=heard, user_ids=user):
                if user is None:
                    user, reply = self.turns[turn]
                    self.turns[turn] = user, reply[:heard]
                else:
                    self.turns.append((user, tuple(self.stream.reply[:heard])))
                self.replying = False
            case HistorySet():
                del self.turns[event.turn :]
                if event.done:
                    self.turns.append((event.user_ids, event.reply_ids))
                self.replying = False

    def draw(self, count: int) -> None:
        """Sample reply tokens; every token of a world is another one."""
        if self.replying:
            self._decoder.note_sampled(self.stream, count)
            self.stream.extend_reply(self._decoder.fresh(count))

    def finish(self, reason: str) -> None:
        """End the reply."""
        if self.replying:
            self.replying = False
            turn = tuple(self.stream.log.committed), tuple(self.stream.reply)
            self.turns.append(((), ()) if reason == Reason.ERROR else turn)
            self.stream.finish(reason)


class Decoder:
    """A decoder of one device: what it holds outlives connections."""

    def __init__(self, name: str, world: "World") -> None:
        self.name, self._world = name, world
        self.scribes: dict[str, Scribe] = {}
        self.epoch = 0
        self._sampled: set[tuple[str, int, int, int]] = set()

    def forget(self) -> None:
        """Restart without a snapshot."""
        self.scribes.clear()
        self._sampled.clear()
        self.epoch = 0

    def fresh(self, count: int) -> list[int]:
        """Draw tokens nobody has seen."""
        return [self._world.next_token() for _ in range(count)]

    def note_sampled(self, stream: CloudStream, count: int) -> None:
        """Check that no index of a reply is sampled twice."""
        for index in range(len(stream.reply), len(stream.reply) + count):
            key = (stream.body.conversation, stream.turn, stream.attempt, index)
            if self._world.one_decoder:
                assert key not in self._sampled, f"{key} is sampled twice"
            self._sampled.add(key)

    def take(self, session: CloudSession, event: Event) -> None:
        """Do what an owner of sessions does with an event."""
        if isinstance(event, Greeted):
            self._greet(session, event.hello)
            return
        if isinstance(event, Closed):
            self.scribes.pop(event.conversation, None)
            return
        assert isinstance(event, ConversationEvent)
        stream = session.streams[event.stream]
        name = stream.body.conversation
        scribe = self.scribes.get(name)
        if scribe is None or scribe.stream is not stream:
            assert isinstance(event, Opened)
            scribe = self.scribes[name] = Scribe(stream, self)
        scribe.take(event)

    def _greet(self, session: CloudSession, hello: HelloBody) -> None:
        body = WelcomeBody(
            self.name, "boot", 0, SHA, SHA, "m", SHA, vocabulary=VOCABULARY, context=4096
        )
        body = greeting(hello, body, self.epoch)
        self.epoch = body.epoch
        streams = {
            number: self.scribes[name].stream
            for number, name in hello.conversations.items()
            if name in self.scribes
        }
        session.welcome(body, streams)


@dataclass
class Pipe:
    """One direction of a connection: order among reliable frames, none among provisional ones."""

    reliable: deque[bytes] = field(default_factory=deque[bytes])
    provisional: list[bytes] = field(default_factory=list[bytes])
    past: list[bytes] = field(default_factory=list[bytes])

    def put(self, frames: list[Outgoing]) -> None:
        """Take what an end owes to the wire."""
        for data, provisional in frames:
            (self.provisional if provisional else self.reliable).append(data)

    def next(self, rng: Random) -> bytes | None:
        """Return what arrives next: maybe out of order, maybe a second copy, maybe nothing."""
        luck = rng.random()
        if luck < 0.1 and self.past:
            return rng.choice(self.past[-12:])
        if self.provisional and (luck < 0.4 or not self.reliable):
            data = self.provisional.pop(rng.randrange(len(self.provisional)))
            self.past.append(data)
            return None if rng.random() < 0.3 else data
        if not self.reliable:
            return None
        self.past.append(self.reliable.popleft())
        return self.past[-1]

    def lose(self) -> None:
        """Lose a reliable frame, as a broker does whose queue is full."""
        if self.reliable:
            self.reliable.popleft()

    def overtake(self, rng: Random) -> None:
        """Let a reliable frame overtake those before it, as after a broker's reconnect."""
        if len(self.reliable) > 1:
            at = rng.randrange(1, len(self.reliable))
            self.reliable.rotate(-at)
            late = self.reliable.popleft()
            self.reliable.rotate(at)
            self.reliable.appendleft(late)

    def rest(self) -> list[bytes]:
        """Return all that is under way, as a good link would deliver it."""
        out = [*self.reliable, *self.provisional]
        self.reliable.clear()
        self.provisional.clear()
        return out


@dataclass
class Connection:
    """A link between the edge and one decoder."""

    decoder: Decoder
    session: CloudSession
    up: Pipe = field(default_factory=Pipe)
    down: Pipe = field(default_factory=Pipe)


class World:
    """The edge's side, and the links."""

    def __init__(self, *, decoders: int = 1, credit: int = 4, shared_link: bool = False) -> None:
        self.one_decoder = decoders == 1
        self.decoders = [Decoder(f"d{n}", self) for n in range(decoders)]
        self.edge = EdgeSession(HelloBody("car", "b"))
        self.streams: list[EdgeStream] = []
        self.finished: list[tuple[int, int]] = []
        self.ends: list[DeltarelayError] = []
        self.now = 100.0
        self.connection: Connection | None = None
        self._leaving: list[Connection] = []
        """Connections whose end the decoder has not noticed."""
        self._shared_link = shared_link
        """As over MQTT: what was under way on the last connection may come on the next one."""
        self._credit = credit
        self._token = 1000
        self.given: dict[tuple[int, int, int, int], int] = {}
        """Reply ids given to the edge's owner, by (stream, turn, attempt, index)."""

    def next_token(self) -> int:
        """Return a token that was never drawn."""
        self._token += 1
        return self._token

    # --- links

    def connect(self, number: int = 0) -> None:
        """Connect the edge to a decoder, whatever was before."""
        decoder = self.decoders[number % len(self.decoders)]
        self.now += 0.001
        last, self.connection = self.connection, None
        if last is not None:
            self._leaving.append(last)
        self.edge.disconnect()
        if last is not None and self._shared_link and last.decoder is decoder:
            self.connection = self._leaving.pop()
        else:
            session = CloudSession(check_ids, credit=self._credit)
            self.connection = Connection(decoder, session)
        self.edge.connect(self.now)
        self.pump()

    def disconnect(self) -> None:
        """The link breaks: what is under way is lost, and only the edge knows at once."""
        if self.connection is not None and not self._shared_link:
            self._leaving.append(self.connection)
            self.connection = None
        self.edge.disconnect()

    def notice_ends(self) -> None:
        """The decoders learn of the connections that have ended."""
        for connection in self._leaving:
            connection.session.detach()
        self._leaving.clear()

    def pump(self) -> None:
        """Let both ends put on the wire what is due."""
        self._edge_events(self.edge.poll(self.now))
        if self.connection is not None:
            self.connection.session.poll(self.now)
            self.connection.up.put(self.edge.take_outgoing())
            self.connection.down.put(self.connection.session.take_outgoing())

    def arrive_up(self, data: bytes | None) -> None:
        """A frame reaches the decoder."""
        link = self.connection
        if link is not None and data is not None:
            for event in link.session.receive(data, self.now):
                link.decoder.take(link.session, event)
            self.pump()

    def arrive_down(self, data: bytes | None) -> None:
        """A frame reaches the edge."""
        if data is not None:
            try:
                self._edge_events(self.edge.receive(data, self.now))
            except ProtocolError as error:
                self.ends.append(error)
                raise
            self.pump()

    def settle(self, rounds: int = 200) -> None:
        """Deliver everything, over a good link, until nothing is under way."""
        for _ in range(rounds):
            self.now += 0.05
            self.pump()
            link = self.connection
            assert link is not None, "the connection did not stand"
            up, down = link.up.rest(), link.down.rest()
            if not up and not down and self._rests():
                return
            for data in up:
                self.arrive_up(data)
            for data in down:
                self.arrive_down(data)
        raise AssertionError("the link does not come to rest")

    def _rests(self) -> bool:
        """The edge wants nothing but to ask, some time later, for a reply nobody draws."""
        at = self.edge.timer()
        if at is None:
            return True
        return at > self.now + SILENCE / 2 and not any(s.unacknowledged for s in self.streams)

    def _edge_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.finished.append((event.stream, event.turn))
            elif isinstance(event, Replied):
                self._note_given(event)
            elif isinstance(event, Disconnected):
                self.ends.append(event.error)
                assert event.retry, event.error
                self.disconnect()

    def _note_given(self, event: Replied) -> None:
        """Check that no index of a reply is given twice with different ids."""
        (stream,) = (s for s in self.streams if s.number == event.stream)
        first = len(stream.reply.ids) - len(event.ids)
        for index, token in enumerate(event.ids, first):
            key = (stream.number, stream.turn, stream.attempt, index)
            assert self.given.setdefault(key, token) == token, f"{key} is given twice"

    # --- conversations

    def open(self) -> EdgeStream:
        """Begin a conversation."""
        stream = self.edge.open(OpenBody(f"c{len(self.streams)}"))
        self.streams.append(stream)
        return stream

    def touch(self, stream: EdgeStream, *, urgent: bool = False) -> None:
        """Tell the session of a change, and let it send."""
        self.edge.touch(stream, self.now, urgent=urgent)
        self.pump()

    def scribe(self, stream: EdgeStream) -> Scribe:
        """Return the cloud's side of a conversation at the connected decoder."""
        assert self.connection is not None
        return self.connection.decoder.scribes[stream.body.conversation]

    def check_same(self) -> None:
        """Both ends have the same turns and the same open turn of every open conversation."""
        assert self.connection is not None
        scribes, session = self.connection.decoder.scribes, self.connection.session
        alive = [stream for stream in self.streams if not stream.closed]
        assert sorted(session.streams) == [stream.number for stream in alive]
        for stream in self.streams:
            if stream.closed:
                continue
            scribe = scribes[stream.body.conversation]
            cloud = scribe.stream
            assert scribe.turns == [turn.kept for turn in stream.turns]
            assert (cloud.turn, cloud.ended) == (stream.turn, stream.ended)
            assert cloud.log.ids == stream.log.ids
            assert cloud.log.crc() == stream.log.crc()
            assert cloud.held.history == stream.history(stream.turn)
            assert stream.unacknowledged == 0
