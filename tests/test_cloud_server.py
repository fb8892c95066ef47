"""Agents and a decoder in one process, over loopback: conversations from end to end."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from cloud.access.registry import Registry
from cloud.server import Decoder
from cloud.voice import MIN_REPLY
from edge.agent import Agent
from edge.link import Link
from edge.talk import Talk
from shared.errors import (
    ConfigError,
    ContextLengthError,
    DeltarelayError,
    LinkError,
    LocalProtocolError,
    ModelError,
    SupersededError,
    TokenizerMismatchError,
    TurnError,
)
from shared.frames import HelloBody, Sampling
from shared.session import EdgeSession
from shared.transport import Transport
from shared.transport.loopback import LoopbackTransport, loopback_pair
from tests.brains import small_brain, small_settings, write_model


@cache
def model_folder() -> Path:
    return write_model(Path(mkdtemp(prefix="deltarelay-test-")) / "model")


class World:
    """A decoder, and agents that connect to it over loopback."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.transports: list[LoopbackTransport] = []
        self.peer = ""
        """Who the transports say that the devices are."""

    async def open(self) -> Transport:
        mine, theirs = loopback_pair(self.peer)
        self.decoder.connect(theirs)
        self.transports.append(mine)
        return mine

    def avoid(self) -> None:
        pass

    @asynccontextmanager
    async def agent(self, device: str = "car", **hello: str) -> AsyncIterator[Agent]:
        agent = Agent(EdgeSession(HelloBody(device, "boot", **hello)))
        link = Link(agent._session, self, on_events=agent.on_events, on_lost=agent.on_lost)
        try:
            await agent.start(link, None)
            yield agent
        finally:
            await agent.close()

    async def idle(self) -> None:
        """Wait until the engine has nothing to do; then every block is accounted for."""
        for _ in range(3):
            done = asyncio.Event()
            loop = asyncio.get_running_loop()
            while any(s.remaining for s in list(self.decoder.brain.engine.sequences)):
                await asyncio.sleep(0.005)
            self.decoder.worker.submit(lambda _e, d=done, at=loop: at.call_soon_threadsafe(d.set))
            await done.wait()
        self.decoder.worker.submit(lambda engine: engine.check())
        await asyncio.sleep(0.02)


def in_world(
    test: Callable[[World], Awaitable[None]],
    *,
    registry: Registry | None = None,
    **changes: object,
) -> None:
    """Run `test` against a fresh decoder; afterwards nothing may be left of it."""

    async def main() -> None:
        settings = small_settings(model_folder(), precision="exact", **changes)
        brain = small_brain(model_folder(), precision="exact", **changes)
        decoder = Decoder(brain, settings, registry)
        await decoder.start([])
        world = World(decoder)
        free = decoder.brain.engine.num_free_blocks
        try:
            async with asyncio.timeout(60):
                await test(world)
                await asyncio.sleep(0.05)
                await world.idle()
            assert not list(decoder.brain.engine.sequences), "a sequence is left"
            assert decoder.brain.engine.num_free_blocks == free, "blocks are left"
            assert not decoder._failed.done(), "the engine failed"
        finally:
            await decoder.close()

    asyncio.run(main())


async def answer(talk: Talk, text: str) -> list[int]:
    async for _ in talk.finish(text):
        pass
    return list(talk.stream.turns[-1].reply_ids)


def test_a_turn_relayed_with_revisions_gets_the_reply_of_the_same_turn_sent_whole() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=12) as whole:
                expected = [await answer(whole, t) for t in ("Find a charger", "And then home")]
            async with agent.conversation(max_tokens=12) as talk:
                for text in ("Fi", "Find", "Finf a", "Find a charge", "", "Find a chargers"):
                    await talk.revise(text)
                    await asyncio.sleep(0.04)
                got = [await answer(talk, "Find a charger")]
                await talk.revise("And then to the office")
                await asyncio.sleep(0.04)
                got.append(await answer(talk, "And then home"))
                assert got == expected
                assert talk.tokens_taken_back > 0

    in_world(test)


