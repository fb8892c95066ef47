"""What users live through: both ends together, one story a test."""

import pytest

from shared import frames
from shared.errors import DeltarelayError, SupersededError
from shared.frames import Held, HelloBody, Reason
from shared.session import (
    CloudSession,
    Disconnected,
    EdgeSession,
    EdgeStream,
    Replied,
)
from shared.session.edge import SILENCE
from shared.session.waits import MAX_WAIT
from tests.relay_world import Connection, Decoder, World


def talk(decoders: int = 1) -> tuple[World, EdgeStream]:
    """Return a world whose edge has one conversation and a decoder that knows of it."""
    world = World(decoders=decoders)
    stream = world.open()
    world.connect()
    world.settle()
    return world, stream


def say(world: World, stream: EdgeStream, *ids: int) -> None:
    """Say a turn and end it."""
    world.touch(stream, urgent=stream.revise(len(stream.log), ids, ()))
    stream.end()


def answer(world: World, stream: EdgeStream, count: int = 2, reason: str = Reason.STOP) -> None:
    world.scribe(stream).draw(count)
    world.scribe(stream).finish(reason)
    world.settle()


def lose_link(world: World) -> None:
    """The link breaks, and both ends know."""
    world.disconnect()
    world.notice_ends()


def test_a_turn_grows_is_revised_and_is_answered() -> None:
    world, stream = talk()
    for keep, ids, tail in ((0, [1], [2]), (1, [2, 3], [4]), (1, [5], []), (2, [], [6, 7])):
        world.touch(stream, urgent=stream.revise(keep, ids, tail))
        world.settle()
        world.check_same()
    stream.end()
    world.settle()
    answer(world, stream)
    world.check_same()
    assert stream.turns[0].user_ids == (1, 5, 6, 7)
    assert world.finished == [(1, 0)]


def test_a_reply_is_complete_though_its_end_and_the_first_questions_for_it_are_lost() -> None:
    world, stream = talk()
    say(world, stream, 1, 2)
    world.settle()
    world.scribe(stream).draw(2)
    world.scribe(stream).finish(Reason.STOP)
    link = world.connection
    assert link is not None
    for lost in (link.down, link.up):
        world.now += 2 * SILENCE
        world.pump()
        assert len(lost.rest()) >= 1
        assert world.finished == []
    world.now += MAX_WAIT
    world.settle()
    assert world.finished == [(1, 0)]
    world.check_same()


def test_a_decoder_that_forgot_everything_hears_of_live_words_before_idle_talks() -> None:
    world, idle = talk()
    live = world.open()
    world.touch(live, urgent=live.revise(0, (1, 2), ()))
    world.settle()
    world.decoders[0].forget()
    world.connect()
    world.settle()
    world.check_same()
    assert (idle.number, live.number) == (1, 2)
    assert list(world.connection.session.streams) == [2, 1] if world.connection else False


def test_late_tokens_of_a_reply_taken_back_are_not_shown() -> None:
    world, stream = talk()
    say(world, stream, 1)
    world.settle()
    world.scribe(stream).draw(3)
    world.scribe(stream).finish(Reason.STOP)
    stream.reopen()  # the reply is under way
    say(world, stream, 2)
    world.settle()
    assert (stream.reply.ids, stream.ended) == ([], True)
    answer(world, stream)
    world.check_same()
    assert stream.turns[0].user_ids == (1, 2)
    assert world.finished == [(1, 0)]


def test_an_end_taken_back_after_the_reply_was_complete_is_open_again() -> None:
    world, stream = talk()
    say(world, stream, 1)
    world.settle()
    world.scribe(stream).draw(2)
    world.scribe(stream).finish(Reason.STOP)
    stream.reopen()
    world.settle()
    assert world.scribe(stream).turns == []
    world.check_same()


def test_a_reply_finished_while_the_device_was_away_arrives_at_its_return() -> None:
    world, stream = talk()
    say(world, stream, 1)
    world.settle()
    world.scribe(stream).draw(2)
    world.settle()
    first = list(stream.reply.ids)
    scribe = world.scribe(stream)
    lose_link(world)
    scribe.draw(3)
    scribe.finish(Reason.LENGTH)
    world.connect()
    world.settle()
    assert stream.turns[0].reason == Reason.LENGTH
    assert len(stream.turns[0].reply_ids) == 5
    assert list(stream.turns[0].reply_ids[:2]) == first
    world.check_same()


