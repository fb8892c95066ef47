"""Shares steps among accounts by tokens, not by requests. No torch, no I/O.

A virtual token counter (Sheng et al. 2024, Fairness in Serving Large Language Models, OSDI): every
account counts the tokens it was served by its weight, and who has the least goes first. The paper
decides when a request begins; here every step is shared anew, some tokens at a time. An account
that was not held back is lifted to the least of those that were: nobody saves up for later.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush

from cloud.engine.account import Account
from cloud.engine.sequence import Sequence

QUANTUM = 16
"""Most tokens an account gets before the next one is asked."""
PRESENCE = 1.0
"""Seconds an account counts as there after it last wanted something: its next words will come."""


class Shares:
    """The counters of one scheduler, from step to step."""

    def __init__(self) -> None:
        self._floor = 0.0
        """What the counters of those who were not held back are lifted to; it only grows."""
        self._held_back: set[Account] = set()
        self._seen: dict[Account, float] = {}
        """Accounts that are there, and when they last wanted something."""

    @property
    def num_there(self) -> int:
        """Accounts that want something, or wanted something a moment ago."""
        return len(self._seen)

    def begin(self, accounts: Collection[Account], now: float) -> None:
        """A step is to be shared among `accounts`, all that want something; at least one."""
        waiting = [a.served for a in accounts if a in self._held_back]
        self._floor = max(self._floor, min(waiting or [max(a.served for a in accounts)]))
        for account in accounts:
            if account not in self._held_back:
                account.served = max(account.served, self._floor)
            self._seen[account] = now
        self._seen = {a: at for a, at in self._seen.items() if at > now - PRESENCE}

    def end(self, held_back: Iterable[Account]) -> None:
        """The step is shared; these wanted more than they got."""
        self._held_back = set(held_back)

    def deal(
        self,
        sequences: Iterable[Sequence],
        budget: int,
        grant: Callable[[Sequence, int], int],
        quantum: int = QUANTUM,
    ) -> int:
        """Deal out `budget` tokens, to the account with the least first; return how many are left.

        Args:
            sequences: who wants tokens; of one account's, in this order.
            grant: gives a sequence up to so many tokens, and returns how many it took: fewer when
                it wants no more or has no room.
            quantum: most tokens at a time.
        """
        queues: dict[Account, deque[Sequence]] = {}
        for sequence in sequences:
            queues.setdefault(sequence.account, deque()).append(sequence)
        heap = [(account.served, place, account) for place, account in enumerate(queues)]
        heapify(heap)
        quantum = min(quantum, max(1, budget // len(queues))) if len(queues) > 1 else budget
        while heap and budget > 0:
            _, place, account = heappop(heap)
            most = min(quantum, budget)
            taken = grant(queues[account][0], most)
            account.served += taken / account.weight
            budget -= taken
            if taken < most:
                queues[account].popleft()
            if queues[account]:
                heappush(heap, (account.served, place, account))
        return budget

    def fair_rows(self, replies: Iterable[Sequence]) -> int:
        """Return how many of `replies` a step runs in which nobody crowds the others.

        That is as many for each account, by weight, as the account has that has the fewest, and at
        least one; whoever is there counts with one row, should it have none.
        """
        rows = dict.fromkeys(self._seen, 0)
        for sequence in replies:
            rows[sequence.account] += 1
        fewest = min(max(1, count) / account.weight for account, count in rows.items())
        return sum(min(n, max(1, int(fewest * a.weight))) for a, n in rows.items())
