"""`deltarelay simulate chaos`: one fault after the other, by chance, over both links.

After each, every conversation must go on, and decoder and vehicles must hold no more than before.
In the end what drivers were shown, vehicles have on disk and the decoder holds must be the same,
and when all have said goodbye nothing may be left of them.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from cloud.snapshot.reader import read_conversations
from shared.commands import progress
from simulations.simulate.compare import differences
from simulations.simulate.leaks import Holdings, Resources
from simulations.simulate.mishaps import MISHAPS
from simulations.simulate.place import DECODER, Place, open_place
from simulations.traveller import TALKS

GOES_ON_WITHIN = 60.0
"""Seconds after a fault in which each conversation must have the answer to another turn."""
GONE_WITHIN = 15.0
"""Seconds in which decoder and vehicles must have let go of what a fault cost."""
WRITTEN_WITHIN = 45.0
"""Seconds in which a decoder has written all it holds, also one whose disk has refused."""
LOOK = 0.2
MOMENT = 0.5
"""Most seconds before the next fault."""
OWN_MEMORY = "shared memory full"
"""The fault for which the decoder needs a /dev/shm of its own."""


async def simulate_chaos(
    model: str, vehicles: int, seconds: float, seed: int, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return which faults were played, and what they left behind or broke.

    Args:
        seconds: after which no more faults begin; each is played once at least.
        changes: settings of the decoder.
    """
    before = Resources.now()
    async with open_place(model, vehicles, seed, changes) as place:
        chaos = _Chaos(place, Random(f"{seed}/chaos"))
        await chaos.play(seconds)
        await chaos.end()
        result = chaos.figures()
    leaks = [*chaos.leaks, *Resources.now().left_behind(before)]
    result |= {"leaks": len(leaks), "seed": seed, "broken": [*chaos.violations, *leaks]}
    return result


class _Chaos:
    """Plays faults on a place, and watches what becomes of it."""

    def __init__(self, place: Place, rng: Random) -> None:
        self._place, self._rng = place, rng
        self._loop = asyncio.get_running_loop()
        self._before: dict[int, Holdings] = {}
        """What each process held when it was first seen at work, by its id."""
        self._faults = Counter[str]()
        why_not = place.why_not_own_memory
        self._skipped = {OWN_MEMORY: why_not} if why_not else {}
        self._differing: list[str] = []
        self.leaks: list[str] = []
        self.violations: list[str] = []

    async def play(self, seconds: float) -> None:
        """Play faults in rounds; each round has all of them, in an order of its own.

        Raises:
            LinkError: a conversation does not go on, or a process does not come back.
        """
        began = self._loop.time()
        await self._check("the start")
        kinds = [name for name in MISHAPS if name not in self._skipped]
        while not self._faults or self._loop.time() - began < seconds:
            for name in self._rng.sample(kinds, len(kinds)):
                if all(self._faults[kind] for kind in kinds) and self._is_over(began + seconds):
                    return
                await asyncio.sleep(self._rng.uniform(0.0, MOMENT))
                progress(f"{self._loop.time() - began:.0f} s: {name}")
                self._faults[name] += 1
                await MISHAPS[name](self._place, self._rng)
                await self._check(name)

    async def end(self) -> None:
        """Hear the last replies, compare all logs, let vehicles say goodbye, stop the decoder.

        Raises:
            LinkError: a vehicle does not end.
        """
        progress("last replies")
        place, fleet = self._place, self._place.fleet
        await fleet.stop()
        self._differing = await _settle(self._look_at_logs, WRITTEN_WITHIN)
        await fleet.leave("goodbye")
        self.leaks += await _settle(self._look_for_remains, GONE_WITHIN)
        await asyncio.to_thread(place.decoder.stop)
        if status := place.decoder.process.returncode:
            self.violations.append(f"the decoder ended with status {status}")

    def figures(self) -> dict[str, Any]:
        """Compare what drivers were shown with what vehicles and the decoder have."""
        fleet, ledger = self._place.fleet, self._place.fleet.ledger
        unanswered, twice = ledger.unanswered(fleet.script), ledger.answered_twice(fleet.script)
        self.violations += [f"not answered once: {key}" for key in unanswered]
        self.violations += [f"answered twice: {key}" for key in twice]
        self.violations += [f"shown otherwise: {what}" for what in ledger.contradictions]
        self.violations += [f"differs: {what}" for what in self._differing]
        if ledger.num_repeated:
            self.violations.append(f"{ledger.num_repeated} tokens shown twice in one life")
        return {
            "faults": dict(self._faults),
            "skipped": self._skipped,
            "violations": len(self.violations),
            "turns": len(ledger.ended),
            "answered_once": len(ledger.ended) - len(unanswered),
            "double_answers": len(twice),
            "repeated_tokens": ledger.num_repeated,
            "differing_logs": len(self._differing) + fleet.num_missing,
            "vehicles": len(fleet.vehicles),
        }

    # --- inside

    def _is_over(self, until: float) -> bool:
        return self._loop.time() >= until

    async def _check(self, after: str) -> None:
        """See every conversation go on, and nothing be held that was not before."""
        await self._place.fleet.answers(GOES_ON_WITHIN)
        found = await _settle(self._look_for_leaks, GONE_WITHIN)
        self.leaks += [f"after {after}: {what}" for what in found]
        for pid in self._pids().values():
            if found or pid not in self._before:
                self._before[pid] = Holdings.of(pid)

    def _pids(self) -> dict[str, int]:
        vehicles = {vehicle.name: vehicle.pid for vehicle in self._place.fleet.vehicles}
        return {DECODER: self._place.decoder.process.pid} | vehicles

    async def _look_for_leaks(self) -> list[str]:
        found: list[str] = []
        for name, pid in self._pids().items():
            now = Holdings.of(pid)
            found += [f"{name} holds {what}" for what in now.beyond(self._before.get(pid, now))]
        gauges = await self._place.gauges()
        vehicles = len(self._place.fleet.vehicles)
        expected = {"devices": vehicles, "conversations": vehicles * len(TALKS)}
        return found + [
            f"{gauges[name]:g} {name}, expected {count}"
            for name, count in expected.items()
            if gauges[name] != count
        ]

    async def _look_for_remains(self) -> list[str]:
        """Return what the decoder still holds when everybody has said goodbye."""
        kept = list(read_conversations(self._place.snapshots))
        gauges = await self._place.gauges()
        left = [f"{value:g} {name} in the end" for name, value in gauges.items() if value]
        return left + [f"a snapshot of {one.device} in the end" for one in kept]

    async def _look_at_logs(self) -> list[str]:
        return differences(self._place.snapshots, self._place.fleet.ledger.talks)


async def _settle(look: Callable[[], Awaitable[list[str]]], within: float) -> list[str]:
    """Look until nothing is found; return what still is after `within` seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within
    while (found := await look()) and loop.time() < until:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(LOOK)
    return found
