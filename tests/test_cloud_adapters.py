"""Adapters while a decoder serves: by name, by content, swapped between turns, never mixed up."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from cloud.adapters import Adapters
from cloud.decoder import load_brain
from cloud.engine.engine import Engine
from cloud.engine.sequence import Generation, Lane, Sequence
from edge.talk import Talk
from shared.errors import CapacityError, InputError, ModelError, TurnError
from shared.frames import Sampling
from shared.peft_folder import read_adapter, write_adapter
from tests.brains import small_settings
from tests.small_adapters import adapter_folder, random_adapter
from tests.test_cloud_server import World, answer, in_world, model_folder

TURNS = ("Find a charger", "And then home")
ENDLESS = Sampling(logit_bias={2: -100.0})


@cache
def folder(seed: int, rank: int = 4) -> Path:
    """A PEFT folder with random content."""
    return adapter_folder(
        Path(mkdtemp(prefix="deltarelay-test-")) / f"{seed}", seed, rank=rank, scale=0.3
    )


def digest(seed: int) -> str:
    return read_adapter(folder(seed)).digest


def adapter_world(test: Callable[[World, Adapters], Awaitable[None]], **changes: object) -> None:
    """Run `test` against a decoder with adapters "one" and "two"."""
    given: dict[str, object] = {"adapters": {"one": str(folder(1)), "two": str(folder(2))}}
    in_world(lambda world: test(world, world.decoder.voice.adapters), **(given | changes))


async def plain_replies(
    world: World, adapter: str, *texts: str, max_tokens: int = 8
) -> list[list[int]]:
    """What turns get in a conversation of their own."""
    async with (
        world.agent("plain") as agent,
        agent.conversation(max_tokens=max_tokens, adapter=adapter, sampling=ENDLESS) as talk,
    ):
        return [await answer(talk, text) for text in texts]


@contextmanager
def notices(talk: Talk) -> Iterator[list[tuple[str, str]]]:
    """Collect what the decoder tells about a conversation."""
    heard: list[tuple[str, str]] = []
    told = talk.noticed

    def noticed(topic: str, text: str) -> None:
        heard.append((topic, text))
        told(topic, text)

    talk.noticed = noticed  # type: ignore[method-assign]
    yield heard


def sequences(world: World) -> list[Sequence]:
    return list(world.decoder.brain.engine.sequences)


def test_conversations_with_two_adapters_and_none_at_once_get_the_replies_they_get_alone() -> None:
    async def test(world: World, _: Adapters) -> None:
        names = ["one", "two", "", "one"]
        alone = [await plain_replies(world, name, *TURNS) for name in names]
        assert len({tuple(map(tuple, replies)) for replies in alone}) == 3

        async def talk_of(number: int, name: str) -> list[list[int]]:
            async with (
                world.agent(f"car{number}") as agent,
                agent.conversation(max_tokens=8, adapter=name, sampling=ENDLESS) as talk,
            ):
                replies: list[list[int]] = []
                for text in TURNS:
                    await talk.revise(text[:6])
                    await asyncio.sleep(0.04)
                    replies.append(await answer(talk, text))
                return replies

        together = await asyncio.gather(*(talk_of(n, name) for n, name in enumerate(names)))
        assert list(together) == alone

    adapter_world(test)


def test_a_name_loaded_again_never_reuses_keys_and_values_of_its_old_content() -> None:
    async def test(world: World, adapters: Adapters) -> None:
        engine, long = world.decoder.brain.engine, " ".join(TURNS * 4)
        expected = [await plain_replies(world, name, long) for name in ("one", "two", "")]
        await adapters.load("fresh", folder(3))
        adopted = engine.num_adopted
        third = await plain_replies(world, "fresh", long)
        assert third not in expected
        assert engine.num_adopted == adopted
        await adapters.load("fresh", folder(2))  # the content of "two", whose blocks are there
        assert await plain_replies(world, "fresh", long) == expected[1]
        assert engine.num_adopted > adopted
        adopted = engine.num_adopted
        await adapters.load("fresh", folder(4))
        assert await plain_replies(world, "fresh", long) not in [*expected, third]
        assert engine.num_adopted == adopted

    adapter_world(test)


@pytest.mark.parametrize("when", ["words", "reply"])
def test_a_turn_ends_with_the_adapter_it_began_with_and_the_next_has_the_new_one(
    when: str,
) -> None:
    async def test(world: World, adapters: Adapters) -> None:
        [first] = await plain_replies(world, "one", TURNS[0])
        async with (
            world.agent() as agent,
            agent.conversation(max_tokens=8, adapter="one", sampling=ENDLESS) as talk,
        ):
            with notices(talk) as heard:
                await talk.revise("Find a")
                await asyncio.sleep(0.05)
                if when == "words":
                    await adapters.load("one", folder(3))
                pieces = talk.finish(TURNS[0])
                if when == "reply":
                    await anext(pieces)
                    await adapters.load("one", folder(3))
                async for _ in pieces:
                    pass
                assert list(talk.stream.turns[0].reply_ids) == first
                assert heard == []
                second = await answer(talk, TURNS[1])
            assert [topic for topic, _ in heard] == ["adapter"]
            assert digest(1) in heard[0][1]
            assert digest(3) in heard[0][1]
            conversation = world.decoder.conversations.get("car", talk.stream.body.conversation)
            assert conversation is not None
            user = talk.stream.turns[1].user_ids
            del conversation._history.turns[1]
            prompt, _ = conversation._history.asked(user)
        assert second == await direct_reply(world, "one", prompt, 8)

    adapter_world(test)


async def direct_reply(world: World, name: str, prompt: list[int], count: int) -> list[int]:
    """What the engine says behind a prompt."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    drawn: list[int] = []
    held: list[Sequence] = []
    adapter = world.decoder.voice.adapters.get(name)

    def deliver(token: int, why: str) -> None:
        drawn.append(token)
        if why:
            done.set_result(None)

    def begin(engine: Engine) -> None:
        sequence = engine.add("direct", adapter=adapter)  # shares nothing
        held.append(sequence)
        engine.splice(sequence, 0, prompt)
        engine.generate(sequence, Generation(ENDLESS, count, frozenset(), deliver), 0.0)

    world.decoder.worker.submit(begin)
    await done
    world.decoder.worker.submit(lambda engine: engine.remove(held[0]))
    return drawn


