"""Replies drawn before the turn has ended: adopted when it ends unchanged, else without a trace."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cloud.ahead import MAX_TRIES, AheadCounts
from tests.test_cloud_server import World, answer, in_world

AFTER = 0.02


def ahead_world(test: Callable[[World], Awaitable[None]], tokens: int = 3) -> None:
    in_world(test, ahead_tokens=tokens, ahead_after=AFTER)


def counts(world: World) -> AheadCounts:
    return world.decoder.voice.ahead_counts


async def quiet(world: World) -> None:
    """Wait until a draft is drawn as far as it may be."""
    await asyncio.sleep(AFTER + 0.05)
    await world.idle()


async def plain_replies(world: World, *texts: str, **options: object) -> list[list[int]]:
    """What the same turns get when they are sent whole."""
    async with (
        world.agent("plain") as agent,
        agent.conversation(**options) as talk,  # type: ignore[arg-type]
    ):
        return [await answer(talk, text) for text in texts]


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_a_turn_that_ends_as_it_stood_gets_its_reply_from_the_draft(tokens: int) -> None:
    async def test(world: World) -> None:
        texts = ("Find a charger", "And then home")
        expected = await plain_replies(world, *texts, max_tokens=9)
        async with world.agent() as agent, agent.conversation(max_tokens=9) as talk:
            for number, text in enumerate(texts):
                await talk.revise(text)
                await quiet(world)
                assert counts(world).tried == number + 1
                assert await answer(talk, text) == expected[number]
        assert (counts(world).adopted, counts(world).dropped) == (2, 0)
        assert len(counts(world).seconds) == 2

    ahead_world(test, tokens)


def test_the_tokens_of_a_draft_go_out_without_a_step() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=9) as talk:
            await talk.revise("Find a charger")
            await quiet(world)
            steps = world.decoder.worker.num_steps
            pieces = talk.finish("Find a charger")
            await anext(pieces)
            assert world.decoder.worker.num_steps <= steps + 1
            async for _ in pieces:
                pass

    ahead_world(test)


def test_one_word_more_and_the_draft_is_forgotten() -> None:
    async def test(world: World) -> None:
        [expected] = await plain_replies(world, "Find a charger near home", max_tokens=9)
        async with world.agent() as agent, agent.conversation(max_tokens=9) as talk:
            await talk.revise("Find a charger")
            await quiet(world)
            assert await answer(talk, "Find a charger near home") == expected
        assert (counts(world).tried, counts(world).adopted, counts(world).dropped) == (1, 0, 1)

    ahead_world(test)


def test_words_taken_back_and_said_again_are_drafted_anew_a_few_times_only() -> None:
    async def test(world: World) -> None:
        texts = ["Find", "Find a", "Find", "Find a", "Find", "Find a charger"]
        [expected] = await plain_replies(world, texts[-1], max_tokens=9)
        async with world.agent() as agent, agent.conversation(max_tokens=9) as talk:
            for text in texts:
                await talk.revise(text)
                await quiet(world)
            assert counts(world).tried == MAX_TRIES
            assert await answer(talk, texts[-1]) == expected
            await talk.revise("And home")
            await quiet(world)
            assert counts(world).tried == MAX_TRIES + 1  # the next turn has its own

    ahead_world(test)


def test_nothing_is_drawn_ahead_of_a_turn_without_words_or_when_it_is_switched_off() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=4) as talk:
            await talk.revise("Find")
            await talk.revise("")
            await quiet(world)
            assert (
                counts(world).tried == counts(world).dropped
            )  # of "Find", before it was taken back
            await answer(talk, "Find a charger")

    ahead_world(test)

    async def off(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=4) as talk:
            await talk.revise("Find")
            await quiet(world)
            assert counts(world).tried == 0

    ahead_world(off, tokens=0)


def test_an_adopted_reply_keeps_to_its_stop_strings_and_its_length() -> None:
    async def test(world: World) -> None:
        async with world.agent("plain") as agent, agent.conversation(max_tokens=12) as talk:
            text = "".join([piece async for piece in talk.finish("Find a charger")])
        stop = text[2:4]
        options = {"max_tokens": 12, "stop": [stop]}
        [expected] = await plain_replies(world, "Find a charger", **options)
        async with world.agent() as agent, agent.conversation(max_tokens=12, stop=[stop]) as talk:
            await talk.revise("Find a charger")
            await quiet(world)
            assert await answer(talk, "Find a charger") == expected

    ahead_world(test, tokens=8)


def test_an_end_taken_back_after_a_draft_was_adopted_leaves_nothing() -> None:
    async def test(world: World) -> None:
        [expected] = await plain_replies(world, "Find a charger at home", max_tokens=9)
        async with world.agent() as agent, agent.conversation(max_tokens=9) as talk:
            await talk.revise("Find a charger")
            await quiet(world)
            pieces = talk.finish("Find a charger")
            await asyncio.sleep(0)
            talk.reopen()
            await pieces.aclose()
            await talk.revise("Find a charger at")
            await quiet(world)
            assert await answer(talk, "Find a charger at home") == expected

    ahead_world(test)


def test_a_conversation_closed_beside_its_draft_leaves_nothing() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=9) as talk:
            await talk.revise("Find a charger")
            await asyncio.sleep(AFTER + 0.005)

    ahead_world(test)
