"""Both ends of the relay over links that lose, repeat, reorder and break."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.frames import Reason
from shared.session import EdgeStream
from tests.relay_world import World

STEPS = (
    *("revise",) * 5,
    *("end", "end", "end", "cancel", "reopen", "close", "open"),
    *("draw", "draw", "draw", "finish", "finish"),
    *("up",) * 6,
    *("down",) * 6,
    *("wait", "wait", "cut", "connect", "notice", "lose", "overtake", "lose_state"),
)


def step(world: World, what: str, rng: Random) -> None:
    """Do one thing that may happen at any time."""
    alive = [stream for stream in world.streams if not stream.closed]
    stream = rng.choice(alive) if alive else None
    match what:
        case "revise" | "end" | "cancel" | "reopen" | "close" if stream is not None:
            act(world, stream, what, rng)
        case "open" if len(alive) < 3:
            world.open()
        case "draw" | "finish":
            scribes = [s for decoder in world.decoders for s in decoder.scribes.values()]
            if scribes and what == "draw":
                rng.choice(scribes).draw(rng.randint(1, 4))
            elif scribes:
                rng.choice(scribes).finish(rng.choice((*(Reason.STOP,) * 4, Reason.ERROR)))
        case "up" | "down":
            flow(world, what, rng)
        case "wait":
            world.now += rng.choice((0.01, 0.03, 0.1, 0.1, 0.1, 4.0))
        case "cut" if rng.random() < 0.5:
            world.disconnect()
        case "connect" if rng.random() < 0.4:
            world.connect(rng.randrange(2))
        case "notice":
            world.notice_ends()
        case "lose" if world.connection is not None and rng.random() < 0.5:
            rng.choice((world.connection.up, world.connection.down)).lose()
        case "overtake" if world.connection is not None:
            rng.choice((world.connection.up, world.connection.down)).overtake(rng)
        case "lose_state" if not world.one_decoder and rng.random() < 0.3:
            lost = rng.choice(world.decoders)
            if world.connection is not None and world.connection.decoder is lost:
                world.disconnect()
                world.connection = None
            lost.forget()
    world.pump()


def flow(world: World, direction: str, rng: Random) -> None:
    """Let some frames arrive."""
    if world.connection is None:
        world.connect(rng.randrange(2))
    for _ in range(rng.randint(1, 4)):
        link = world.connection
        if link is not None and direction == "up":
            world.arrive_up(link.up.next(rng))
        elif link is not None:
            world.arrive_down(link.down.next(rng))


def act(world: World, stream: EdgeStream, what: str, rng: Random) -> None:
    """Do what a user may do in the stream's state."""
    if what == "close":
        if rng.random() < 0.2:
            stream.close()
    elif not stream.ended and what == "revise":
        keep = rng.choice((len(stream.log), len(stream.log), rng.randint(0, len(stream.log))))
        ids, tail = ([rng.randrange(3) for _ in range(rng.randint(0, 3))] for _ in range(2))
        world.touch(stream, urgent=stream.revise(keep, ids, tail))
    elif not stream.ended and what == "end":
        stream.end()
    elif stream.ended and what == "cancel":
        stream.cancel(rng.randint(0, len(stream.reply.ids)))
    elif stream.ended and what == "reopen":
        stream.reopen()


def heal(world: World, seed: int) -> None:
    """Let the link stand, the decoder answer all that is due, and compare."""
    world.notice_ends()
    world.connect(seed)
    world.settle()
    for stream in world.streams:
        if not stream.closed and stream.ended:
            world.scribe(stream).draw(2)
            world.scribe(stream).finish(Reason.STOP)
    world.settle()
    world.check_same()
    assert not any(stream.ended for stream in world.streams if not stream.closed)
    assert len(world.finished) == len(set(world.finished)), "a turn was answered twice"
    answered = {
        (stream.number, number)
        for stream in world.streams
        for number, turn in enumerate(stream.turns)
        if turn.reason != Reason.CANCELLED
    }
    assert answered == set(world.finished)
    for decoder in world.decoders:
        assert len(decoder.scribes) <= len(world.streams)


def walk(steps: list[tuple[str, int]], *, decoders: int, shared_link: bool) -> None:
    world = World(decoders=decoders, shared_link=shared_link)
    world.open()
    world.connect()
    for what, seed in steps:
        step(world, what, Random(seed))
    heal(world, len(steps))


walks = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1 << 16)), max_size=150)
bounded = settings(max_examples=60, deadline=None, derandomize=True)


@bounded
@given(walks, st.booleans())
def test_after_any_walk_both_ends_agree_and_nothing_was_sampled_twice(
    steps: list[tuple[str, int]], shared_link: bool
) -> None:
    walk(steps, decoders=1, shared_link=shared_link)


@bounded
@given(walks, st.booleans())
def test_after_any_walk_between_two_forgetful_decoders_both_ends_agree(
    steps: list[tuple[str, int]], shared_link: bool
) -> None:
    walk(steps, decoders=2, shared_link=shared_link)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_after_a_long_walk_both_ends_agree(first: int) -> None:
    for seed in range(first, first + 50):
        rng = Random(seed)
        steps = [(rng.choice(STEPS), rng.randrange(1 << 30)) for _ in range(400)]
        walk(steps, decoders=1 + seed % 2, shared_link=seed % 3 == 0)
