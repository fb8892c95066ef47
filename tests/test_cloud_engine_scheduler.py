"""Who runs in the next step, and who makes room."""

from cloud.engine.account import Account
from cloud.engine.batch import Batch
from cloud.engine.blocks import BlockPool
from cloud.engine.scheduler import Scheduler
from cloud.engine.sequence import Generation, Lane, Sequence
from shared.frames import Sampling

ACCOUNT = Account()


def generation() -> Generation:
    return Generation(Sampling(), 8, frozenset(), lambda _token, _why: None)


def sequence(number: int, ids: int, cached: int = 0, **fields: object) -> Sequence:
    made = Sequence(number, list(range(ids)), cached, account=ACCOUNT)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def numbers(batch: Batch | None) -> list[int]:
    return [chunk.sequence.number for chunk in batch.chunks] if batch else []


def commit(batch: Batch) -> None:
    for chunk in batch.chunks:
        chunk.sequence.cached = chunk.start + chunk.count


def hold(pool: BlockPool, *sequences: Sequence) -> None:
    for one in sequences:
        one.blocks = pool.allocate(pool.blocks_for(one.cached))


def test_nothing_wanted_is_no_step() -> None:
    pool = BlockPool(8, 16)
    idle = sequence(0, 5, 5)
    hold(pool, idle)
    assert Scheduler(pool).schedule([idle], 0.0) is None


def test_replies_come_first_then_live_turns_by_deadline_then_bulk() -> None:
    pool = BlockPool(32, 16)
    bulk = sequence(0, 20, lane=Lane.BULK)
    late = sequence(1, 20, deadline=9.0)
    soon = sequence(2, 20, deadline=1.0)
    reply = sequence(3, 20, 19, generation=generation())
    hold(pool, reply)
    batch = Scheduler(pool).schedule([bulk, late, soon, reply], 0.0)
    assert numbers(batch) == [3, 2, 1, 0]


def test_a_long_prompt_beside_a_reply_runs_in_small_chunks() -> None:
    pool = BlockPool(64, 16)
    reply = sequence(0, 20, 19, generation=generation())
    prompt = sequence(1, 500)
    hold(pool, reply)
    scheduler = Scheduler(pool, step_tokens=32, idle_step_tokens=512)
    batch = scheduler.schedule([reply, prompt], 0.0)
    assert batch is not None
    assert [chunk.count for chunk in batch.chunks] == [1, 31]
    commit(batch)
    reply.generation = None
    batch = scheduler.schedule([reply, prompt], 0.0)
    assert batch is not None
    assert [(c.start, c.count) for c in batch.chunks] == [(31, 469)]


def test_a_token_is_drawn_only_behind_the_last_id_of_a_generating_sequence() -> None:
    pool = BlockPool(64, 16)
    append = sequence(0, 10)
    ending = sequence(1, 40, generation=generation())
    batch = Scheduler(pool, idle_step_tokens=30).schedule([append, ending], 0.0)
    assert batch is not None
    assert [chunk.sample for chunk in batch.chunks] == [False, False]
    commit(batch)
    batch = Scheduler(pool).schedule([append, ending], 0.0)
    assert batch is not None
    assert [chunk.sample for chunk in batch.chunks] == [True]


def test_a_turn_that_was_prefilled_to_its_last_id_runs_that_id_once_more() -> None:
    pool = BlockPool(8, 16)
    ready = sequence(0, 10, 10, generation=generation())
    hold(pool, ready)
    batch = Scheduler(pool).schedule([ready], 0.0)
    assert batch is not None
    assert [(c.start, c.count, c.sample) for c in batch.chunks] == [(9, 1, True)]


def test_the_coldest_idle_sequence_makes_room_first() -> None:
    pool = BlockPool(4, 16)
    warm = sequence(0, 20, 20, touched=5.0)
    cold = sequence(1, 20, 20, touched=1.0)
    hold(pool, warm, cold)
    fresh = sequence(2, 30)
    scheduler = Scheduler(pool)
    assert numbers(scheduler.schedule([warm, cold, fresh], 6.0)) == [2]
    assert (warm.cached, cold.cached, cold.evictions) == (20, 0, 1)
    assert scheduler.num_evictions == 1


def test_among_busy_ones_the_least_urgent_makes_room() -> None:
    pool = BlockPool(4, 16)
    urgent = sequence(0, 60, 30, deadline=1.0)
    other = sequence(1, 60, 30, deadline=2.0)
    hold(pool, urgent, other)
    assert numbers(Scheduler(pool).schedule([urgent, other], 0.0)) == [0]
    assert other.cached == 0


def test_sequences_of_twice_the_pool_all_finish() -> None:
    pool = BlockPool(8, 16)
    everyone = [sequence(n, 100 + n, generation=generation()) for n in range(5)]
    scheduler = Scheduler(pool, step_tokens=32, idle_step_tokens=64)
    for _ in range(500):
        batch = scheduler.schedule(everyone, 0.0)
        if batch is None:
            break
        commit(batch)
        for chunk in batch.chunks:
            if chunk.sample and chunk.sequence.generation is not None:
                chunk.sequence.ids.append(7)
                chunk.sequence.generation.produced += 1
                if chunk.sequence.generation.produced == 8:
                    chunk.sequence.generation = None
        pool.check(s.blocks for s in everyone)
    assert all(s.generation is None for s in everyone)
    assert scheduler.num_evictions > 0