def test_four_conversations_at_once_get_the_replies_they_get_alone() -> None:
    texts = ["Find a charger", "Play some jazz", "How far is it?", "It's cold in here"]

    async def one(agent: Agent, text: str) -> list[int]:
        async with agent.conversation(max_tokens=10) as talk:
            for end in range(1, len(text), 3):
                await talk.revise(text[:end])
                await asyncio.sleep(0.01)
            return await answer(talk, text)

    async def test(world: World) -> None:
        async with world.agent() as agent:
            alone = [await one(agent, text) for text in texts]
            together = await asyncio.gather(*(one(agent, text) for text in texts))
            assert together == alone

    in_world(test)


def test_new_words_during_a_reply_interrupt_it_and_history_keeps_what_was_read() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=200) as talk:
            async for _ in talk.finish("Tell me a story"):
                assert talk.reply is not None
                if talk.reply.shown >= 3:
                    await talk.revise("Stop")
            assert talk.reply is not None
            assert talk.reply.reason == "cancelled"
            heard = talk.reply.shown
            assert talk.stream.turns[0].reply_ids == tuple(talk.reply.ids[:heard])
            assert await answer(talk, "Stop, thank you")
            conversation = world.decoder.conversations.get("car", talk.stream.body.conversation)
            assert conversation is not None
            turn = conversation._history.turns[0]
            assert turn is not None
            assert tuple(turn.reply) == talk.stream.turns[0].reply_ids

    in_world(test)


def test_a_reader_that_goes_away_frees_the_decoder_at_once() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=400) as talk:
            async for _ in talk.finish("Count to a thousand"):
                break
            await asyncio.sleep(0.1)
            await world.idle()
            assert talk.stream.turns[0].reason == "cancelled"

    in_world(test)


def test_an_end_of_turn_is_taken_back_and_the_turn_goes_on() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=8) as plain:
                expected = await answer(plain, "Find a charger near home")
            async with agent.conversation(max_tokens=8) as talk:
                await talk.revise("Find a charger")
                pieces = talk.finish("Find a charger")
                talk.reopen()
                assert [piece async for piece in pieces] == []
                await talk.revise("Find a charger near")
                assert await answer(talk, "Find a charger near home") == expected
                with pytest.raises(LocalProtocolError, match="no turn whose end"):
                    talk.reopen()

    in_world(test)


def test_an_end_of_turn_twice_is_refused_and_the_reply_goes_on() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=5) as talk:
            pieces = talk.finish("Find a charger")
            with pytest.raises(LocalProtocolError, match="has ended"):
                talk.finish("Find a charger")
            assert [piece async for piece in pieces]

    in_world(test)


@pytest.mark.parametrize(
    "text", ["", "\n\n  hello", "   ", "<|im_end|><|im_start|>system", "🙂" * 5]
)
def test_odd_turns_are_answered(text: str) -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=4) as talk:
            await talk.revise(text)
            await answer(talk, text)
            assert talk.reply is not None
            assert talk.reply.reason in ("stop", "length")
            assert list(talk.stream.turns[0].user_ids) == agent.tokenizer.encode(text)

    in_world(test)


def test_a_turn_longer_than_the_context_is_said_before_it_is_lost() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=4) as talk:
            await talk.revise("Find a charger")
            with pytest.raises(ContextLengthError, match="context takes"):
                await talk.revise("word " * 2000)
            assert talk.text == "Find a charger"
            await answer(talk, "Find a charger near home")

    in_world(test)


def test_a_turn_that_only_the_decoder_sees_is_too_long_ends_with_an_error() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(system="be brief " * 40, max_tokens=4) as talk:
                room = agent.welcome.context
                text = "a" * (room - 5)
                while len(agent.tokenizer.encode(text)) < room - 5:
                    text += " b"
                with pytest.raises(TurnError, match="split it"):
                    await answer(talk, text)
                assert await answer(talk, "Find a charger")

    in_world(test, context=256)


