"""Copying blocks out of a serving engine, a little at a time, whatever happens in between."""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.engine import Engine
from cloud.engine.sequence import Sequence
from cloud.snapshot.format import block_keys
from cloud.snapshot.store import Layout, SnapshotStore
from cloud.snapshot.writer import PIECE, SnapshotWriter
from shared.errors import CapacityError
from shared.nn.llama import LlamaConfig
from tests.test_cloud_engine import run, some_ids
from tests.test_cloud_engine_prefix import honest, honest_engine
from tests.test_cloud_snapshot_format import FINGERPRINT, conversation

CONFIG = LlamaConfig(512, 64, 3, 4, 2, 16, 96, 128, 1e-5, 1e4)


class SlowWorker:
    """Runs chores in the caller's thread, after `between`, as a serving engine would."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between, self.is_alive, self.chores = between, True, 0

    def submit_chore(self, chore: Callable[[Engine], None]) -> None:
        self.chores += 1
        self._between()
        chore(None)  # type: ignore[arg-type]


def filled_cache(num_blocks: int) -> KVCache:
    cache = KVCache(CONFIG, num_blocks, torch.bfloat16, torch.device("cpu"))
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape))
    return cache


def sequence_of(ids: list[int], published: int) -> Sequence:
    sequence = Sequence(1, list(ids), namespace=("tenant", ""))
    sequence.settled = sequence.cached = len(ids)
    sequence.blocks, sequence.published = list(range(published)), published
    return sequence


def open_store(root: Path, cache: KVCache) -> SnapshotStore:
    layout = Layout(FINGERPRINT, cache.block_bytes)
    return SnapshotStore(root, layout, most_bytes=1 << 30, most_seconds=60.0, clock=time.time)


def writer_of(store: SnapshotStore, cache: KVCache, worker: SlowWorker) -> SnapshotWriter:
    return SnapshotWriter(store, worker, cache, 1e12)  # type: ignore[arg-type]


def stored(store: SnapshotStore) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for kept, _ in store.load("ab" * 32):
        for path, head in kept.segments.items():
            blocks = store.read_segment(path, head)
            for number, key in enumerate(head.keys):
                at = number * head.block_bytes
                found[key] = bytes(blocks[at : at + head.block_bytes])
    return found


def saved(cache: KVCache, block: int) -> bytes:
    out = torch.zeros(cache.block_bytes, dtype=torch.uint8)
    cache.save(block, out)
    return out.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_block_that_was_saved_and_loaded_is_the_same(dtype: torch.dtype) -> None:
    cache = KVCache(CONFIG, 4, dtype, torch.device("cpu"))
    assert cache.block_bytes == KVCache.bytes_per_block(CONFIG, dtype)
    for part in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        part.copy_((torch.randn(part.shape) * 50).to(part.dtype))
    raw = torch.zeros(cache.block_bytes, dtype=torch.uint8)
    cache.save(2, raw)
    other = KVCache(CONFIG, 3, dtype, torch.device("cpu"))
    other.load(0, raw)
    for one, two in ((cache.keys, other.keys), (cache.values, other.values)):
        assert torch.equal(one[:, 2], two[:, 0])
        assert not two[:, 1:].any()
    assert torch.equal(cache.key_scales[:, 2:3], other.key_scales[:, :1])
    assert torch.equal(cache.value_scales[:, 2:3], other.value_scales[:, :1])


def test_every_published_block_is_written_once(tmp_path: Path) -> None:
    cache = filled_cache(40)
    store = open_store(tmp_path, cache)
    ids = some_ids(Random(1), 20 * BLOCK + 5)
    sequence = sequence_of(ids, 20)
    worker = SlowWorker(lambda: None)
    writer = writer_of(store, cache, worker)
    assert writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    assert worker.chores == 1 + -(-20 // PIECE)
    keys = block_keys(("tenant", ""), ids, BLOCK)
    assert stored(store) == {key: saved(cache, n) for n, key in enumerate(keys)}
    before = store.counts.bytes_written
    assert writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    assert store.counts.bytes_written == before


def test_a_few_blocks_of_an_open_turn_wait_for_more(tmp_path: Path) -> None:
    cache = filled_cache(40)
    store = open_store(tmp_path, cache)
    sequence = sequence_of(some_ids(Random(1), 3 * BLOCK), 3)
    writer = writer_of(store, cache, SlowWorker(lambda: None))
    assert not writer.write(conversation(), lambda: sequence, idle=False, hurry=False)
    assert stored(store) == {}
    assert writer.write(conversation(), lambda: sequence, idle=False, hurry=True)
    assert len(stored(store)) == 3


def test_what_is_not_yet_run_is_asked_for_again(tmp_path: Path) -> None:
    cache = filled_cache(40)
    store = open_store(tmp_path, cache)
    sequence = sequence_of(some_ids(Random(1), 6 * BLOCK), 4)
    writer = writer_of(store, cache, SlowWorker(lambda: None))
    assert not writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    sequence.blocks, sequence.published = list(range(6)), 6
    assert writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    assert len(stored(store)) == 6


def test_an_evicted_sequence_keeps_what_was_written(tmp_path: Path) -> None:
    cache = filled_cache(40)
    store = open_store(tmp_path, cache)
    sequence = sequence_of(some_ids(Random(1), 6 * BLOCK), 6)
    writer = writer_of(store, cache, SlowWorker(lambda: None))
    writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    sequence.blocks, sequence.published, sequence.cached = [], 0, 0
    assert writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    assert len(stored(store)) == 6


@pytest.mark.parametrize("piece", [1, 2, 3])
@pytest.mark.parametrize("what", ["taken back", "evicted", "gone", "another adapter"])
def test_words_that_change_between_two_pieces_spoil_no_file(
    tmp_path: Path, piece: int, what: str
) -> None:
    cache = filled_cache(60)
    store = open_store(tmp_path, cache)
    ids = some_ids(Random(1), 4 * PIECE * BLOCK)
    there: list[Sequence | None] = [sequence_of(ids, 4 * PIECE)]

    def between() -> None:
        if worker.chores == 1 + piece:
            cache.keys.zero_()
            sequence = there[0]
            assert sequence is not None
            match what:
                case "taken back":
                    sequence.ids[3 * BLOCK + 1] += 1
                case "evicted":
                    sequence.blocks, sequence.published = [], 0
                case "gone":
                    there[0] = None
                case _:
                    sequence.namespace = ("tenant", "ab")

    worker = SlowWorker(between)
    writer = writer_of(store, cache, worker)
    assert not writer.write(conversation(), lambda: there[0], idle=True, hurry=False)
    assert stored(store) == {}
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"lock", "log"}


def test_a_segment_that_is_mostly_dead_is_written_anew_without_the_dead(tmp_path: Path) -> None:
    cache = filled_cache(40)
    store = open_store(tmp_path, cache)
    ids = some_ids(Random(1), 12 * BLOCK)
    sequence = sequence_of(ids, 12)
    writer = writer_of(store, cache, SlowWorker(lambda: None))
    writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    sequence.ids[4 * BLOCK] += 1
    assert writer.write(conversation(), lambda: sequence, idle=True, hurry=False)
    keys = block_keys(("tenant", ""), sequence.ids, BLOCK)
    assert stored(store) == {key: saved(cache, n) for n, key in enumerate(keys)}
    assert len(list(tmp_path.rglob("kv-*"))) == 1


def test_an_engine_that_has_stopped_is_said_to_have(tmp_path: Path) -> None:
    cache = filled_cache(4)
    worker = SlowWorker(lambda: None)
    worker.is_alive = False
    writer = writer_of(open_store(tmp_path, cache), cache, worker)
    with pytest.raises(CapacityError, match="has stopped"):
        writer.write(conversation(), lambda: None, idle=True, hurry=False)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_sequences_find_restored_blocks_as_if_somebody_had_run_them(seed: int) -> None:
    rng = Random(seed)
    engine = honest_engine(rng.choice((6, 12, 30)), seed)
    size, slots = 4, honest(engine)._slots
    common = [rng.randrange(2) for _ in range(12)]
    for _ in range(6):
        ids = common[: rng.randrange(13)] + [rng.randrange(2) for _ in range(rng.randrange(12))]
        namespace = (rng.choice(("", "other")), "")

        def write(number: int, block: int, ids=ids, namespace=namespace) -> None:  # type: ignore[no-untyped-def]
            for offset in range(size):
                truth = namespace, tuple(ids[: number * size + offset + 1])
                slots[block, offset] = truth

        free = engine._pool.num_free
        engine.restore(namespace, ids, write)
        engine.check()
        assert engine._pool.num_free == free, "restored blocks are nobody's"
        sequence = engine.add(namespace[0])
        engine.splice(sequence, 0, ids[: rng.randrange(len(ids) + 1)])
        if rng.random() < 0.7:
            run(engine)
        if rng.random() < 0.5:
            engine.remove(sequence)
        engine.check()


def test_restoring_takes_no_block_that_holds_something() -> None:
    engine = honest_engine(6)
    written: list[int] = []
    assert engine.restore(("", ""), [0] * 16, lambda _n, block: written.append(block)) == 4
    assert engine.restore(("", ""), [1] * 16, lambda _n, block: written.append(block)) == 2
    assert engine.restore(("", ""), [2] * 16, lambda _n, block: written.append(block)) == 0
    assert len(set(written)) == 6


def test_chores_run_one_between_two_steps_and_in_their_order() -> None:
    import asyncio

    from cloud.worker import Worker

    async def scene() -> None:
        engine = honest_engine(40)
        order: deque[str] = deque()
        step, done = engine.step, threading.Event()
        engine.step = lambda: order.append("step") or step()  # type: ignore[method-assign,func-returns-value]
        worker = Worker(engine, on_failed=lambda error: None)
        for number in range(3):
            worker.submit_chore(lambda _engine, n=number: order.append(f"chore {n}"))
        worker.submit_chore(lambda _engine: done.set())
        worker.start()
        await asyncio.to_thread(done.wait, 10)
        await worker.close()
        assert list(order)[:6] == ["chore 0", "step", "chore 1", "step", "chore 2", "step"]

    asyncio.run(scene())
