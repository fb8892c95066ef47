"""Nothing is left behind: whatever is cancelled, and however often."""

import asyncio
import gc
import resource
from random import Random

import pytest

from cloud.completion import Ask, Request
from shared.frames import Sampling
from shared.tokenizer import decode
from tests.api_world import ApiWorld, in_api_world
from tests.test_cloud_api import chat, streamed
from tests.test_cloud_engine import brain, generation, run, some_ids
from tests.test_cloud_server import World, answer, in_world

ENDLESS = Sampling(logit_bias={5: 100.0})


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def drain(request: Request) -> list[int]:
    tokens: list[int] = []
    with request:
        async for _, piece in request.pieces():
            tokens += piece.tokens
    return tokens


def test_a_request_cancelled_at_any_moment_leaves_nothing() -> None:
    async def test(world: World) -> None:
        voice = world.decoder.voice
        for count in range(60):
            asks = [Ask([7, 8, 9 + count] * 9, ENDLESS, 30, num_replies=2), Ask([9] * 5)]
            task = asyncio.create_task(drain(Request(voice, asks)))
            await ticks(count)
            if count % 3 == 2:
                await asyncio.sleep(count / 20_000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    in_world(test)


def test_a_turn_cancelled_at_any_moment_leaves_nothing_and_the_next_is_answered() -> None:
    async def test(world: World) -> None:
        async with world.agent() as agent:
            for count in range(0, 60, 3):
                async with agent.conversation(max_tokens=40, sampling=ENDLESS) as talk:
                    await talk.revise("Find a")
                    task = asyncio.create_task(answer(talk, "Find a charger"))
                    await ticks(count)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            async with agent.conversation(max_tokens=4, sampling=ENDLESS) as talk:
                assert len(await answer(talk, "Find a charger")) == 4

    in_world(test)


def test_ten_times_more_aborts_than_the_cache_has_room_for_and_it_still_serves() -> None:
    async def test(world: World) -> None:
        voice = world.decoder.voice
        room = world.decoder.brain.num_blocks * 16 // 64
        for number in range(10 * room):
            request = Request(voice, [Ask(some_ids(Random(number), 64), ENDLESS, 100)])
            with request:
                await ticks(number % 4)
        assert len(await drain(Request(voice, [Ask([7] * 64, ENDLESS, 100)]))) == 100

    in_world(test, cache_mb=1)


def test_requests_twice_the_size_of_the_cache_all_finish() -> None:
    async def test(world: World) -> None:
        voice, blocks = world.decoder.voice, world.decoder.brain.num_blocks
        count = 2 * blocks * 16 // 300 + 1
        asks = [Ask(some_ids(Random(n), 200), ENDLESS, 100) for n in range(count)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(drain(Request(voice, [ask]))) for ask in asks]
        assert all(len(task.result()) == 100 for task in tasks)
        assert world.decoder.brain.engine.num_evictions > 0

    in_world(test, cache_mb=1)


def test_ids_handed_in_stay_as_they_were() -> None:
    engine = brain("exact").engine
    ids = some_ids(Random(2), 20)
    before = list(ids)
    sequence = engine.add()
    engine.splice(sequence, 0, ids)
    engine.generate(sequence, generation(5), 0.0)
    run(engine)
    assert ids == before
    assert len(sequence.ids) == 25


def test_a_burst_of_revisions_between_two_steps_is_one_change() -> None:
    engine = brain("exact").engine
    rng = Random(4)
    sequence, twin = engine.add(), engine.add()
    engine.splice(sequence, 0, some_ids(rng, 40))
    run(engine)
    final = sequence.ids[:30] + some_ids(rng, 5)
    for _ in range(50):
        keep = rng.randrange(len(sequence.ids) + 1)
        engine.splice(sequence, keep, some_ids(rng, rng.randrange(9)))
        engine.check()
    engine.splice(sequence, 0, final)
    engine.splice(twin, 0, final)
    replies = [generation(8), generation(8)]
    for one, reply in zip((sequence, twin), replies, strict=True):
        engine.generate(one, reply, 0.0)
    run(engine)
    assert sequence.ids == twin.ids


def test_a_stream_of_any_characters_never_splits_one() -> None:
    async def test(world: ApiWorld) -> None:
        tokenizer = world.decoder.brain.tokenizer
        ids = tokenizer.encode("日本語 한국어 Grüße 🚗")
        assert any(not _is_text(tokenizer.piece(token)) for token in ids)
        for token in set(ids):
            body = chat(logit_bias={str(token): 100}, max_tokens=30)
            events = await streamed(world, "/v1/chat/completions", body)
            deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
            assert "".join(deltas) == decode(tokenizer, [token] * 30)

    in_api_world(test)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_health_answers_while_a_long_prompt_is_run() -> None:
    async def test(world: ApiWorld) -> None:
        body = {"model": world.decoder.model, "prompt": [[9] * 480] * 40, "max_tokens": 1}
        asking = asyncio.create_task(world.http.post("/v1/completions", json=body))
        answers = 0
        while not asking.done():
            assert (await world.http.get("/health")).status_code == 200
            answers += 1
        assert (await asking).status_code == 200
        assert answers > 1

    in_api_world(test)


def _resident() -> int:
    """Kilobytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.slow
def test_ten_thousand_requests_that_only_append_leave_memory_flat() -> None:
    async def test(world: World) -> None:
        voice, rng = world.decoder.voice, Random(1)
        sizes: list[int] = []
        for number in range(10_000):
            await drain(Request(voice, [Ask(some_ids(rng, 40), max_tokens=1)]))
            if number % 2000 == 1999:
                gc.collect()
                sizes.append(_resident())
        assert sizes[-1] - sizes[0] < 4096, sizes

    in_world(test)


@pytest.mark.slow
def test_ten_thousand_revisions_in_one_conversation_leave_memory_flat() -> None:
    async def test(world: World) -> None:
        sizes: list[int] = []
        async with world.agent() as agent, agent.conversation(max_tokens=1) as talk:
            for number in range(2000):
                words = ""
                for word in ("find ", "a ", "charger ", "near ", "us "):
                    words += word
                    await talk.revise(words)
                await answer(talk, words)
                if number % 400 == 399:
                    gc.collect()
                    sizes.append(_resident())
        assert sizes[-1] - sizes[0] < 4096, sizes

    in_world(test)
