"""What one conversation asks of admission, and its waiting when the device is over its limit.

Lives in the event loop. Every id that comes is counted once; a tail's ids each time they change.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Ids

from cloud.access.admission import Admission
from cloud.engine.account import Account
from shared.frames import RATE_LIMITED
from shared.tokenlog import common_prefix


class Allowance:
    """The dealings of one conversation.

    Args:
        clock: admission's.
    """

    def __init__(self, admission: Admission, device: str, clock: Callable[[], float]) -> None:
        self._admission, self._device, self._clock = admission, device, clock
        self.tenant = admission.tenant_of_device(device)
        self._turn, self._counted = 0, list[int]()
        """The open turn, and its ids that were counted."""
        self._granted: int | None = None
        """Most ids of the reply under way."""
        self._is_told = False
        """The device knows that its turn waits."""
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def account(self) -> Account:
        """The account its sequence runs on."""
        return self._admission.account(self._device, self.tenant)

    def count(self, turn: int, ids: Ids[int]) -> None:
        """The open turn has these ids now."""
        if turn != self._turn:
            self._turn, self._counted = turn, []
        ids = list(ids)
        fresh = len(ids) - common_prefix(self._counted, ids)
        self._counted = ids
        self.charge(fresh)

    def charge(self, tokens: int) -> None:
        """Count ids of something else than the open turn."""
        if tokens:
            self._admission.charge(self._device, self.tenant, tokens, self._clock())

    def is_over(self, then: Callable[[], None] | None = None) -> bool:
        """Tell whether the device owes tokens; `then` is called when that may be over."""
        wait = self._admission.standing(self._device, self.tenant, self._clock()).wait
        if wait > 0 and then is not None:
            self._call(wait, then)
        return wait > 0

    def ask(
        self,
        begun: int,
        most: int,
        notice: Callable[[str, str], None],
        again: Callable[[], None],
    ) -> bool:
        """Ask for a reply of up to `most` ids, of which there are `begun` already.

        Returns:
            Whether it may begin; `settle` is owed then. Else `again` is called when it is worth
            asking once more, and the device is told, once a turn.
        """
        asked = self._admission.ask(self._device, self.tenant, most - begun, self._clock())
        if asked.admitted:
            self._granted, self._is_told = most, False
            return True
        if not self._is_told:
            self._is_told = True
            notice(RATE_LIMITED, f"{asked.reason}: the turn waits, for about {asked.wait:.1f} s")
        self._call(asked.wait, again)
        return False

    def settle(self, produced: int) -> None:
        """The reply is over, with so many ids, or was never begun; nothing waits any more."""
        self._is_told = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        granted, self._granted = self._granted, None
        if granted is not None:
            unused = max(0, granted - produced)
            self._admission.done(self._device, self.tenant, unused, self._clock())

    def _call(self, wait: float, then: Callable[[], None]) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(wait, then)