@pytest.mark.parametrize("ended_again", [False, True])
@pytest.mark.parametrize("answered", [False, True])
def test_an_end_taken_back_offline_is_taken_back_at_the_return(
    ended_again: bool, answered: bool
) -> None:
    world, stream = talk()
    say(world, stream, 1, 2)
    world.settle()
    scribe = world.scribe(stream)
    lose_link(world)
    if answered:
        scribe.draw(2)
        scribe.finish(Reason.STOP)
    stream.reopen()
    stream.revise(1, [9], [])
    if ended_again:
        stream.end()
    world.connect()
    world.settle()
    assert scribe.stream.log.ids == [1, 9]
    assert scribe.turns == []
    if ended_again:
        answer(world, stream)
        assert stream.turns[0].user_ids == (1, 9)
    world.check_same()


@pytest.mark.parametrize("heard", [0, 2])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("offline", [False, True])
def test_a_cut_reply_is_cut_at_both_ends(heard: int, complete: bool, offline: bool) -> None:
    world, stream = talk()
    say(world, stream, 1)
    world.settle()
    world.scribe(stream).draw(3)
    world.settle()
    scribe = world.scribe(stream)
    if offline:
        lose_link(world)
    scribe.draw(2)
    if complete:
        scribe.finish(Reason.STOP)
    stream.cancel(heard)
    say(world, stream, 7)
    if offline:
        world.connect()
    world.settle()
    answer(world, stream)
    world.check_same()
    assert [turn.reason for turn in stream.turns] == [Reason.CANCELLED, Reason.STOP]
    assert len(stream.turns[0].reply_ids) == heard
    assert world.finished == [(1, 1)]


def test_a_turn_that_failed_at_the_decoder_is_no_part_of_the_history() -> None:
    world, stream = talk(decoders=2)
    say(world, stream, 1)
    world.settle()
    answer(world, stream, reason=Reason.ERROR)
    say(world, stream, 2)
    world.settle()
    answer(world, stream)
    world.check_same()
    lose_link(world)
    world.connect(1)
    world.settle()
    world.check_same()
    assert world.scribe(stream).turns[0] == ((), ())


@pytest.mark.parametrize("arrives", [False, True])
def test_a_goodbye_is_said_until_it_is_heard_and_then_forgotten(arrives: bool) -> None:
    world, stream = talk()
    say(world, stream, 1)
    world.settle()
    stream.close()
    world.pump()
    link = world.connection
    assert link is not None
    if arrives:  # but its acknowledgement does not
        for data in link.up.rest():
            for event in link.session.receive(data, world.now):
                link.decoder.take(link.session, event)
    lose_link(world)
    world.connect()
    world.settle()
    assert link.decoder.scribes == {}
    assert world.connection is not None
    assert world.connection.session.streams == {}
    lose_link(world)
    world.connect()
    assert world.connection is not None
    hello = frames.decode(world.connection.up.reliable[0])
    assert isinstance(hello, frames.Hello)
    assert hello.body.conversations == {}


def test_another_decoder_goes_on_behind_what_was_heard_and_the_first_one_takes_that_over() -> None:
    world, stream = talk(decoders=2)
    say(world, stream, 1)
    world.settle()
    world.scribe(stream).draw(3)
    world.settle()
    heard = list(stream.reply.ids)
    first = world.scribe(stream)
    lose_link(world)
    first.draw(4)  # nobody will hear these
    world.connect(1)
    world.settle()
    assert world.scribe(stream) is not first
    world.scribe(stream).draw(2)
    world.settle()
    assert stream.reply.ids[:3] == heard
    both = list(stream.reply.ids)
    lose_link(world)
    world.connect(0)
    world.settle()
    assert world.scribe(stream) is first
    assert first.stream.reply == both
    answer(world, stream, 1)
    assert list(stream.turns[0].reply_ids[:5]) == both
    world.check_same()


def test_a_decoder_that_forgot_everything_is_told_everything() -> None:
    world, stream = talk(decoders=2)
    for turn in range(3):
        say(world, stream, turn)
        world.settle()
        answer(world, stream)
    say(world, stream, 9)
    world.settle()
    world.scribe(stream).draw(2)
    world.settle()
    lose_link(world)
    world.decoders[0].forget()
    world.connect(0)
    world.settle()
    assert world.scribe(stream).stream.reply == stream.reply.ids
    answer(world, stream)
    world.check_same()
    assert len(stream.turns) == 4