def test_between_turns_a_conversation_lets_go_of_what_was_swapped_or_unloaded() -> None:
    async def test(world: World, adapters: Adapters) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=8, adapter="one", sampling=ENDLESS) as talk:
                await answer(talk, TURNS[0])
                await asyncio.sleep(0.05)
                assert [s.adapter for s in sequences(world)] == [adapters.get("one")]
                await adapters.load("one", folder(3))
                await asyncio.sleep(0.05)
                assert sequences(world) == []
                await answer(talk, TURNS[1])
                await asyncio.sleep(0.05)
                assert [s.adapter for s in sequences(world)] == [adapters.get("one")]
                await adapters.unload("one")
                await asyncio.sleep(0.05)
                assert sequences(world) == []

    adapter_world(test)


def test_after_an_unload_the_open_turn_is_answered_the_next_refused_and_a_reload_goes_on() -> None:
    async def test(world: World, adapters: Adapters) -> None:
        expected = await plain_replies(world, "one", TURNS[0])
        base = await plain_replies(world, "", TURNS[0])
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=8, adapter="one", sampling=ENDLESS) as talk:
                await talk.revise("Find a")
                await asyncio.sleep(0.05)
                await adapters.unload("one")
                assert [await answer(talk, TURNS[0])] == expected
                for _ in range(2):
                    await talk.revise("And")
                    await asyncio.sleep(0.05)
                    with pytest.raises(TurnError, match="'one' was unloaded; loaded are: two"):
                        await answer(talk, TURNS[1])
                async with agent.conversation(max_tokens=8, sampling=ENDLESS) as other:
                    assert [await answer(other, TURNS[0])] == base
                await talk.revise("And then")
                await asyncio.sleep(0.05)
                await adapters.load("one", folder(1))
                got = await answer(talk, TURNS[1])
                assert len(got) == 8
        assert [await plain_replies(world, "one", *TURNS)] == [[*expected, got]]

    adapter_world(test)


def test_an_adapter_that_is_not_loaded_is_refused_on_its_stream_alone() -> None:
    async def test(world: World, _: Adapters) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=3) as good:
                async with agent.conversation(adapter="three") as talk:
                    with pytest.raises(ModelError, match=r"'three' is not loaded.*one, two"):
                        await answer(talk, "hello")
                assert await answer(good, "hello")

    adapter_world(test)


