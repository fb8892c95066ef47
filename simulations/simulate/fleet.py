"""Vehicle processes, and the ledger of what they report."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Literal

from shared.errors import LinkError
from simulations.simulate.children import ReportingProcess
from simulations.simulate.ledger import Ledger
from simulations.traveller import TALKS, scripted_turn

LAST_REPLIES = 90.0
"""Seconds in which a vehicle must have heard its replies when it is told to stop."""
LEAVE_WITHIN = 20.0
"""Seconds in which it must have ended then."""


class Fleet:
    """The vehicles of one simulation.

    Args:
        stack: kills the vehicles that still live when it is left.
        folder: for their spools and logs.
        seed: of what is said.
    """

    def __init__(self, stack: AsyncExitStack, folder: Path, seed: int) -> None:
        self._stack, self._folder, self._seed = stack, folder, seed
        self._loop = asyncio.get_running_loop()
        self._reported = asyncio.Event()
        self.ledger = Ledger()
        self.vehicles: list[ReportingProcess] = []
        self.script = partial(scripted_turn, seed)

    async def add(
        self, device: str, to: str, options: Mapping[str, object], *, through: Sequence[str] = ()
    ) -> ReportingProcess:
        """Start a vehicle.

        Args:
            to: address of the broker or the decoder.
            options: others of `simulations.traveller`.
            through: a program that runs it, with its arguments.
        """
        settings = {"to": to, "device": device, "spool": self._folder / device, "seed": self._seed}
        arguments = [
            part
            for name, value in {**settings, **options}.items()
            for part in (f"--{name}", f"{value}")
        ]
        vehicle = ReportingProcess(
            device,
            [*through, sys.executable, "-m", "simulations.traveller", *arguments],
            self._folder / f"{device}.log",
            partial(self._take, device),
        )
        self._stack.push_async_callback(vehicle.close)
        self.vehicles.append(vehicle)
        await vehicle.start()
        return vehicle

    async def until(self, is_so: Callable[[], bool], within: float, what: str) -> None:
        """Wait for something that vehicles report.

        Raises:
            LinkError: it is not so within `within` seconds; with the ends of all logs.
        """
        try:
            async with asyncio.timeout(within):
                while not is_so():
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            said = "; ".join(f"{one.name}{one.last_words()}" for one in self.vehicles)
            raise LinkError(f"no {what} within {within:g} s: {said}") from None

    async def answers(self, within: float, devices: Sequence[str] | None = None) -> None:
        """Wait until each conversation has the answer to a turn that ends from now on.

        Args:
            devices: whose conversations; None: of all.

        Raises:
            LinkError: one has not within `within` seconds.
        """
        began, ledger = self._loop.time(), self.ledger
        names = devices if devices is not None else [one.name for one in self.vehicles]
        wanted = {(name, talk) for name in names for talk in TALKS}

        def answered() -> set[tuple[str, str]]:
            return {(k.device, k.talk) for k in ledger.done if ledger.ended[k] > began}

        await self.until(
            lambda: wanted <= answered(), within, f"answer to each of {sorted(wanted)}"
        )

    async def stop(self) -> None:
        """Let vehicles hear their replies out and report what they have on disk.

        Raises:
            LinkError: one does not in time.
        """
        for vehicle in self.vehicles:
            await vehicle.tell("stop")
        await self.until(
            lambda: self.num_missing == 0, LAST_REPLIES, "log of each vehicle's conversations"
        )

    async def leave(self, word: Literal["leave", "goodbye"]) -> None:
        """Let vehicles that have stopped end: keep their conversations, or have them forgotten.

        Raises:
            LinkError: one does not end, or fails.
        """
        for vehicle in self.vehicles:
            await vehicle.tell(word)
        await asyncio.gather(*(vehicle.ended(LEAVE_WITHIN) for vehicle in self.vehicles))

    @property
    def num_missing(self) -> int:
        """Conversations that their vehicles have not reported."""
        return len(self.vehicles) * len(TALKS) - len(self.ledger.talks)

    def _take(self, device: str, report: Mapping[str, object]) -> None:
        self.ledger.take(device, report, self._loop.time())
        self._reported.set()
