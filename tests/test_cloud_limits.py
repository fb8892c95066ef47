"""Limits on the relay: a device over its limit waits, loses nothing, and bothers nobody."""

import asyncio
import time
from typing import Any

import pytest

from cloud.engine.backlog import Backlog
from cloud.server import SLOW_CREDIT
from cloud.settings import AdmissionSettings, DeviceLimitSettings
from edge.agent import Agent
from shared.errors import TurnError
from shared.frames import RATE_LIMITED, Load
from shared.session import Noticed
from shared.session.cloud import CREDIT
from tests.test_cloud_server import World, answer, in_world


def limit(rate: float, burst: float) -> AdmissionSettings:
    """Return an admission under which a device has so much."""
    return AdmissionSettings(DeviceLimitSettings(rate, burst, 0.0))


def notices(agent: Agent) -> list[tuple[str, str]]:
    """Return a list that the decoder's notices to `agent` come into."""
    got: list[tuple[str, str]] = []
    hear = agent.on_events

    def on_events(events: Any) -> None:
        got.extend((e.topic, e.text) for e in events if isinstance(e, Noticed))
        hear(events)

    assert agent._link is not None
    agent._link._on_events = on_events
    return got


def credit(world: World, device: str) -> int:
    return world.decoder._connections[device].session.credit


@pytest.mark.parametrize("ahead_tokens", [0, 2])
def test_a_turn_over_the_limit_waits_is_told_so_and_gets_the_reply_it_would_have_got(
    ahead_tokens: int,
) -> None:
    async def test(world: World) -> None:
        async with world.agent("free") as agent, agent.conversation(max_tokens=40) as talk:
            expected = [await answer(talk, text) for text in ("Find a charger", "And home")]
        async with world.agent("car") as agent, agent.conversation(max_tokens=40) as talk:
            told = notices(agent)
            world.decoder.admission.charge("car", "default", 2000, time.monotonic())
            began = time.monotonic()
            got = []
            for text in ("Find a charger", "And home"):
                await talk.revise(text)
                await asyncio.sleep(0.1)
                got.append(await answer(talk, text))
            assert got == expected
            assert time.monotonic() - began >= 1.0
            assert [topic for topic, _ in told] == [RATE_LIMITED]
            assert "device car is over its limit (admission.device): the turn waits" in told[0][1]

    in_world(test, admission=limit(1000, 1000), ahead_tokens=ahead_tokens, ahead_after=0.02)


def test_words_of_a_device_over_its_limit_are_not_prefilled_before_it_is_within_it() -> None:
    async def test(world: World) -> None:
        engine = world.decoder.brain.engine
        async with world.agent("car") as agent, agent.conversation(max_tokens=4) as talk:
            await answer(talk, "Find a charger")
            await world.idle()
            (sequence,) = engine.sequences
            before = len(sequence.ids)
            world.decoder.admission.charge("car", "default", 1300, time.monotonic())
            await talk.revise("Some more words that come too soon")
            await asyncio.sleep(0.1)
            await world.idle()
            assert len(sequence.ids) == before
            assert credit(world, "car") == SLOW_CREDIT
            await asyncio.sleep(0.4)
            assert len(sequence.ids) > before, "they were not lost"
            await talk.revise("Some more words that come too soon or not")
            await asyncio.sleep(0.05)
            assert credit(world, "car") == CREDIT

    in_world(test, admission=limit(1000, 1000))


def test_a_device_over_its_limit_leaves_another_alone() -> None:
    async def test(world: World) -> None:
        world.decoder.admission.charge("flood", "default", 100_000, time.monotonic())
        async with world.agent("flood") as flood, world.agent("car") as car:
            told = notices(car)
            async with flood.conversation(max_tokens=50) as much:
                pieces = much.finish("Tell me everything")
                async with car.conversation(max_tokens=5) as talk:
                    for n in range(5):
                        assert await answer(talk, f"Find charger {n}")
                assert told == []
                assert credit(world, "car") == CREDIT
                assert much.reply is not None
                assert much.reply.ids == []
                await pieces.aclose()

    in_world(test, admission=limit(1000, 1000))