def test_a_reply_drawn_ahead_with_an_adapter_is_that_of_the_turn_sent_whole() -> None:
    async def test(world: World, _: Adapters) -> None:
        expected = await plain_replies(world, "two", TURNS[0])
        async with (
            world.agent() as agent,
            agent.conversation(max_tokens=8, adapter="two", sampling=ENDLESS) as talk,
        ):
            await talk.revise(TURNS[0])
            await asyncio.sleep(0.1)
            await world.idle()
            assert [await answer(talk, TURNS[0])] == expected
        assert world.decoder.voice.ahead_counts.adopted == 1

    adapter_world(test, ahead_tokens=3, ahead_after=0.02)


def test_a_swapped_conversation_prefills_its_history_behind_what_is_live() -> None:
    async def test(world: World, adapters: Adapters) -> None:
        async with (
            world.agent() as agent,
            agent.conversation(max_tokens=4, adapter="one", sampling=ENDLESS) as talk,
        ):
            await answer(talk, TURNS[0])
            await adapters.load("one", folder(3))
            await talk.revise("And")
            await asyncio.sleep(0.05)
            assert [s.lane for s in sequences(world)] == [Lane.BULK]
            await talk.revise("And then")
            await asyncio.sleep(0.05)
            assert [s.lane for s in sequences(world)] == [Lane.BULK]
            await answer(talk, TURNS[1])
            await talk.revise("Thanks")
            await asyncio.sleep(0.05)
            assert [s.lane for s in sequences(world)] == [Lane.LIVE]

    adapter_world(test)


def test_no_more_adapters_than_the_bound_and_a_swap_needs_no_further_room() -> None:
    async def test(world: World, adapters: Adapters) -> None:
        with pytest.raises(CapacityError, match="2 adapters are in memory, max_adapters = 2"):
            await adapters.load("three", folder(3))
        await adapters.load("again", folder(1))  # content that is there takes no room
        assert adapters.get("again") is adapters.get("one")
        await adapters.unload("again")
        async with (
            world.agent() as agent,
            agent.conversation(max_tokens=4, adapter="one", sampling=ENDLESS) as talk,
        ):
            await talk.revise("Find a")
            await asyncio.sleep(0.05)
            await adapters.load("one", folder(3))
            with pytest.raises(CapacityError, match=digest(1)[:12]):  # its turn is open
                await adapters.load("two", folder(4))
            await adapters.load("one", folder(1))  # it is still there
            assert len(await answer(talk, TURNS[0])) == 4
        await adapters.load("two", folder(4))
        assert adapters.names() == ["one", "two"]
        await adapters.unload("two")
        await adapters.load("three", folder(3))

    adapter_world(test, max_adapters=2)


def test_what_cannot_be_loaded_leaves_the_name_as_it_was(tmp_path: Path) -> None:
    other = random_adapter(5)
    wrong = {f"layers.7.{name.split('.')[2]}": pair for name, pair in other.pairs.items()}
    write_adapter(tmp_path, type(other)(wrong))

    async def test(_: World, adapters: Adapters) -> None:
        before = adapters.get("one")
        with pytest.raises(ModelError, match="another model"):
            await adapters.load("one", tmp_path)
        with pytest.raises(ModelError, match=r"adapter_config\.json"):
            await adapters.load("one", tmp_path / "nowhere")
        with pytest.raises(CapacityError, match=r"rank is 20.*max_lora_rank = 16"):
            await adapters.load("one", folder(1, 20))
        with pytest.raises(InputError, match="printable"):
            await adapters.load("", folder(1))
        with pytest.raises(ModelError, match=r"'three' is not loaded.*one, two"):
            await adapters.unload("three")
        assert adapters.get("one") is before

    adapter_world(test, max_lora_rank=16)


def test_two_loads_at_once_keep_to_the_bound() -> None:
    async def test(_: World, adapters: Adapters) -> None:
        loads = (adapters.load("three", folder(3)), adapters.load("four", folder(4)))
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert sum(isinstance(result, CapacityError) for result in results) == 1
        assert len(adapters.names()) == 3

    adapter_world(test, max_adapters=3)


def test_a_decoder_does_not_start_with_an_adapter_that_cannot_be_used(tmp_path: Path) -> None:
    for given, changes, error in (
        ({"one": str(tmp_path)}, {}, ModelError),
        ({"one": str(folder(1)), "two": str(folder(2))}, {"max_adapters": 1}, CapacityError),
        ({"one": str(folder(1))}, {"max_lora_rank": 2}, CapacityError),
    ):
        with pytest.raises(error):
            load_brain(small_settings(model_folder(), adapters=given, **changes))
