"""Accounts share the engine by tokens: in modelled time, with the real scheduler.

*Quiet*, for the vehicle that is measured, means: its one neighbour's account holds two
conversations that always have something to do (a prompt, its reply, the next prompt), so that a
reply is under way while a prompt is read. *Flooded* means that the neighbour holds a hundred of
these. What a vehicle feels may depend on how many others are there, not on how much each of them
asks.
"""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.engine.account import Account
from cloud.engine.fairness import PRESENCE, Shares
from cloud.engine.sequence import Lane, Sequence
from tests.engine_model import Job, ModelEngine, percentile, seconds


class Busy:
    """An account with conversations that always have something to do."""

    def __init__(
        self, engine: ModelEngine, account: Account, conversations: int, prompt: int, reply: int
    ) -> None:
        self._engine, self._account = engine, account
        self._prompt, self._reply = prompt, reply
        self.jobs = [self._next() for _ in range(conversations)]
        self.done: list[Job] = []

    def __call__(self) -> None:
        """Begin anew what has ended."""
        for place, job in enumerate(self.jobs):
            if job.done:
                self.done.append(job)
                self._engine.remove(job.sequence)
                self.jobs[place] = self._next()

    def _next(self) -> Job:
        return self._engine.ask(self._engine.prefill(self._account, self._prompt), self._reply)


class Driver:
    """Speaks two tokens each tenth of a second, ends the turn, listens, thinks, speaks again."""

    WORDS, REPLY = 20, 30

    def __init__(self, engine: ModelEngine, account: Account) -> None:
        self._engine, self._account, self._rng = engine, account, Random(1)
        self._sequence = engine.prefill(account, 40)
        self._words, self._at = 0, 0.0
        self._job: Job | None = None
        self.turns: list[Job] = []

    def __call__(self) -> None:
        """Do what is due."""
        if self._job is not None and not self._job.done:
            return
        if self._job is not None:
            self.turns.append(self._job)
            self._engine.remove(self._sequence)
            self._sequence = self._engine.prefill(self._account, 40)
            self._job, self._at = None, self._engine.now + self._rng.uniform(0.3, 2.0)
        while self._job is None and self._at <= self._engine.now:
            due, self._at = self._at, self._at + 0.1
            self._engine.append(self._sequence, 2)
            self._words += 1
            if self._words == self.WORDS:
                self._words = 0
                self._job = self._engine.ask(self._sequence, self.REPLY)
                self._job.asked_at = due  # maybe in the middle of the step that has just ended

    @property
    def first(self) -> list[float]:
        """Seconds from each end of a turn to its first token."""
        return [job.tokens[0] - job.asked_at for job in self.turns]

    @property
    def gaps(self) -> list[float]:
        """Seconds from token to token."""
        return [gap for job in self.turns for gap in job.gaps]


def beside(conversations: int, prompt: int, reply: int, *, one_account: bool = False) -> Driver:
    """Run a driver beside a neighbour with so many conversations, for three minutes."""
    engine, account = ModelEngine(), Account()
    driver = Driver(engine, account)
    busy = Busy(engine, account if one_account else Account(), conversations, prompt, reply)

    def both() -> None:
        driver()
        busy()

    engine.run_until(200.0, both)
    return driver


@pytest.mark.parametrize(("prompt", "reply"), [(30, 40), (400, 50), (1500, 5)])
def test_a_flood_from_one_account_leaves_anothers_p99_within_a_fifth_of_its_quiet_value(
    prompt: int, reply: int
) -> None:
    quiet, flooded = beside(2, prompt, reply), beside(100, prompt, reply)
    assert len(flooded.turns) > 40
    assert percentile(flooded.first, 0.99) <= 1.2 * percentile(quiet.first, 0.99)
    assert percentile(flooded.gaps, 0.99) <= 1.2 * percentile(quiet.gaps, 0.99)


def test_the_same_flood_is_felt_by_who_shares_its_account() -> None:
    quiet, flooded = (beside(n, 400, 50, one_account=True) for n in (2, 100))
    assert percentile(flooded.gaps, 0.99) > 3 * percentile(quiet.gaps, 0.99)


@pytest.mark.parametrize(("prompt", "reply"), [(600, 2), (40, 40), (10, 200)])
def test_accounts_that_always_want_more_are_served_by_weight_and_not_by_requests(
    prompt: int, reply: int
) -> None:
    engine = ModelEngine()
    accounts = [Account(1.0), Account(2.0), Account(4.0)]
    busy = [
        Busy(engine, account, conversations, prompt, reply)
        for account, conversations in zip(accounts, (200, 200, 400), strict=True)
    ]

    def all_of_them() -> None:
        for one in busy:
            one()

    engine.run_until(40.0, all_of_them)
    engine.served.clear()
    engine.run_until(120.0, all_of_them)
    served = [engine.served[account] / account.weight for account in accounts]
    assert max(served) <= 1.1 * min(served)


