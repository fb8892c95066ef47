"""`deltarelay simulate failover`: two decoders at one broker; one after the other fails or leaves.

A decoder is killed, one is frozen for longer than its vehicles have patience and thaws, and one is
restarted as an operator does it. Their vehicles go on at the other one, from their own logs.
"""

import asyncio
import signal
import statistics
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge.agent import connect
from shared.child import ChildDecoder, open_decoder
from shared.commands import progress
from shared.session.edge import PATIENCE
from simulations.broker import open_broker
from simulations.simulate.compare import differences
from simulations.simulate.fleet import Fleet
from simulations.simulate.leaks import Resources
from simulations.simulate.waits import longest_waits

DECODERS = ("north", "south")
AWAY = 1.0
"""Seconds until a killed decoder is started again."""
FROZEN = 2 * PATIENCE
"""Seconds that a decoder is frozen."""
SETTINGS = {"max-tokens": 64, "deadline": 60.0, "pace": 6.0, "pause": 1.0}
"""Of the vehicles."""
GOES_ON_WITHIN = 60.0
"""Seconds after a fault in which each conversation must have the answer to another turn."""
LONGEST_GAP = 10.0
"""Seconds that nobody may wait for a word because of a fault."""


async def simulate_failover(
    model: str, vehicles: int, seconds: float, seed: int, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return how long drivers waited, and whether anybody heard something twice.

    Args:
        seconds: after which no more round of faults begins; there is one at least.
        changes: settings of the decoders.
    """
    before = Resources.now()
    async with _open_pair(model, seed, changes) as pair:
        await pair.drive(vehicles, seconds)
        result = pair.figures()
    leaks = Resources.now().left_behind(before)
    result |= {"leaks": len(leaks), "seed": seed}
    result["broken"] = [*_broken(result), *leaks]
    return result


@asynccontextmanager
async def _open_pair(
    model: str, seed: int, changes: Sequence[str]
) -> AsyncGenerator["_Pair", None]:
    """Start a broker and two decoders; when the block is left, all is stopped and deleted."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="deltarelay-")))
        broker = stack.enter_context(open_broker())
        url = f"mqtt://{broker.host}:{broker.port}"
        decoders: dict[str, ChildDecoder] = {}
        for name in DECODERS:
            progress(f"decoder {name}: loading {model}")
            settings = [f'name="{name}"', f'snapshots="{folder}/{name}"', *changes]
            decoders[name] = await stack.enter_async_context(
                open_decoder(model, listen=[url], changes=settings)
            )
        async with connect(url):  # fetches the tokenizer
            pass
        yield _Pair(Fleet(stack, folder, seed), decoders, url, folder)


class _Pair:
    """Two decoders and their vehicles."""

    def __init__(
        self, fleet: Fleet, decoders: dict[str, ChildDecoder], url: str, folder: Path
    ) -> None:
        self._fleet, self._decoders, self._url, self._folder = fleet, decoders, url, folder
        self._loop = asyncio.get_running_loop()
        self._gaps: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds, by what happened."""
        self._num_faults = self._num_moves = 0
        self._statuses: list[int] = []
        """With which decoders ended that were asked to."""

    async def drive(self, vehicles: int, seconds: float) -> None:
        """Let vehicles talk and decoders fail, and hear the last replies.

        Raises:
            LinkError: a vehicle or a decoder fails, or a conversation does not go on.
        """
        began = self._loop.time()
        for number in range(vehicles):
            await self._fleet.add(f"car-{number}", self._url, SETTINGS)
        await self._fleet.answers(GOES_ON_WITHIN)
        while True:
            for what in ("kill", "freeze", "drain"):
                await self._play(what)
            if self._loop.time() - began >= seconds:
                break
        progress("last replies")
        await self._fleet.stop()
        await self._fleet.leave("leave")
        for decoder in self._decoders.values():
            await asyncio.to_thread(decoder.stop)
            self._statuses.append(decoder.process.returncode)

    def figures(self) -> dict[str, Any]:
        """Compare what drivers, vehicles and decoders, which have ended, have."""
        fleet, ledger = self._fleet, self._fleet.ledger
        differing: list[str] = []
        for name in self._decoders:
            talks = {key: talk for key, talk in ledger.talks.items() if talk.decoder == name}
            differing += differences(self._folder / name, talks)
        unanswered, twice = ledger.unanswered(fleet.script), ledger.answered_twice(fleet.script)
        for what in (*unanswered, *twice, *ledger.contradictions, *differing):
            progress(f"broken: {what}")
        return {
            "gap_s": {what: _summary(gaps) for what, gaps in self._gaps.items()},
            "repeated_tokens": ledger.num_repeated,
            "double_answers": len(twice),
            "differing_logs": len(differing) + fleet.num_missing,
            "contradictions": len(ledger.contradictions),
            "turns": len(ledger.ended),
            "answered_once": len(ledger.ended) - len(unanswered),
            "faults": self._num_faults,
            "moves": self._num_moves,
            "failed_stops": sum(status != 0 for status in self._statuses),
            "vehicles": len(fleet.vehicles),
        }

    async def _play(self, what: str) -> None:
        """Play one fault on the decoder with most vehicles, while it replies to one of them."""
        ledger = self._fleet.ledger
        serving = list(ledger.decoders.values())
        name = max(self._decoders, key=serving.count)
        devices = [device for device, decoder in ledger.decoders.items() if decoder == name]
        await self._fleet.until(
            lambda: ledger.is_replying(devices), GOES_ON_WITHIN, f"reply by {name}"
        )
        at = self._loop.time()
        progress(f"now: {what} {name}, with {len(devices)} vehicles")
        self._num_faults += 1
        await self._break(what, self._decoders[name])
        await self._fleet.answers(GOES_ON_WITHIN, devices)
        self._gaps[what] += longest_waits(ledger, devices, at)
        self._num_moves += sum(ledger.decoders[device] != name for device in devices)

    async def _break(self, what: str, decoder: ChildDecoder) -> None:
        match what:
            case "kill":
                await asyncio.to_thread(decoder.kill)
                await asyncio.sleep(AWAY)
                await decoder.start()
            case "freeze":
                decoder.process.send_signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(FROZEN)
                finally:
                    decoder.process.send_signal(signal.SIGCONT)
            case _:
                await asyncio.to_thread(decoder.stop)
                self._statuses.append(decoder.process.returncode)
                await decoder.start()


def _summary(gaps: Collection[float]) -> dict[str, float]:
    return {"median": round(statistics.median(gaps), 3), "max": round(max(gaps), 3)}


def _broken(result: dict[str, Any]) -> list[str]:
    """Return what was promised and not kept."""
    promises = {
        "turns": result["turns"] > 0,
        "answered_once": result["answered_once"] == result["turns"],
        "repeated_tokens": result["repeated_tokens"] == 0,
        "double_answers": result["double_answers"] == 0,
        "differing_logs": result["differing_logs"] == 0,
        "contradictions": result["contradictions"] == 0,
        "failed_stops": result["failed_stops"] == 0,
        "moves": result["moves"] > 0,
        "gap_s": all(gap["max"] <= LONGEST_GAP for gap in result["gap_s"].values()),
    }
    return [f"{name} = {result[name]}" for name, is_kept in promises.items() if not is_kept]
