"""A decoder that is killed and starts again, over loopback: what it takes up, and what it must not.

A kill leaves what is in the folder at that moment: the tests copy it, and start another decoder on
the copy.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from cloud.server import Decoder
from cloud.snapshot.counts import SnapshotCounts
from cloud.snapshot.reader import read_conversations
from edge.talk import Talk
from shared.errors import ModelError
from shared.frames import Sampling
from shared.transport import Transport
from tests.brains import small_brain, small_settings
from tests.small_adapters import adapter_folder
from tests.test_cloud_adapters import notices
from tests.test_cloud_server import World, answer, model_folder

LONG = "Find a charger near the office that is open at night and has a place to sit and coffee "
TEXTS = ("Find a charger", "And then home", "How far is it?")
Scene = Callable[["Hall"], Awaitable[None]]


class Hall(World):
    """A world whose decoder is killed and started again."""

    def __init__(self, root: Path, changes: dict[str, object]) -> None:
        self._root, self._changes, self._starts = root, changes, 0
        super().__init__(self._make(root / "0"))
        self.reachable = asyncio.Event()
        self.reachable.set()

    async def open(self) -> Transport:
        await self.reachable.wait()
        return await super().open()

    @property
    def folder(self) -> Path:
        """Where the decoder that runs writes."""
        return self._root / str(self._starts)

    @property
    def counts(self) -> SnapshotCounts:
        assert self.decoder.snapshots is not None
        return self.decoder.snapshots.counts

    @property
    def adopted(self) -> int:
        """Tokens that this decoder's sequences found in the pool."""
        return self.decoder.brain.engine.num_adopted

    @property
    def run(self) -> int:
        """Tokens that this decoder ran, but for those of its warming up."""
        return self.decoder.brain.engine.num_tokens - self._warmed_up

    async def kill(
        self, damage: Callable[[Path], None] = lambda _folder: None, **changes: object
    ) -> None:
        """Kill the decoder and start another one on what it left, after `damage` to it."""
        left = self._root / str(self._starts + 1)
        shutil.copytree(self.folder, left, copy_function=copy_if_there)
        self._starts += 1
        damage(left)
        await self.decoder.close()
        self._changes |= changes
        self.decoder = self._make(left)
        await self.decoder.start([])

    async def written(self) -> None:
        """Wait until everything is in files."""
        snapshots, decoder = self.decoder.snapshots, self.decoder
        assert snapshots is not None
        await self.idle()
        until = time.monotonic() + 20
        while True:
            live = {key: decoder.conversations.get(*key) for key in decoder.conversations.keys}
            if all(c and snapshots._written.get(k, 0.0) >= c.touched for k, c in live.items()):
                return
            assert time.monotonic() < until, "the snapshot does not come"
            await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """Wait until the decoder has prefilled what it took up."""
        await asyncio.sleep(0.05)
        await self.idle()

    def _make(self, folder: Path) -> Decoder:
        changes = {"precision": "exact", "snapshot_every": 0.05} | self._changes
        settings = small_settings(model_folder(), snapshots=str(folder), **changes)
        brain = small_brain(model_folder(), **changes)
        self._warmed_up = brain.engine.num_tokens
        return Decoder(brain, settings)