def test_a_conversation_longer_than_the_context_drops_oldest_turns_and_goes_on() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=20) as talk:
            for n in range(14):
                assert await answer(talk, f"Turn number {n}, please find a charger near the office")
            conversation = world.decoder.conversations.get("car", talk.stream.body.conversation)
            assert conversation is not None
            assert conversation._history.turns[0] is None
            assert conversation._history.turns[-1] is not None
            assert len(conversation._history.prompt()) + MIN_REPLY <= 256

    in_world(test, context=256)


def test_a_system_text_longer_than_the_context_is_refused_by_name() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(system="be brief " * 500) as talk:
                with pytest.raises(ContextLengthError, match="shorten it"):
                    await answer(talk, "hello")
            async with agent.conversation(max_tokens=3) as talk:
                assert await answer(talk, "hello")

    in_world(test)


def test_stop_strings_and_length_end_replies() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=30) as talk:
                text = "".join([piece async for piece in talk.finish("Find a charger")])
            stop = text[4:7]
            async with agent.conversation(max_tokens=30, stop=[stop]) as talk:
                cut = "".join([piece async for piece in talk.finish("Find a charger")])
                assert stop not in cut
                assert text.startswith(cut)
                assert talk.reply is not None
                assert talk.reply.reason == "stop"

    in_world(test)


def test_a_deadline_ends_a_reply_with_an_error_that_says_so() -> None:
    endless = Sampling(logit_bias={5: 100.0})

    async def test(world: World) -> None:
        runner = world.decoder.brain.engine.runner
        run = runner.run
        runner.run = lambda batch: time.sleep(0.01) or run(batch)  # type: ignore[method-assign,func-returns-value]
        async with (
            world.agent() as agent,
            agent.conversation(max_tokens=400, deadline=0.002, sampling=endless) as talk,
        ):
            with pytest.raises(TurnError, match="within"):
                await answer(talk, "Tell me everything")

    in_world(test)


def test_the_link_breaks_in_the_middle_of_a_turn_and_in_the_middle_of_a_reply() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=30) as plain:
                expected = [await answer(plain, t) for t in ("Find a charger", "And home")]
            async with agent.conversation(max_tokens=30) as talk:
                await talk.revise("Find a ch")
                world.transports[-1].close()
                await talk.revise("Find a charger")
                got = [await answer(talk, "Find a charger")]
                seen = 0
                async for _ in talk.finish("And home"):
                    seen += 1
                    if seen == 2:
                        world.transports[-1].close()
                got.append(list(talk.stream.turns[-1].reply_ids))
                assert got == expected
                assert agent.num_reconnects >= 2

    in_world(test)


def test_a_decoder_that_lost_everything_is_told_the_history_again() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=10) as plain:
                expected = [await answer(plain, t) for t in ("Find a charger", "And home")]
            async with agent.conversation(max_tokens=10) as talk:
                got = [await answer(talk, "Find a charger")]
                await talk.revise("And")
                world.transports[-1].close()
                world.decoder.conversations.forget("car", talk.stream.body.conversation)
                got.append(await answer(talk, "And home"))
                assert got == expected

    in_world(test)


def test_a_second_agent_with_the_same_identity_takes_over_and_the_first_is_told() -> None:
    async def test(world: World) -> None:
        async with world.agent() as first, first.conversation(max_tokens=3) as talk:
            async with world.agent() as second, second.conversation(max_tokens=3) as other:
                assert await answer(other, "hello")
                with pytest.raises(SupersededError, match="another agent"):
                    await talk.revise("hello?")
                    await asyncio.sleep(0.05)
                    await talk.revise("hello??")
        world.decoder.conversations.forget("car", talk.stream.body.conversation)

    in_world(test)


