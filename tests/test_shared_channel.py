"""Session, transport and clock together, over loopback."""

import asyncio
from collections.abc import Sequence

import pytest

from shared import frames
from shared.channel import Channel
from shared.errors import DeltarelayError, LinkError, RemoteProtocolError, SupersededError
from shared.frames import HelloBody, OpenBody, Reason, WelcomeBody
from shared.session import (
    CloudSession,
    Connected,
    Disconnected,
    EdgeSession,
    Ended,
    Event,
    Finished,
    Greeted,
    Outgoing,
    Replied,
    Revised,
)
from shared.session.cloud import greeting
from shared.transport.loopback import LoopbackTransport, loopback_pair
from tests.conformance.ends import End, run, until
from tests.relay_world import check_ids

SHA = "a" * 64


class Side:
    """One end: a channel, and what it told."""

    def __init__(self, session: EdgeSession | CloudSession, transport: LoopbackTransport) -> None:
        self.session = session
        self.events: list[Event] = []
        self.reasons: list[DeltarelayError] = []
        self.channel = Channel(
            session,
            transport,
            asyncio.get_running_loop().time,
            on_events=self.take,
            on_closed=self.reasons.append,
        )

    def take(self, events: Sequence[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, Greeted) and isinstance(self.session, CloudSession):
                body = WelcomeBody("d", "b", 0, SHA, SHA, "m", SHA, vocabulary=99)
                self.session.welcome(greeting(event.hello, body, 0), {})

    async def told(self, kind: type[Event]) -> Event:
        """Wait for an event of `kind`."""
        await until(lambda: any(isinstance(event, kind) for event in self.events))
        return next(event for event in self.events if isinstance(event, kind))

    async def closed(self) -> DeltarelayError:
        await until(lambda: bool(self.reasons))
        assert len(self.reasons) == 1
        return self.reasons[0]


def both(patience: float = 3.0) -> tuple[EdgeSession, CloudSession, Side, Side]:
    """Return two sessions and their channels, started."""
    edge = EdgeSession(HelloBody("car", "b0"), patience=patience)
    cloud = CloudSession(check_ids)
    a, b = loopback_pair()
    up, down = Side(edge, a), Side(cloud, b)
    down.channel.start()
    edge.connect(asyncio.get_running_loop().time())
    up.channel.start()
    return edge, cloud, up, down


def test_a_turn_goes_up_and_its_reply_comes_down() -> None:
    async def test() -> None:
        edge, cloud, up, down = both()
        await up.told(Connected)
        stream = edge.open(OpenBody("c"))
        for n in range(5):
            edge.touch(stream, asyncio.get_running_loop().time(), urgent=stream.revise(n, [n], []))
            up.channel.pump()
        await down.told(Revised)
        await until(lambda: len(cloud.streams[1].log) == 5)  # the pace is kept by the alarm
        stream.end()
        up.channel.pump()
        await down.told(Ended)
        cloud.streams[1].extend_reply([7, 8])
        cloud.streams[1].finish(Reason.STOP)
        down.channel.pump()
        assert await up.told(Replied) == Replied(1, (7, 8))
        assert await up.told(Finished) == Finished(1, 0, Reason.STOP)
        await until(lambda: stream.unacknowledged == 0)  # by the decoder's alarm
        up.channel.close()
        assert "closed here" in str(await up.closed())
        assert isinstance(await down.closed(), LinkError)

    run(test)


def test_a_decoder_that_stays_silent_is_given_up_by_the_alarm() -> None:
    async def test() -> None:
        edge = EdgeSession(HelloBody("car", "b0"), patience=0.05)
        a, b = loopback_pair()
        up = Side(edge, a)
        edge.connect(asyncio.get_running_loop().time())
        up.channel.start()
        event = await up.told(Disconnected)
        assert isinstance(event, Disconnected)
        up.channel.close(event.error)
        assert await up.closed() is event.error
        assert b is not None

    run(test)


@pytest.mark.parametrize(
    "bad", [b"", b"\x10", b"garbage", frames.encode(frames.Ack(1, 1, seq=0, credit=0, load=0))]
)
def test_a_device_that_breaks_the_protocol_is_told_so_and_loses_its_connection(bad: bytes) -> None:
    async def test() -> None:
        cloud = CloudSession(check_ids)
        a, b = loopback_pair()
        down = Side(cloud, b)
        device = End(a).start()
        down.channel.start()
        a.send(frames.encode(frames.Hello(0, 0, HelloBody("car", "b", clock_us=1))))
        a.send(frames.encode(frames.Open(1, 1, 1, OpenBody("c"))))
        a.send(bad)
        a.send(frames.encode(frames.Bye(1, 1, 2)))
        assert isinstance(await down.closed(), RemoteProtocolError)
        assert isinstance(await device.ended(), LinkError)
        error = frames.decode(device.frames[-1])
        assert isinstance(error, frames.Error)
        assert (error.stream, error.code) == (0, RemoteProtocolError.code)

    run(test)


def test_a_decoder_that_breaks_the_protocol_loses_the_device() -> None:
    async def test() -> None:
        edge = EdgeSession(HelloBody("car", "b0"))
        a, b = loopback_pair()
        up = Side(edge, a)
        edge.connect(1.0)
        up.channel.start()
        decoder = End(b).start()
        b.send(b"\x20\x20")
        assert isinstance(await up.closed(), RemoteProtocolError)
        assert isinstance(await decoder.ended(), LinkError)

    run(test)


def test_what_is_owed_is_sent_before_the_end() -> None:
    async def test() -> None:
        _, cloud, up, down = both()
        await up.told(Connected)
        cloud.supersede(9)
        down.channel.close()
        event = await up.told(Disconnected)
        assert isinstance(event, Disconnected)
        assert isinstance(event.error, SupersededError)
        await up.closed()

    run(test)


def test_the_end_of_the_transport_is_told_once_and_pumping_does_nothing_more() -> None:
    async def test() -> None:
        edge, _, up, down = both()
        await up.told(Connected)
        stream = edge.open(OpenBody("c"))
        down.channel.close(LinkError("going away"))
        assert str(await down.closed()) == "going away"
        assert "peer closed" in str(await up.closed())
        edge.touch(stream, 0.0)
        up.channel.pump()
        up.channel.close()
        up.channel.close()
        assert len(up.reasons) == len(down.reasons) == 1

    run(test)


class Scripted:
    """A session double: it reports and raises what it is told to."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: RemoteProtocolError | None = None
        self.at: float | None = None
        self.owed: list[Outgoing] = []
        self.polls = 0

    def receive(self, data: bytes, now: float) -> list[Event]:
        return [Revised(len(data))]

    def poll(self, now: float) -> list[Event]:
        self.polls += 1
        if self.error is not None:
            raise self.error
        events, self.events = self.events, []
        return events

    def timer(self) -> float | None:
        return self.at

    def take_outgoing(self) -> list[Outgoing]:
        owed, self.owed = self.owed, []
        return owed


def scripted(session: Scripted) -> tuple[Channel, LoopbackTransport, list[Event], list[object]]:
    a, b = loopback_pair()
    events, reasons = list[Event](), list[object]()
    clock = asyncio.get_running_loop().time
    channel = Channel(session, a, clock, on_events=events.extend, on_closed=reasons.append)
    return channel, b, events, reasons


def test_an_alarm_follows_the_session_and_dies_with_the_channel() -> None:
    async def test() -> None:
        session = Scripted()
        channel, _, _, _ = scripted(session)
        now = asyncio.get_running_loop().time()
        session.at = now + 60
        channel.start()
        first = channel._alarm
        channel.pump()
        assert channel._alarm is first is not None, "the same time needs no other alarm"
        session.at = None
        channel.pump()
        assert channel._alarm is None
        assert first.cancelled()
        session.at, polls = now + 0.02, session.polls
        channel.pump()
        session.at = now - 1
        channel.pump()
        session.at = None
        await until(lambda: session.polls > polls + 2)
        session.at = now + 60
        channel.pump()
        last = channel._alarm
        channel.close()
        assert last is not None
        assert last.cancelled()

    run(test)


def test_a_channel_closed_from_within_its_events_sets_no_alarm_and_reports_no_more() -> None:
    async def test() -> None:
        session = Scripted()
        a, b = loopback_pair()
        reasons = list[DeltarelayError]()
        seen = list[Event]()

        def take(events: Sequence[Event]) -> None:
            seen.extend(events)
            channel.close()

        clock = asyncio.get_running_loop().time
        channel = Channel(session, a, clock, on_events=take, on_closed=reasons.append)
        channel.start()
        session.at = clock() + 60
        b.send(b"one")
        b.send(b"three")
        await until(lambda: bool(reasons))
        await asyncio.sleep(0.01)
        assert seen == [Revised(3)]
        assert channel._alarm is None

    run(test)


def test_events_of_a_poll_are_reported_and_what_they_cause_is_sent() -> None:
    async def test() -> None:
        session = Scripted()
        a, b = loopback_pair()
        end = End(b).start()

        def take(_events: Sequence[Event]) -> None:
            session.owed.append(Outgoing(b"answer", False))

        channel = Channel(session, a, lambda: 0.0, on_events=take, on_closed=lambda _: None)
        session.events, session.owed = [Revised(1)], [Outgoing(b"first", True)]
        channel.start()
        assert await end.has(2) == [b"first", b"answer"]

    run(test)


def test_a_session_that_fails_while_polled_ends_the_connection() -> None:
    async def test() -> None:
        session = Scripted()
        channel, peer, _, reasons = scripted(session)
        end = End(peer).start()
        session.error = RemoteProtocolError("eight resyncs")
        channel.start()
        assert reasons == [session.error]
        assert isinstance(await end.ended(), LinkError)

    run(test)


def test_a_frame_that_arrives_after_the_close_is_not_parsed() -> None:
    async def test() -> None:
        session = Scripted()
        channel, _, events, reasons = scripted(session)
        channel.start()
        channel.close()
        channel._receive(b"late")
        channel._ended(None)
        assert (events, len(reasons)) == ([], 1)

    run(test)


def test_an_end_without_a_reason_gets_one() -> None:
    async def test() -> None:
        channel, _, _, reasons = scripted(Scripted())
        channel.start()
        channel._ended(None)
        assert [type(reason) for reason in reasons] == [LinkError]

    run(test)


def test_a_peer_that_breaks_the_owners_rules_is_told_and_hung_up_on_once() -> None:
    async def test() -> None:
        _, _, up, down = both()

        def refuse(events: Sequence[Event]) -> None:
            raise RemoteProtocolError("such a thing is not said")

        await up.told(Connected)
        down.take = refuse  # type: ignore[method-assign] # from now on
        down.channel._on_events = refuse
        assert isinstance(up.session, EdgeSession)
        up.session.fetch(SHA)
        up.channel.pump()
        assert "such a thing is not said" in str(await down.closed())
        event = await up.told(Disconnected)
        assert isinstance(event, Disconnected)
        assert "such a thing is not said" in str(event.error)

    run(test)
