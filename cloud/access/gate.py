"""The gate of a running decoder: who is let in, and who has to leave when the registry changes.

Looks at the registry four times a second. Without a registry everybody may come, unless the
settings want registered devices.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from cloud.access.admission import Admission
from cloud.access.orders import Attendance, Order, Orders
from cloud.access.registry import Registry
from shared.errors import AccessError, ConfigError, DeltarelayError, RemoteProtocolError
from shared.transport.mqtt_topics import check_name

log = logging.getLogger(__name__)

LOOK = 0.25
"""Seconds between two looks at the registry."""

CutOff = Callable[[AccessError], None]


class House(Protocol):
    """What the gate asks of its decoder."""

    @property
    def boot(self) -> str: ...
    @property
    def devices(self) -> Iterable[str]: ...
    def expel(self, device: str, error: AccessError) -> None: ...
    async def forget_device(self, device: str) -> int: ...


class Gate:
    """Lets devices in, and cuts off devices and programs that are revoked.

    Args:
        registered: only registered devices may connect.
    """

    def __init__(
        self, house: House, admission: Admission, registry: Registry | None, *, registered: bool
    ) -> None:
        self._house, self._admission = house, admission
        self._registry, self._registered = registry, registered
        self._orders = Orders(registry) if registry is not None else None
        self._attendance: Attendance | None = None
        self._guests: dict[CutOff, str] = {}
        """What cuts off a program's request, and the account it runs on."""
        self._carrying_out: dict[int, asyncio.Task[None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._trouble, self._again = "", False

    def open(self) -> None:
        """Read the registry, and go on looking at it.

        Raises:
            ConfigError, CapacityError: it cannot be read.
        """
        if self._registry is None:
            return
        self._attendance = Attendance(self._registry, self._house.boot)
        self._read()
        self._look()

    async def close(self) -> None:
        """Look no more."""
        if self._alarm is not None:
            self._alarm.cancel()
        for task in list(self._carrying_out.values()):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._attendance is not None:
            self._attendance.close()

    def check(self, device: str, peer: str) -> None:
        """Let a device in.

        Args:
            peer: who the transport says it is; empty: the transport cannot tell.

        Raises:
            RemoteProtocolError: its name cannot be one.
            AccessError: it may not come in, or is not who it says it is.
        """
        try:
            check_name("device", device)
        except ConfigError as error:
            raise RemoteProtocolError(str(error)) from None
        if peer and device != peer:
            raise AccessError(
                f"device {peer} says it is {device}: connect with the name that its topics and its "
                "certificate have"
            )
        self._admission.roster.check_device(device, registered=self._registered)

    def enter(self, account: str, cut_off: CutOff) -> Callable[[], None]:
        """A program's request begins; return what is to be called at its end."""
        self._guests[cut_off] = account
        self._cut_off_revoked()  # it may have been, since the key was looked up

        def leave() -> None:
            self._guests.pop(cut_off, None)

        return leave

    # --- inside

    def _look(self) -> None:
        assert self._registry is not None
        try:
            if self._registry.has_changed() or self._again:
                self._read()
            self._trouble = ""
        except DeltarelayError as error:  # what it said last still counts
            if str(error) != self._trouble:
                log.error("%s; keys and devices stay as they were", error)
            self._trouble, self._again = str(error), True
        self._alarm = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _read(self) -> None:
        assert self._registry is not None
        assert self._orders is not None
        self._again = False
        self._admission.roster = roster = self._registry.roster()
        for device in list(self._house.devices):
            try:
                roster.check_device(device, registered=self._registered)
            except AccessError as error:
                log.warning("%s; it is cut off", error)
                self._house.expel(device, error)
        self._cut_off_revoked()
        for order in self._orders.waiting_for(self._house.boot):
            if order.id not in self._carrying_out:
                name = f"forget {order.device}"
                task = asyncio.create_task(self._carry_out(order), name=name)
                self._carrying_out[order.id] = task

    def _cut_off_revoked(self) -> None:
        for cut_off, account in list(self._guests.items()):
            error = self._admission.roster.revoked(account)
            if error is not None:
                cut_off(error)

    async def _carry_out(self, order: Order) -> None:
        assert self._orders is not None
        try:
            count = await self._house.forget_device(order.device)
            self._orders.confirm(order, self._house.boot, count)
            log.info("device %s is forgotten, with %d conversations", order.device, count)
        except DeltarelayError as error:
            log.error("device %s is not forgotten yet: %s", order.device, error)
            self._again = True
        finally:
            del self._carrying_out[order.id]