def test_an_edge_that_lost_its_last_turn_is_still_the_truth() -> None:
    world, stream = talk(decoders=2)
    for turn in range(3):
        say(world, stream, turn)
        world.settle()
        answer(world, stream)
    lose_link(world)
    stream.turns.pop()  # its disk was not in time
    world.finished.pop()
    world.given.clear()
    world.connect()
    world.settle()
    assert len(world.scribe(stream).turns) == 2
    say(world, stream, 7)
    world.settle()
    answer(world, stream)
    world.check_same()


def test_credit_runs_out_and_comes_back_without_a_pause_of_patience() -> None:
    world, stream = talk()
    for n in range(40):
        world.now += 0.031
        world.touch(stream, urgent=stream.revise(len(stream.log), [n], [n]))
    assert stream.unacknowledged == 4, "as many as the world's decoder allows"
    world.settle()
    world.check_same()
    assert world.ends == []


# --- two agents with one identity


def anything(ids: object, *, reply: bool = False) -> None:
    """Refuse no id."""


def agent(boot: str) -> EdgeSession:
    return EdgeSession(HelloBody("car", boot))


def greet(edge: EdgeSession, decoder: Decoder, session: CloudSession, now: float) -> list[bytes]:
    """Bring HELLO to the decoder; return what it sends down."""
    edge.connect(now)
    for data, _ in edge.take_outgoing():
        for event in session.receive(data, now):
            decoder.take(session, event)
    return [data for data, _ in session.take_outgoing()]


@pytest.mark.parametrize("one_connection", [False, True])
def test_the_older_of_two_agents_with_one_identity_stops_and_the_newer_goes_on(
    one_connection: bool,
) -> None:
    world = World()
    decoder = world.decoders[0]
    session = CloudSession(anything)
    old, new = agent("old"), agent("new")
    for data in greet(old, decoder, session, 1.0):
        old.receive(data, 1.0)
        assert new.receive(data, 1.0) == [], "over MQTT both hear it: it is not the new one's"
    stream = old.open(frames.OpenBody("c"))
    for data, _ in old.take_outgoing():
        for event in session.receive(data, 1.0):
            decoder.take(session, event)
    session.take_outgoing()
    other = session if one_connection else CloudSession(anything)
    mine = new.open(frames.OpenBody("c"))
    for data in greet(new, decoder, other, 2.0):
        assert old.receive(data, 2.0) == []
        new.receive(data, 2.0)
    assert (old.live, new.live) == (True, True)
    old.touch(stream, 3.0, urgent=stream.revise(0, [1], []))
    old.poll(3.0)
    stops: list[DeltarelayError] = []
    for data, _ in old.take_outgoing():
        assert session.receive(data, 3.0) == []
    for data, _ in session.take_outgoing():
        assert new.receive(data, 3.0) == []
        stops += [e.error for e in old.receive(data, 3.0) if isinstance(e, Disconnected)]
    assert [type(error) for error in stops] == [SupersededError]
    assert (old.live, new.live) == (False, True)
    assert (decoder.scribes["c"].stream.log.ids, mine.log.ids) == ([], [])


def test_a_slow_decoder_that_answers_two_greetings_of_one_agent_keeps_it() -> None:
    world = World()
    decoder, session, edge = (
        world.decoders[0],
        CloudSession(anything),
        agent("a"),
    )
    first = greet(edge, decoder, session, 1.0)
    second = greet(edge, decoder, session, 5.0)
    assert [edge.receive(data, 5.0) for data in first] == [[]]
    assert edge.receive(second[0], 5.0) != []
    edge.open(frames.OpenBody("c"))
    for data, _ in edge.take_outgoing():
        assert session.receive(data, 5.0) != []


def test_a_resync_and_a_welcome_say_the_same_thing() -> None:
    world, stream = talk()
    say(world, stream, 1, 2)
    world.settle()
    world.scribe(stream).draw(2)
    world.settle()
    link = world.connection
    assert isinstance(link, Connection)
    cloud = world.scribe(stream).stream
    gap = frames.Rewind(1, cloud.epoch, cloud.seq + 5, turn=0, to=0)
    link.session.receive(frames.encode(gap), world.now)
    (data, _), *_ = link.session.take_outgoing()
    resync = frames.decode(data)
    assert isinstance(resync, frames.Resync)
    assert resync.held == cloud.held
    assert isinstance(resync.held, Held)
    assert world.edge.receive(data, world.now) == []
    world.settle()
    world.scribe(stream).draw(1)
    world.pump()
    (more,) = link.down.rest()
    assert world.edge.receive(more, world.now) == [Replied(1, (cloud.reply[-1],))]
