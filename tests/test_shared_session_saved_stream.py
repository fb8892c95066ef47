"""A decoder that restarts with what it wrote some time ago, and devices that come back to it."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import RemoteProtocolError
from shared.frames import OpenBody, Reason
from shared.session import CloudStream, EdgeStream
from shared.session.saved_stream import SavedStream, resume_stream, save_stream
from tests.relay_world import DecodedTurn, Decoder, Scribe, World, check_ids

Kept = dict[str, tuple[SavedStream, list[DecodedTurn]]]


def keep(decoder: Decoder) -> Kept:
    return {
        name: (save_stream(scribe.stream), list(scribe.turns))
        for name, scribe in decoder.scribes.items()
    }


def restart(world: World, kept: Kept) -> None:
    """Kill the decoder; another one takes up what was kept, through bytes."""
    world.disconnect()
    world.notice_ends()
    [decoder] = world.decoders
    decoder.forget()
    for name, (saved, turns) in kept.items():
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(saved), type=SavedStream)
        assert again == saved
        scribe = decoder.scribes[name] = Scribe(resume_stream(again, check_ids), decoder)
        scribe.turns = list(turns)
    world.connect()


def world_with_a_reply(drawn: int, *, arrives: bool = True) -> tuple[World, EdgeStream]:
    world = World()
    world.connect()
    world.settle()
    stream = world.open()
    stream.revise(0, [1, 2, 3], ())
    stream.end()
    world.touch(stream, urgent=True)
    world.settle()
    world.scribe(stream).draw(drawn)
    if arrives:
        world.settle()
    return world, stream


def test_words_of_an_open_turn_are_held_as_before() -> None:
    world = World()
    world.connect()
    world.settle()
    stream = world.open()
    stream.revise(0, [1, 2, 3], (4,))
    world.touch(stream, urgent=True)
    world.settle()
    before = world.scribe(stream).stream.held
    restart(world, keep(world.decoders[0]))
    after = world.scribe(stream).stream.held
    assert (after.turn, after.history, after.length, after.crc) == (
        before.turn,
        before.history,
        before.length,
        before.crc,
    )
    world.settle()
    world.check_same()


def test_a_complete_reply_that_had_not_arrived_is_given_without_being_drawn_again() -> None:
    world, stream = world_with_a_reply(3)
    scribe = world.scribe(stream)
    scribe.draw(2)
    scribe.finish(Reason.STOP)
    reply = list(scribe.stream.reply)
    kept = keep(world.decoders[0])
    assert stream.reply.ids == reply[:3]
    restart(world, kept)
    world.settle()
    assert not world.scribe(stream).replying
    assert stream.turns[0].kept == ((1, 2, 3), tuple(reply))
    world.check_same()


@pytest.mark.parametrize("lag", [0, 2])
def test_a_reply_under_way_goes_on_behind_what_its_device_holds(lag: int) -> None:
    world, stream = world_with_a_reply(3 - lag)
    kept = keep(world.decoders[0])
    world.scribe(stream).draw(lag)
    world.settle()
    arrived = list(stream.reply.ids)
    assert len(arrived) == 3
    restart(world, kept)
    [scribe] = world.decoders[0].scribes.values()
    assert not scribe.replying, "nobody draws before the device has said what it holds"
    world.settle()
    scribe = world.scribe(stream)
    assert scribe.replying
    assert scribe.stream.reply == arrived
    scribe.draw(2)
    scribe.finish(Reason.STOP)
    world.settle()
    assert stream.turns[0].kept[1][:3] == tuple(arrived)
    assert len(stream.turns[0].kept[1]) == 5
    world.check_same()


def test_a_turn_whose_words_were_lost_with_the_decoder_is_told_again() -> None:
    world = World()
    world.connect()
    world.settle()
    stream = world.open()
    world.settle()
    kept = keep(world.decoders[0])
    stream.revise(0, [1, 2, 3], ())
    stream.end()
    world.touch(stream, urgent=True)
    world.settle()
    restart(world, kept)
    world.settle()
    assert world.scribe(stream).replying
    world.check_same()


@pytest.mark.parametrize(
    "saved",
    [
        SavedStream(OpenBody("c"), 0, 0, (1 << 31,), 0),
        SavedStream(OpenBody("c"), 0, 0, (1,), 0, (1 << 31,), Reason.STOP),
    ],
)
def test_ids_that_a_peer_may_not_send_are_refused(saved: SavedStream) -> None:
    with pytest.raises(RemoteProtocolError):
        resume_stream(saved, check_ids)


def test_a_stream_without_words_comes_back_as_a_new_one() -> None:
    new = CloudStream(OpenBody("c"), check_ids)
    assert resume_stream(save_stream(new), check_ids).held == new.held


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_whenever_the_decoder_is_killed_and_however_old_its_log_both_ends_agree_again(
    seed: int,
) -> None:
    rng = Random(seed)
    world = World()
    world.connect()
    world.settle()
    stream = world.open()
    world.settle()
    [decoder] = world.decoders
    kept: list[Kept] = [{}]
    for _ in range(40):
        match rng.randrange(10):
            case 0 | 1 if not stream.ended:
                committed = rng.randrange(len(stream.log) + 1)
                stream.revise(committed, [world.next_token()], (world.next_token(),))
                world.touch(stream, urgent=rng.random() < 0.5)
            case 2 if not stream.ended:
                stream.revise(len(stream.log), stream.log.tail, ())
                stream.end()
                world.touch(stream, urgent=True)
            case 3 | 4:
                for scribe in decoder.scribes.values():
                    draw(world, scribe, stream, rng.randrange(1, 4))
            case 5:
                for scribe in decoder.scribes.values():
                    scribe.finish(rng.choice((Reason.STOP, Reason.LENGTH, Reason.ERROR)))
            case 6 if stream.ended:
                if rng.random() < 0.5:
                    stream.cancel(rng.randrange(len(stream.reply.ids) + 1))
                else:
                    stream.reopen()
                world.touch(stream, urgent=True)
            case 7:
                kept.append(keep(decoder))
            case 8 if rng.random() < 0.4:
                restart(world, rng.choice(kept[-3:]))
            case _:
                world.settle()
    restart(world, kept[-1])
    world.settle()
    for scribe in decoder.scribes.values():
        draw(world, scribe, stream, 1)
        scribe.finish(Reason.STOP)
    world.settle()
    world.check_same()


def draw(world: World, scribe: Scribe, stream: EdgeStream, count: int) -> None:
    """Draw, and check that no index is drawn that the device holds of this very reply."""
    cloud = scribe.stream
    same = (cloud.turn, cloud.attempt) == (stream.turn, stream.attempt)
    if scribe.replying and same and stream.ended:
        assert len(cloud.reply) >= len(stream.reply.ids)
    scribe.draw(count)
