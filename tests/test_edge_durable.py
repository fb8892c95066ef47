"""An agent with a spool: what it has said and heard outlives its process, exactly once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import pytest

from cloud.decoder import Brain
from cloud.server import Decoder
from edge.agent import Agent, connect
from edge.link import Link
from edge.spool import Spool
from edge.talk import Talk
from shared.errors import ConfigError, LinkError, ModelError, TurnError
from shared.frames import HelloBody, Reason
from shared.session import CloudStream, EdgeSession
from shared.transport import Transport
from shared.transport.loopback import LoopbackTransport, loopback_pair
from tests.brains import small_brain, small_settings, write_model

LONG = 400
"""Tokens of a reply that does not end while a test looks away."""


@cache
def model_folder() -> Path:
    return write_model(Path(mkdtemp(prefix="deltarelay-test-")) / "model")


class World:
    """Decoders that come and go, and agents of one device, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.decoder: Decoder | None = None
        self.transports: list[LoopbackTransport] = []

    async def start_decoder(self) -> None:
        settings = small_settings(model_folder(), precision="exact")
        self.decoder = Decoder(brain(), settings)
        await self.decoder.start([])

    async def stop_decoder(self) -> None:
        decoder, self.decoder = self.decoder, None
        if decoder is not None:
            await decoder.close()
            for sequence in list(brain().engine.sequences):
                brain().engine.remove(sequence)

    async def open(self) -> Transport:
        if self.decoder is None:
            raise LinkError("nobody is there")
        mine, theirs = loopback_pair()
        self.decoder.connect(theirs)
        self.transports.append(mine)
        return mine

    def avoid(self) -> None:
        pass

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Agent]:
        spool = Spool(self.folder)
        welcome = spool.welcome
        hello = HelloBody("car", "boot", epoch=welcome.epoch if welcome else 0)
        session = EdgeSession(hello, durable=True)
        agent = Agent(session, spool)
        link = Link(session, self, on_events=agent.on_events, on_lost=agent.on_lost)
        try:
            await agent.start(link, None)
            yield agent
        finally:
            await agent.close()

    def only_stream(self) -> CloudStream:
        """Return what the decoder has of the only conversation."""
        assert self.decoder is not None
        held = self.decoder.conversations
        [key] = held.keys
        conversation = held.get(*key)
        assert conversation is not None
        return conversation.stream

    async def undisturbed(self, texts: list[str], tokens: int) -> list[list[int]]:
        """Return the replies of a conversation that nothing happens to."""
        async with self.agent() as agent, agent.conversation(max_tokens=tokens) as talk:
            return [await answer(talk, text) for text in texts]


@cache
def brain() -> Brain:
    return small_brain(model_folder(), precision="exact")


def in_world(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        with TemporaryDirectory() as folder:
            world = World(Path(folder) / "spool")
            await world.start_decoder()
            try:
                async with asyncio.timeout(60):
                    await test(world)
            finally:
                await world.stop_decoder()

    asyncio.run(main())


async def answer(talk: Talk, text: str | None) -> list[int]:
    async for _ in talk.finish(text):
        pass
    return list(talk.stream.turns[-1].reply_ids)


async def read(talk: Talk) -> None:
    """Read a pending reply to its end."""
    async for _ in talk.resume():
        pass


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_new_process_goes_on_with_what_was_said_and_replied() -> None:
    async def test(world: World) -> None:
        texts = ["find a charger please", "and the one after that"]
        expected = await world.undisturbed(texts, 8)
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=8, keep=True) as talk:
                assert await answer(talk, texts[0]) == expected[0]
                await talk.revise("and the one af")
        async with world.agent() as agent:
            assert agent.kept == ["trip"]
            async with agent.conversation("trip", max_tokens=8, keep=True) as talk:
                assert talk.exchanges[0][0] == texts[0]
                assert texts[1].startswith(talk.text)
                assert talk.text
                assert await answer(talk, texts[1]) == expected[1]

    in_world(test)


