"""How long drivers waited for words because of a fault, from the ledger. Pure."""

from collections.abc import Collection
from itertools import pairwise

from simulations.simulate.ledger import Ledger, TurnKey


def longest_waits(ledger: Ledger, devices: Collection[str], at: float) -> list[float]:
    """Return, for each conversation of `devices`, the longest wait that a fault may have caused.

    What counts is the turn whose reply was under way at the fault, else the first that ended after
    it. Its wait is the longest time without a new word of the reply: from the fault or the end of
    the turn, whichever is later, to the first word, from word to word, and to the end. So words
    that were on their way already do not end the wait.

    Args:
        at: when the fault began, in the ledger's seconds.

    Returns:
        Seconds. Conversations without such an answer are left out.
    """
    first: dict[tuple[str, str], TurnKey] = {}
    for key, done in ledger.done.items():
        talk = (key.device, key.talk)
        if key.device in devices and done > at and (talk not in first or key < first[talk]):
            first[talk] = key
    return [_longest_wait(ledger, key, at) for key in first.values()]


def _longest_wait(ledger: Ledger, key: TurnKey, at: float) -> float:
    begin = max(at, ledger.ended[key])
    words = [when for when in ledger.shown_at.get(key, []) if when > begin]
    return max(after - before for before, after in pairwise([begin, *words, ledger.done[key]]))