def test_six_hundred_replies_all_go_on_though_a_step_has_room_for_fewer() -> None:
    for accounts in ([Account()], [Account() for _ in range(600)]):
        engine = ModelEngine()
        jobs = [
            engine.ask(engine.prefill(accounts[n % len(accounts)], 4), 1000) for n in range(600)
        ]
        while not all(job.tokens for job in jobs):
            assert engine.step() is not None
        prompt = engine.prefill(accounts[0] if len(accounts) == 1 else Account(), 200)
        before = [len(job.tokens) for job in jobs]
        batches = [engine.step() for _ in range(20)]
        gained = [len(job.tokens) - n for job, n in zip(jobs, before, strict=True)]
        assert min(gained) >= 15
        assert max(gained) - min(gained) <= 2
        assert all(batch is not None and batch.num_tokens <= 512 for batch in batches)
        assert prompt.cached >= 100, "and what is prefilled goes on beside them"


def test_who_was_quiet_has_saved_up_nothing_and_who_was_alone_owes_nothing() -> None:
    engine = ModelEngine()
    early, late = Account(), Account()
    early_busy = Busy(engine, early, 20, 600, 2)
    engine.run_until(30.0, early_busy)
    late_busy = Busy(engine, late, 20, 600, 2)
    engine.served.clear()

    def both() -> None:
        early_busy()
        late_busy()

    engine.run_until(40.0, both)
    assert engine.served[late] == pytest.approx(engine.served[early], rel=0.1)


def test_new_words_are_in_the_very_next_step_however_much_others_wait_for() -> None:
    engine = ModelEngine()
    for _ in range(50):
        engine.ask(engine.prefill(Account(), 3000), 5)
    engine.run_until(5.0)
    words = engine.prefill(Account(), 1)
    batch = engine.step()
    assert batch is not None
    assert words.remaining == 0


def test_within_an_account_the_earliest_deadline_goes_first() -> None:
    engine = ModelEngine()
    account = Account()
    late, soon = (engine.prefill(account, 2000) for _ in range(2))
    late.deadline, soon.deadline = 9.0, 3.0
    while soon.remaining:
        engine.step()
    assert late.cached < 512, "it got the rest of the last step, no more"


@given(st.data())
def test_whatever_is_asked_of_a_small_pool_is_done_in_the_end(data: st.DataObject) -> None:
    engine = ModelEngine(num_blocks=12)
    accounts = [Account(data.draw(st.sampled_from([0.5, 1.0, 3.0]))) for _ in range(3)]
    jobs: list[Job] = []
    for _ in range(data.draw(st.integers(1, 12))):
        sequence = engine.prefill(
            data.draw(st.sampled_from(accounts)),
            data.draw(st.integers(1, 150)),
            data.draw(st.sampled_from([Lane.LIVE, Lane.BULK])),
        )
        sequence.deadline = data.draw(st.sampled_from([1.0, 2.0, float("inf")]))
        if data.draw(st.booleans()):
            jobs.append(engine.ask(sequence, data.draw(st.integers(1, 40))))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    for _ in range(5000):
        if engine.step() is None:
            break
        engine.pool.check(sequence.blocks for sequence in engine.jobs)
    assert all(sequence.remaining == 0 for sequence in engine.jobs)
    assert all(job.done for job in jobs)


def test_a_fair_step_has_as_many_replies_of_each_account_as_the_one_with_the_fewest() -> None:
    def replies(account: Account, count: int) -> list[Sequence]:
        return [Sequence(n, account=account) for n in range(count)]

    shares = Shares()
    one, two, idle = Account(1.0), Account(2.0), Account(1.0)
    everyone = replies(one, 3) + replies(two, 50)
    shares.begin([one], 0.0)
    assert shares.fair_rows(replies(one, 70)) == 70
    shares.begin([one, two], 10.0)
    assert shares.fair_rows(everyone) == 3 + 6
    shares.begin([one, two, idle], 10.1)
    assert shares.fair_rows(everyone) == 1 + 2, "who is about to speak counts"
    shares.begin([one, two], 10.1 + PRESENCE)
    assert shares.fair_rows(everyone) == 3 + 6


def test_a_long_prompt_does_not_lengthen_steps_though_short_words_come_beside_it() -> None:
    engine = ModelEngine()
    replies = [engine.ask(engine.prefill(Account(), 50), 10_000) for _ in range(8)]
    for _ in range(50):
        engine.step()
    prompt = engine.prefill(Account(), 8000)
    words = engine.prefill(Account(), 1)
    longest = 0.0
    while prompt.remaining:
        if not words.remaining:
            engine.append(words, 3)
        began, keys = engine.now, sum(len(job.sequence.ids) for job in replies)
        engine.step()
        longest = max(longest, (engine.now - began) / seconds(8, keys))
    assert longest <= 2.1


def test_the_chunks_of_a_prompt_alone_take_no_longer_however_long_it_is() -> None:
    engine = ModelEngine()
    prompt = engine.prefill(Account(), 40_000)
    took: list[float] = []
    while prompt.remaining:
        began = engine.now
        engine.step()
        took.append(engine.now - began)
    assert max(took[20:]) <= 1.1 * took[0]