def test_a_reply_under_way_goes_on_where_the_last_process_heard_it_end() -> None:
    async def test(world: World) -> None:
        expected = (await world.undisturbed(["tell me a long story"], LONG))[0]
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=LONG, keep=True) as talk:
                pieces = talk.finish("tell me a long story")
                await anext(pieces)
                held = len(talk.stream.reply.ids)
                assert 0 < held < LONG
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=LONG) as talk:
                assert talk.pending
                assert talk.reply is not None
                assert talk.reply.ids[:held] == expected[:held]
                shown = "".join([piece async for piece in talk.resume()])
                assert list(talk.stream.turns[0].reply_ids) == expected
                assert shown == talk.exchanges[0][1]

    in_world(test)


def test_another_decoder_goes_on_behind_the_ids_that_were_heard() -> None:
    async def test(world: World) -> None:
        expected = (await world.undisturbed(["tell me a long story"], LONG))[0]
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=LONG, keep=True) as talk:
                pieces = talk.finish("tell me a long story")
                await anext(pieces)
        await world.stop_decoder()
        await world.start_decoder()
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=LONG) as talk:
                async for _ in talk.resume():
                    pass
                assert list(talk.stream.turns[0].reply_ids) == expected

    in_world(test)


def test_a_reply_that_was_finished_while_nobody_was_there_arrives_afterwards() -> None:
    async def test(world: World) -> None:
        expected = (await world.undisturbed(["hello there"], 6))[0]
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=6, keep=True) as talk:
                talk.finish("hello there")
        assert world.decoder is not None
        stream = world.only_stream()
        await until(lambda: bool(stream.reason))
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=6) as talk:
                if talk.pending:
                    async for _ in talk.resume():
                        pass
                assert list(talk.stream.turns[0].reply_ids) == expected
                assert await answer(talk, "and now?")

    in_world(test)


def test_words_outlive_the_process_when_no_decoder_was_ever_told_of_them() -> None:
    async def test(world: World) -> None:
        expected = (await world.undisturbed(["find a charger please"], 8))[0]
        await world.stop_decoder()
        async with world.agent() as agent:
            assert not agent.is_connected
            async with agent.conversation("trip", max_tokens=8, keep=True) as talk:
                await talk.revise("find a charger")
                talk.finish("find a charger please")
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=8) as talk:
                assert talk.pending
                await world.start_decoder()
                async for _ in talk.resume():
                    pass
                assert list(talk.stream.turns[0].reply_ids) == expected

    in_world(test)


def test_without_a_spool_an_agent_needs_a_decoder_at_its_start() -> None:
    async def test(world: World) -> None:
        await world.stop_decoder()
        with pytest.raises(LinkError):
            async with world.agent():
                pass

    in_world(test)


def test_a_deadline_counts_without_a_decoder_and_across_processes() -> None:
    async def test(world: World) -> None:
        await world.undisturbed(["hi"], 2)
        await world.stop_decoder()
        async with world.agent() as agent:
            async with agent.conversation("trip", deadline=0.2, keep=True) as talk:
                with pytest.raises(TurnError, match=r"within 0\.2 s"):
                    await answer(talk, "is anybody there")
                assert talk.stream.turns[-1].reason == Reason.DEADLINE
                talk.finish("and now")
        await asyncio.sleep(1.3)
        async with world.agent() as agent:
            async with agent.conversation("trip", deadline=0.2, keep=True) as talk:
                with pytest.raises(TurnError):
                    async for _ in talk.resume():
                        pass
                assert [t.reason for t in talk.stream.turns] == [Reason.DEADLINE] * 2
                await world.start_decoder()
                await until(lambda: agent.is_connected)
                assert world.decoder is not None
                held = world.decoder.conversations
                await until(lambda: len(held) == 1 and world.only_stream().turn == 2)

    in_world(test)