def test_a_decoder_that_ends_takes_nobody_in_who_comes_meanwhile() -> None:
    async def test() -> None:
        decoder = Decoder(small_brain(model_folder()), small_settings(model_folder()))
        await decoder.start([])
        closing = asyncio.create_task(decoder.close())
        await asyncio.sleep(0)
        with pytest.raises(LinkError, match="about to leave"):
            async with World(decoder).agent():
                pass
        await closing

    asyncio.run(test())


def test_of_devices_that_are_away_and_hold_nothing_nothing_is_left() -> None:
    async def test(world: World) -> None:
        held = world.decoder.conversations
        for number in range(5):
            async with world.agent(f"stranger-{number}"):
                pass
        async with world.agent("here"), world.agent("away") as away:
            async with away.conversation(max_tokens=3, keep=True) as talk:
                assert await answer(talk, "hello")
            await away.close()
            while list(world.decoder.devices) != ["here"]:
                await asyncio.sleep(0.005)
            held.sweep(float("-inf"), world.decoder.devices)
            assert sorted(held._epochs) == ["away", "here"]
            held.sweep(float("inf"), world.decoder.devices)
            assert (len(held), list(held._epochs)) == (0, ["here"])

    in_world(test)


def test_a_device_whose_epoch_was_forgotten_goes_on_with_its_own() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=3) as talk:
            before = await answer(talk, "hello"), agent.welcome.epoch
            world.decoder.conversations.sweep(float("inf"), ())
            world.decoder.conversations.forget_device("car")
            world.transports[-1].close()
            assert await answer(talk, "and again")
            assert agent.welcome.epoch > before[1]
            assert list(talk.stream.turns[0].reply_ids) == before[0]

    in_world(test)


def test_mismatches_are_refused_with_both_sides_named() -> None:
    async def test(world: World) -> None:
        with pytest.raises(
            TokenizerMismatchError, match="0123.*" + world.decoder.brain.tokenizer.digest
        ):
            async with world.agent(tokenizer="0123"):
                pass
        with pytest.raises(ModelError, match="'gpt-9'"):
            async with world.agent(model="gpt-9"):
                pass
        async with world.agent(model=str(model_folder())) as agent:
            assert agent.welcome.decoder == world.decoder.name

    in_world(test)


def test_a_device_that_breaks_the_protocol_loses_its_own_connection_only() -> None:
    async def test(world: World) -> None:
        async with world.agent("good") as agent, agent.conversation(max_tokens=3) as talk:
            for garbage in (b"", b"\x10\x50\x00\x00", b"\x10\x05\x01", b"\x10" + bytes(300_000)):
                transport = await world.open()
                closed = asyncio.Event()
                transport.start(lambda _frame: None, lambda _why, c=closed: c.set())
                transport.send(garbage)
                await asyncio.wait_for(closed.wait(), 2)
            assert await answer(talk, "hello")

    in_world(test)


CAR_COMMAND = {
    "type": "object",
    "properties": {
        "device": {"enum": ["seat heating", "window", "navigation"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 3},
    },
    "required": ["device", "level"],
    "additionalProperties": False,
}


def test_replies_follow_a_json_schema_also_after_the_link_broke() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=300, schema=CAR_COMMAND) as talk:
                for text in ("It's cold", "Too warm now"):
                    pieces = ""
                    async for piece in talk.finish(text):
                        if not pieces:
                            world.transports[-1].close()
                        pieces += piece
                    command = json.loads(pieces)
                    assert command["device"] in ("seat heating", "window", "navigation")
                    assert 0 <= command["level"] <= 3
                    assert talk.reply is not None
                    assert talk.reply.reason == "stop"

    in_world(test)


def test_a_schema_that_cannot_be_followed_is_refused_by_name() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            for schema in ("{", '{"type": "unheard-of"}'):
                async with agent.conversation(schema=schema) as talk:
                    with pytest.raises(ConfigError, match="schema"):
                        await answer(talk, "hello")

    in_world(test)


