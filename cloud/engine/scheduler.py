"""Decides what the next step runs. No torch, no clock; the decision is a value.

Order: replies under way (one token each), then turns that have ended, then words that are being
spoken, then bulk prefill, then what is run ahead of an end of turn. Within each of these the
account that was served least goes first (`fairness`), and within an account the earliest deadline;
among an account's replies, the one that was run least recently. How many tokens a step has is the
business of `pace`, who makes room for them that of `plan`.
"""

from collections.abc import Iterable
from itertools import count

from cloud.engine.batch import Batch
from cloud.engine.blocks import BlockPool
from cloud.engine.fairness import Shares
from cloud.engine.pace import Pace, StepTime
from cloud.engine.plan import Plan
from cloud.engine.sequence import Lane, Sequence


class Scheduler:
    """Chooses chunks and sees to it that they have blocks.

    Args:
        times: step times seen so far.
        step_tokens: at most so many tokens a step beside replies while `times` knows too little.
        idle_step_tokens: at most so many ever.
    """

    def __init__(
        self,
        pool: BlockPool,
        times: StepTime | None = None,
        *,
        step_tokens: int = 64,
        idle_step_tokens: int = 512,
    ) -> None:
        self._pool = pool
        self._pace = Pace(times, step_tokens, idle_step_tokens)
        self._shares = Shares()
        self._run_numbers = count(1)
        self.num_evictions = 0

    def schedule(self, sequences: Iterable[Sequence], now: float) -> Batch | None:
        """Return the next step, or None if nothing is wanted."""
        everyone = list(sequences)
        replies: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in everyone:
            if sequence.remaining > 0:
                is_reply = sequence.decoding and not sequence.is_ahead
                (replies if is_reply else others).append(sequence)
        busy = sorted(replies, key=_urgency) + sorted(others, key=_urgency)
        if not busy:
            return None
        plan = Plan(self._pool, everyone, busy)
        self._shares.begin({s.account for s in busy}, now)
        self._deal(plan, replies, busy[len(replies) :])
        wanting = (s for s in busy if s.lane is not Lane.AHEAD and plan.left(s) > 0)
        self._shares.end(s.account for s in wanting)
        self.num_evictions += plan.num_evictions
        return plan.batch(now, self._run_numbers)

    def _deal(self, plan: Plan, replies: list[Sequence], others: list[Sequence]) -> None:
        fair = self._shares.fair_rows(replies)
        keys = sum(len(s.ids) for s in replies) / max(1, len(replies))
        most = self._pace.rows(len(replies), fair, keys)
        waiting_longest = sorted(replies, key=lambda s: s.run_number)
        rows = most - self._shares.deal(waiting_longest, most, plan.grant, quantum=1)
        budget = self._pace.prefill(rows, fair, keys, alone=self._shares.num_there == 1)

        def grant(sequence: Sequence, most: int) -> int:
            if budget.is_spent:
                return 0
            start = plan.start(sequence)
            taken = plan.grant(sequence, budget.fits(start, most))
            budget.take(start, taken)
            return taken

        for lane in Lane:
            self._shares.deal([s for s in others if s.lane is lane], budget.tokens, grant)


def _urgency(sequence: Sequence) -> tuple[Lane, float, int]:
    return sequence.lane, sequence.deadline, sequence.number