def test_nothing_is_shown_before_it_is_on_disk_and_the_decoder_keeps_it_until_then() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            assert agent.spool is not None
            assert world.decoder is not None
            disk = agent.spool.outbox._using
            async with agent.conversation("trip", max_tokens=4) as talk:
                shown: list[str] = []

                async def read() -> None:
                    async for piece in talk.finish("hello"):
                        shown.append(piece)

                with disk:
                    reading = asyncio.create_task(read())
                    await until(lambda: bool(talk.stream.turns))
                    await asyncio.sleep(0.05)
                    assert shown == []
                    stream = next(
                        iter(world.decoder.conversations._entries.values())
                    ).conversation.stream
                    assert (stream.turn, stream.ended) == (0, True)
                await reading
                assert "".join(shown) == talk.exchanges[0][1]
                await until(lambda: stream.turn == 1)

    in_world(test)


def test_what_is_said_before_the_last_reply_is_on_disk_reaches_the_decoder_afterwards() -> None:
    async def test(world: World) -> None:
        texts = ["hello", "find a charger", "thanks"]
        expected = await world.undisturbed(texts, 5)
        async with world.agent() as agent:
            assert agent.spool is not None
            async with agent.conversation("trip", max_tokens=5) as talk:
                with agent.spool.outbox._using:
                    talk.finish(texts[0])
                    await until(lambda: len(talk.stream.turns) == 1)
                    await talk.revise("find a ch")
                    talk.finish(texts[1])
                    await asyncio.sleep(0.05)
                await until(lambda: len(talk.stream.turns) == 2)
                assert await answer(talk, texts[2]) == expected[2]
                assert [list(t.reply_ids) for t in talk.stream.turns] == expected

    in_world(test)


def test_other_terms_go_on_with_the_same_history() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=4, keep=True) as talk:
                await answer(talk, "hello")
                await talk.revise("find a")
            async with agent.conversation("trip", max_tokens=9, keep=True) as talk:
                assert len(talk.exchanges) == 1
                assert len(await answer(talk, "find a charger")) <= 9
                assert talk.stream.body.max_tokens == 9
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=9) as talk:
                assert len(talk.exchanges) == 2
            assert agent.kept == []

    in_world(test)


def test_a_conversation_that_was_left_for_good_is_not_on_disk_any_more() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=4) as talk:
                await answer(talk, "hello")
        async with world.agent() as agent:
            assert agent.kept == []

    in_world(test)


def test_a_conversation_that_was_refused_is_refused_again_not_waited_for() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            for _ in range(3):
                async with agent.conversation("trip", adapter="nobody's", keep=True) as talk:
                    with pytest.raises(ModelError, match="nobody's"):
                        async with asyncio.timeout(10):
                            await answer(talk, "hello") if not talk.pending else await read(talk)
            async with agent.conversation("trip", max_tokens=4) as talk:
                await read(talk)
                assert len(talk.stream.turns) == 1, "what was said is answered under other terms"

    in_world(test)


def test_a_conversation_is_in_one_hand_at_a_time() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation("trip"):
            with pytest.raises(ConfigError, match="in use"):
                async with agent.conversation("trip"):
                    pass

    in_world(test)


def test_a_full_disk_is_red_and_conversations_go_on() -> None:
    async def test(world: World) -> None:
        texts = ["hello", "find a charger"]
        expected = await world.undisturbed(texts, 5)
        async with world.agent() as agent:
            assert agent.spool is not None
            outbox = agent.spool.outbox
            async with agent.conversation("trip", max_tokens=5, keep=True) as talk:
                database = outbox._file._db
                with outbox._using:
                    pages = database.execute("PRAGMA page_count").fetchone()[0]
                    database.execute(f"PRAGMA max_page_count = {pages}")
                assert await answer(talk, texts[0]) == expected[0]
                for number in range(40):  # until no page has room
                    await talk.revise(f"find {number} " * 60)
                assert await answer(talk, texts[1]) == expected[1]
                assert "full" in outbox.trouble
                with outbox._using:
                    database.execute("PRAGMA max_page_count = 100000")
                await until(lambda: not outbox.trouble)
        async with world.agent() as agent:
            async with agent.conversation("trip", max_tokens=5) as talk:
                assert [list(t.reply_ids) for t in talk.stream.turns] == expected

    in_world(test)


def test_a_spool_wants_a_device_of_a_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with connect("shm:///nowhere", spool=tmp_path):
            pass

    with pytest.raises(ConfigError, match="name the device"):
        asyncio.run(test())