def copy_if_there(source: str, target: str) -> None:
    """Copy a file that may be renamed or deleted meanwhile: a kill leaves either."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def in_hall(root: Path, scene: Scene, **changes: object) -> None:
    """Play a scene; afterwards no block may be lost and the engine may not have failed."""

    async def main() -> None:
        hall = Hall(root, changes)
        await hall.decoder.start([])
        try:
            async with asyncio.timeout(90):
                await scene(hall)
                await hall.settled()
            assert not hall.decoder._failed.done(), "the engine failed"
            assert hall.counts.failures == 0
        finally:
            await hall.decoder.close()

    asyncio.run(main())


async def expected_replies(
    hall: Hall, texts: tuple[str, ...], **options: object
) -> list[list[int]]:
    """Return the replies of a conversation that nobody disturbs."""
    async with hall.agent("other") as agent:
        async with agent.conversation(max_tokens=12, **options) as talk:  # type: ignore[arg-type]
            return [await answer(talk, text) for text in texts]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/kv-*"))


def test_after_a_kill_tokens_come_from_the_snapshot_and_replies_are_the_same(
    tmp_path: Path,
) -> None:
    async def scene(hall: Hall) -> None:
        texts = (LONG * 3, *TEXTS)
        expected = await expected_replies(hall, texts)
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            got = [await answer(talk, text) for text in texts[:3]]
            await hall.written()
            conversation = hall.decoder.conversations.get("car", talk.stream.body.conversation)
            assert conversation is not None
            held = len(conversation.prompt)
            await hall.kill()
            await hall.settled()
            assert hall.adopted == held // 16 * 16 == hall.counts.tokens_restored
            assert hall.run == held % 16
            got.append(await answer(talk, texts[3]))
            assert got == expected
            assert hall.counts.files_rejected == 0

    in_hall(tmp_path, scene)


def test_a_decoder_that_ends_in_peace_writes_what_is_new(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            await answer(talk, LONG)
            await talk.revise("And then")
            await hall.settled()
            await hall.decoder.close()
            [saved] = read_conversations(hall.folder)
            assert saved.turns == [talk.stream.turns[0].kept]
            assert segments(hall.folder)
            hall.decoder = hall._make(hall.folder)
            await hall.decoder.start([])
            await hall.settled()
            assert hall.adopted == hall.counts.tokens_restored > 0
            assert await answer(talk, "And then home")

    in_hall(tmp_path, scene, snapshot_every=3600)


def test_a_kill_in_the_middle_of_a_turn_and_one_in_the_middle_of_a_reply(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        expected = await expected_replies(hall, (LONG, TEXTS[0]))
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            await talk.revise(LONG[:40])
            await hall.written()
            await hall.kill()
            await talk.revise(LONG[:60])
            got = [await answer(talk, LONG)]
            seen = 0
            async for _ in talk.finish(TEXTS[0]):
                seen += 1
                if seen == 2:
                    await hall.kill()
            got.append(list(talk.stream.turns[-1].reply_ids))
            assert got == expected
            while agent.num_reconnects < 2:
                await asyncio.sleep(0.01)

    in_hall(tmp_path, scene)


def test_a_reply_goes_on_behind_the_ids_that_its_device_holds(tmp_path: Path) -> None:
    hot = Sampling(temperature=5.0)

    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent:
            async with agent.conversation(max_tokens=60, sampling=hot) as talk:
                before: list[int] = []
                async for _ in talk.finish(TEXTS[0]):
                    if not before and talk.reply is not None and talk.reply.shown >= 5:
                        before = list(talk.reply.ids)
                        await hall.kill()
                reply = talk.stream.turns[0].reply_ids
                assert list(reply[: len(before)]) == before
                conversation = hall.decoder.conversations.get("car", talk.stream.body.conversation)
                assert conversation is not None
                assert conversation.turns[0] is not None
                assert tuple(conversation.turns[0].reply) == reply

    in_hall(tmp_path, scene, ahead_tokens=0)


def test_nobody_draws_before_the_device_is_back(tmp_path: Path) -> None:
    endless = Sampling(logit_bias={5: 100.0})

    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent:
            async with agent.conversation(max_tokens=400, sampling=endless) as talk:
                pieces = talk.finish("Count to a thousand")
                await anext(pieces)
                async with asyncio.timeout(10):
                    while not list(read_conversations(hall.folder)):
                        await asyncio.sleep(0.01)
                hall.reachable.clear()
                await hall.kill()
                await hall.settled()
                [sequence] = hall.decoder.brain.engine.sequences
                assert sequence.generation is None
                before = len(sequence.ids)
                await asyncio.sleep(0.1)
                assert len(sequence.ids) == before
                hall.reachable.set()
                await anext(pieces)
                await pieces.aclose()

    in_hall(tmp_path, scene)


@pytest.mark.parametrize("where", ["head", "keys", "first", "middle", "last", "short", "empty"])
def test_a_damaged_snapshot_is_refused_whole_and_poisons_nothing(
    tmp_path: Path, where: str
) -> None:
    def damage(folder: Path) -> None:
        for path in segments(folder):
            data = bytearray(path.read_bytes())
            start = -(-(60 + 16) // 64) * 64
            at = {"head": 40, "keys": 60, "first": start + 64, "middle": len(data) // 2}
            match where:
                case "short":
                    del data[-7:]
                case "empty":
                    data.clear()
                case _:
                    data[at.get(where, len(data) - 1)] ^= 0x10
            path.write_bytes(data)

    async def scene(hall: Hall) -> None:
        texts = (LONG * 3, *TEXTS[:2])
        expected = await expected_replies(hall, texts)
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            got = [await answer(talk, text) for text in texts[:2]]
            await hall.written()
            files = len(segments(hall.folder))
            await hall.kill(damage)
            await hall.settled()
            assert hall.counts.files_rejected == files > 0
            assert (hall.adopted, hall.counts.tokens_restored) == (0, 0)
            got.append(await answer(talk, texts[2]))
            assert got == expected
            await hall.written()
            await hall.kill()
            await hall.settled()
            assert hall.adopted > 0, "what was prefilled is written anew"

    in_hall(tmp_path, scene)


def test_one_damaged_segment_costs_what_is_behind_it_only(tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        last = segments(folder)[-1]
        last.write_bytes(last.read_bytes()[:-1])

    async def scene(hall: Hall) -> None:
        expected = await expected_replies(hall, (LONG, LONG, *TEXTS[:1]))
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            got = []
            for text in (LONG, LONG):
                got.append(await answer(talk, text))
                await hall.written()
            assert len(segments(hall.folder)) >= 2
            await hall.kill(damage)
            await hall.settled()
            assert hall.counts.files_rejected == 1
            assert 0 < hall.adopted < 200
            got.append(await answer(talk, TEXTS[0]))
            assert got == expected

    in_hall(tmp_path, scene)


@pytest.mark.parametrize(
    "changes", [{"precision": "fp32"}, {"kv": "int8", "precision": "fp32"}, {"quantize": "int8"}]
)
def test_keys_and_values_of_another_kind_are_not_taken(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            await answer(talk, LONG)
            await hall.written()
            await hall.kill(**changes)
            await hall.settled()
            assert hall.counts.files_rejected > 0
            assert hall.adopted == 0
            assert hall.run > 50, "it is prefilled from its log"
            assert await answer(talk, TEXTS[0])

    in_hall(tmp_path, scene)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_what_is_restored_is_what_was_there_to_the_last_bit(tmp_path: Path, kv: str) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            await answer(talk, LONG * 2)
            await hall.written()
            before = blocks_of(hall.decoder)
            await hall.kill()
            await hall.settled()
            assert blocks_of(hall.decoder) == before
            assert len(before) == hall.adopted // 16

    def blocks_of(decoder: Decoder) -> list[bytes]:
        import torch

        cache = decoder.brain.cache
        [sequence] = decoder.brain.engine.sequences
        out = torch.zeros(cache.block_bytes, dtype=torch.uint8)
        found = []
        for block in sequence.blocks[: sequence.published]:
            cache.save(block, out)
            found.append(out.numpy().tobytes())
        return found

    in_hall(tmp_path, scene, precision="fast", kv=kv)


def test_conversations_with_one_system_prompt_keep_their_own_words(tmp_path: Path) -> None:
    system = "You are the assistant of a car. Answer in one short sentence, and be polite."

    async def scene(hall: Hall) -> None:
        texts = [(f"{n} {LONG}", TEXTS[n]) for n in range(3)]
        expected = [await expected_replies(hall, both, system=system) for both in texts]
        async with hall.agent() as agent:
            options = {"system": system, "max_tokens": 12}
            async with (
                agent.conversation(**options) as one,
                agent.conversation(**options) as two,
                agent.conversation(**options) as three,
            ):
                talks = (one, two, three)
                got = [[await answer(t, b[0])] for t, b in zip(talks, texts, strict=True)]
                await hall.written()
                await hall.kill()
                await hall.settled()
                held = sum(len(s.ids) // 16 * 16 for s in hall.decoder.brain.engine.sequences)
                assert hall.adopted == held
                for talk, replies, both in zip(talks, got, texts, strict=True):
                    replies.append(await answer(talk, both[1]))
                assert got == expected

    in_hall(tmp_path, scene)


def test_another_tenants_blocks_are_not_found(tmp_path: Path) -> None:
    from cloud.settings import AdmissionSettings, TenantSettings

    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            await answer(talk, LONG)
            await hall.written()
            tenants = {"taxis": TenantSettings(devices=["car"])}
            await hall.kill(admission=AdmissionSettings(tenants=tenants))
            await hall.settled()
            assert hall.adopted == 0
            assert await answer(talk, TEXTS[0])

    in_hall(tmp_path, scene)


def test_an_adapter_finds_its_own_blocks_only_and_its_swap_is_told(tmp_path: Path) -> None:
    one, two = (adapter_folder(tmp_path / f"adapter-{n}", n, scale=0.3) for n in range(2))

    async def scene(hall: Hall) -> None:
        async with (
            hall.agent() as agent,
            agent.conversation(max_tokens=12, adapter="a") as talk,
        ):
            await answer(talk, LONG)
            await hall.written()
            await hall.kill()
            await hall.settled()
            assert hall.adopted > 50
            with notices(talk) as heard:
                await answer(talk, TEXTS[0])
                assert heard == []
                await hall.written()
                await hall.kill(adapters={"a": str(two)})
                await hall.settled()
                assert hall.adopted == 0
                await answer(talk, TEXTS[1])
                assert [topic for topic, _ in heard] == ["adapter"]

    in_hall(tmp_path / "hall", scene, adapters={"a": str(one)})


def test_a_conversation_whose_adapter_is_gone_is_given_up_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    one = adapter_folder(tmp_path / "adapter", 1)

    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent:
            async with (
                agent.conversation(max_tokens=4, adapter="a") as lost,
                agent.conversation(max_tokens=4) as plain,
            ):
                await answer(lost, LONG)
                await answer(plain, LONG)
                await hall.written()
                await hall.kill(adapters={})
                await hall.settled()
                assert len(hall.decoder.conversations) == 1
                assert hall.adopted > 30
                assert await answer(plain, TEXTS[0])
                with pytest.raises(ModelError, match="not loaded"):
                    await answer(lost, TEXTS[0])

    in_hall(tmp_path / "hall", scene, adapters={"a": str(one)})


def test_a_snapshot_of_one_more_turn_writes_its_blocks_only(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            await answer(talk, LONG * 3)
            await hall.written()
            conversation = hall.decoder.conversations.get("car", talk.stream.body.conversation)
            assert conversation is not None
            before, had = len(conversation.prompt), segments(hall.folder)
            await answer(talk, LONG)
            await hall.written()
            more = len(conversation.prompt) // 16 - before // 16
            fresh = [path for path in segments(hall.folder) if path not in had]
            assert set(had) <= set(segments(hall.folder)), "nothing is written twice"
            block = hall.decoder.brain.cache.block_bytes
            assert sum(path.stat().st_size // block for path in fresh) == more > 3

    in_hall(tmp_path, scene)


def test_words_that_were_taken_back_do_not_stay_on_disk(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            await talk.revise(LONG * 4)
            await hall.written()
            many = sum(path.stat().st_size for path in segments(hall.folder))
            await talk.revise("No")
            await answer(talk, "No")
            await hall.written()
            few = sum(path.stat().st_size for path in segments(hall.folder))
            assert few < many / 4
            await hall.kill()
            await hall.settled()
            assert await answer(talk, TEXTS[0])

    in_hall(tmp_path, scene)


def test_a_goodbye_deletes_what_was_kept(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent:
            async with agent.conversation(max_tokens=3) as talk:
                await answer(talk, LONG)
                await hall.written()
                assert segments(hall.folder)
            for _ in range(100):
                if not list(hall.folder.glob("*/*")):
                    break
                await asyncio.sleep(0.02)
            assert [path.name for path in hall.folder.iterdir()] == ["lock"]

    in_hall(tmp_path, scene)


def test_a_pool_that_is_smaller_than_the_snapshot_takes_what_fits(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, AsyncExitStack() as stack:
            talks: list[Talk] = []
            for number in range(6):
                manager = agent.conversation(max_tokens=8)
                talks.append(await stack.enter_async_context(manager))
                await answer(talks[-1], f"{number} {LONG * 3}")
            await hall.written()
            per_block = hall.decoder.brain.cache.block_bytes
            small = max(1, 40 * per_block // 2**20)
            await hall.kill(cache_mb=small)
            await hall.settled()
            assert 0 < hall.counts.tokens_restored <= hall.decoder.brain.num_blocks * 16
            for talk in talks:
                assert await answer(talk, TEXTS[0])

    in_hall(tmp_path, scene)


def test_dropped_turns_stay_dropped_after_a_kill(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            for number in range(12):
                await answer(talk, f"{number} {LONG}")
            before = hall.decoder.conversations.get("car", talk.stream.body.conversation)
            assert before is not None
            prompt = before.prompt
            assert before.turns[0] is None
            await hall.written()
            await hall.kill()
            after = hall.decoder.conversations.get("car", talk.stream.body.conversation)
            assert after is not None
            assert after.prompt == prompt
            await hall.settled()
            assert hall.adopted >= len(prompt) - 15
            assert await answer(talk, TEXTS[0])
            assert not hall.decoder._failed.done()

    in_hall(tmp_path, scene, context=256)


def test_kills_at_any_moment_leave_conversations_as_they_would_have_been(tmp_path: Path) -> None:
    rng = Random(7)

    async def scene(hall: Hall) -> None:
        texts = tuple(f"{n} {LONG[: rng.randrange(10, 80)]}" for n in range(4))
        expected = await expected_replies(hall, texts)
        async with hall.agent() as agent, agent.conversation(max_tokens=12) as talk:
            got = []
            for text in texts:
                for end in range(5, len(text), 9):
                    await talk.revise(text[:end])
                    await asyncio.sleep(0.02)
                    if rng.random() < 0.15:
                        await hall.kill()
                got.append(await answer(talk, text))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.2)
                    await hall.kill()
            assert got == expected

    in_hall(tmp_path, scene)


def test_a_device_that_is_forgotten_has_no_file_left_once_that_is_confirmed(tmp_path: Path) -> None:
    async def scene(hall: Hall) -> None:
        async with hall.agent() as agent, agent.conversation(max_tokens=12, keep=True) as talk:
            await answer(talk, LONG)
            await hall.written()
            assert segments(hall.folder)
        assert await hall.decoder.forget_device("car") == 1
        assert not list(read_conversations(hall.folder))
        assert segments(hall.folder) == []

    in_hall(tmp_path, scene)