def test_a_waiting_turn_is_bounded_by_its_deadline() -> None:
    async def test(world: World) -> None:
        world.decoder.admission.charge("car", "default", 100_000, time.monotonic())
        async with world.agent("car") as agent:
            async with agent.conversation(max_tokens=5, deadline=0.2) as talk:
                with pytest.raises(TurnError, match=r"within 0\.2 s"):
                    await answer(talk, "Find a charger")

    in_world(test, admission=limit(1000, 1000))


@pytest.mark.parametrize("how", ["barge-in", "reopen", "goodbye", "the link"])
def test_a_turn_that_waits_may_be_interrupted_taken_back_and_left(how: str) -> None:
    async def test(world: World) -> None:
        async with world.agent("car") as agent:
            async with agent.conversation(max_tokens=5) as talk:
                world.decoder.admission.charge("car", "default", 1400, time.monotonic())
                pieces = talk.finish("Find a charger")
                await asyncio.sleep(0.05)
                assert talk.reply is not None
                assert "the turn waits" in talk.reply.waits
                if how == "barge-in":
                    await talk.revise("No, go home")
                    assert await answer(talk, "No, go home")
                elif how == "reopen":
                    talk.reopen()
                    assert await answer(talk, "Find a charger near home")
                elif how == "the link":
                    world.transports[-1].close()
                    assert [piece async for piece in pieces]
                    assert talk.reply.waits == ""
                await pieces.aclose()
            assert agent.num_reconnects == (how == "the link")
        device = world.decoder.admission._devices["default", "car"]
        await asyncio.sleep(0.1)
        assert device.active == 0

    in_world(test, admission=limit(1000, 1000))


def test_what_counts_are_the_ids_that_came_and_the_tokens_that_were_drawn() -> None:
    async def test(world: World) -> None:
        charges: list[int] = []
        admission = world.decoder.admission
        charge, done = admission.charge, admission.done

        def count(device: str, tenant: str, tokens: int, now: float) -> None:
            charges.append(tokens)
            charge(device, tenant, tokens, now)

        def give_back(device: str, tenant: str, unused: int, now: float) -> None:
            charges.append(-unused)
            done(device, tenant, unused, now)

        admission.charge, admission.done = count, give_back  # type: ignore[method-assign]
        async with world.agent("car") as agent, agent.conversation(max_tokens=30) as talk:
            opening = len(world.decoder.voice.template.opening(""))
            for text in ("Find", "Find a", "Find a charger", "Find a charger"):
                await talk.revise(text, stable=len(text))
                await asyncio.sleep(0.04)
            reply = await answer(talk, "Find a charger")
            turn = len(agent.tokenizer.encode("Find a charger"))
            await asyncio.sleep(0.05)
            spent = sum(charges) - opening
            drawn = len(reply) + (talk.reply is not None and talk.reply.reason == "stop")
            assert turn + len(reply) <= spent <= turn + drawn + 6, "a tail counts when it changes"
            before = sum(charges)
            world.transports[-1].close()
            await answer(talk, "")
            assert sum(charges) - before <= 30, "coming back with the same history costs nothing"

    in_world(test, max_tokens=30)


def test_replies_beyond_max_active_wait_for_those_under_way() -> None:
    async def one(agent: Agent) -> list[int]:
        async with agent.conversation(max_tokens=5) as talk:
            return await answer(talk, "Find a charger")

    async def test(world: World) -> None:
        async with world.agent("car") as agent:
            together = await asyncio.gather(*(one(agent) for _ in range(4)))
            assert len(set(map(tuple, together))) == 1

    in_world(test, admission=AdmissionSettings(max_active=1))


def test_vehicles_are_told_how_busy_the_engine_is() -> None:
    async def test(world: World) -> None:
        worker, engine = world.decoder.worker, world.decoder.brain.engine
        async with world.agent("car") as agent, agent.conversation(max_tokens=4) as talk:
            for backlog, load in (
                (Backlog(seconds=1.5, held=0.1), Load.YELLOW),
                (Backlog(seconds=0.1, held=0.97), Load.RED),
                (Backlog(seconds=0.1, held=0.1), Load.GREEN),
            ):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(type(engine), "backlog", backlog)
                    await answer(talk, "Find a charger")
                    await world.idle()
                    assert worker.load is load
                    await talk.revise("And home")
                    await answer(talk, "And home")
                    await asyncio.sleep(0.15)  # an acknowledgement may take a tenth of a second
                    assert agent._session.load is load

    in_world(test)