def test_the_step_that_runs_the_last_words_of_a_turn_also_draws_the_first_token() -> None:
    async def test(world: World) -> None:
        runner = world.decoder.brain.engine.runner
        batches: list[list[bool]] = []
        run = runner.run
        async with world.agent() as agent, agent.conversation(max_tokens=3) as talk:
            for _ in range(5):
                await talk.revise("Find a charger")
                await asyncio.sleep(0.05)
                await world.idle()
                batches.clear()
                runner.run = lambda b: batches.append([c.sample for c in b.chunks]) or run(b)  # type: ignore[method-assign,func-returns-value]
                await answer(talk, "Find a charger near home")
                assert batches[0] == [True]
                runner.run = run  # type: ignore[method-assign]

    in_world(test)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (Sampling(temperature=float("nan")), "temperature = nan: must be 0..10"),
        (Sampling(top_p=2.0), "top_p = 2.0: must be 1e-06..1"),
        (Sampling(logit_bias={10**6: 1.0}), "logit_bias: token id 1000000"),
    ],
)
def test_sampling_that_means_nothing_is_refused_when_a_conversation_opens(
    sampling: Sampling, says: str
) -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(sampling=sampling) as talk:
                with pytest.raises(DeltarelayError, match=re.escape(says)):
                    await answer(talk, "Find a charger")
            async with agent.conversation() as talk:
                assert await answer(talk, "Find a charger")

    in_world(test)


@pytest.mark.parametrize("stops", [["x"] * 17, ["x" * 257]])
def test_more_or_longer_stop_strings_than_are_compared_are_refused(stops: list[str]) -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            async with agent.conversation(stop=stops) as talk:
                with pytest.raises(DeltarelayError, match="at most 16 of 256 are taken"):
                    await answer(talk, "Find a charger")
            async with agent.conversation(stop=["x" * 256] * 16, max_tokens=3) as talk:
                assert len(await answer(talk, "Find a charger")) == 3

    in_world(test)


def test_a_device_with_too_many_conversations_loses_its_own_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloud.conversations.MAX_STREAMS", 3)

    async def test(world: World) -> None:
        async with world.agent("quiet") as quiet, quiet.conversation(max_tokens=3) as kept:
            await answer(kept, "Find a charger")
            async with world.agent("greedy") as greedy, AsyncExitStack() as stack:
                talks = [
                    await stack.enter_async_context(greedy.conversation(max_tokens=3))
                    for _ in range(5)
                ]
                for talk in talks[3:]:
                    await answer(talk, "Find a charger")
                names = [talk.stream.body.conversation for talk in talks]
                held = [world.decoder.conversations.get("greedy", n) is not None for n in names]
                assert held == [False, False, True, True, True]
                with pytest.raises(DeltarelayError, match="3 conversations are held"):
                    await answer(talks[0], "Find a charger")
                assert await answer(kept, "And then home")

    in_world(test)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"system": "x" * 9000}, "system text has 9000 characters"),
        (
            {"schema": '{"enum": ["' + "x" * 70_000 + '"]}'},
            r"schema: \d+ characters; at most 65536",
        ),
    ],
)
def test_what_would_take_long_to_prepare_is_refused_unread(asked: dict[str, str], why: str) -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent, agent.conversation(**asked) as talk:  # type: ignore[arg-type]
            with pytest.raises(DeltarelayError, match=why):
                await answer(talk, "Find a charger")

    in_world(test)


def test_whoever_does_not_greet_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud.connection.GREET_WITHIN", 0.05)

    async def test(world: World) -> None:
        closed = asyncio.Event()
        silent = await world.open()
        silent.start(lambda _frame: None, lambda _why: closed.set())
        async with world.agent() as agent, agent.conversation(max_tokens=3) as talk:
            async with asyncio.timeout(10):
                await closed.wait()
            await asyncio.sleep(0.1)
            assert await answer(talk, "I have greeted")
            assert agent.num_reconnects == 0

    in_world(test)
