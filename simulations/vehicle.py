"""One vehicle of a fleet, as a process: speaks or types its dialogues, reports JSON lines.

Every turn is held twice, in two conversations of the same agent: relayed while it grows, and right
after its reply once more whole, with one END_TURN when it ends. Both have their earlier turns
cached.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from edge.agent import Agent, connect
from edge.sources import Reading
from edge.sources.speech import SpeechSource, shipped_recording
from edge.talk import Talk
from shared.child import die_with_parent
from simulations.dialogues import Dialogue, DriverTurn, load_dialogues
from simulations.typist import type_text

LONG_TURN = 40
"""Tokens from which a turn counts as long."""
SPEECH = (4.5, 4.1)
"""Start and length, in seconds, of what is played of the speech package's recording."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a vehicle is told."""

    to: str
    device: str
    dialogues: tuple[str, ...]
    speak: bool
    pace: float
    max_tokens: int
    pause: float


async def typed(turn: DriverTurn, options: Options, rng: Random) -> AsyncIterator[Reading]:
    """Yield a turn as it is typed, `pace` times as fast as people do."""
    started = time.monotonic()
    for update in type_text(turn.text, rng):
        await asyncio.sleep(max(0.0, started + update.at / options.pace - time.monotonic()))
        yield Reading(update.text, update.stable)
    await asyncio.sleep(options.pause)
    yield Reading(turn.text, len(turn.text), ended=True)


class Vehicle:
    """Runs the turns of one vehicle."""

    def __init__(self, agent: Agent, options: Options) -> None:
        self._agent, self._options = agent, options
        self._rng = Random(options.device)

    async def hold(self, dialogue: Dialogue) -> None:
        """Hold a typed dialogue."""
        async with AsyncExitStack() as stack:
            relayed, whole = [
                await stack.enter_async_context(self._conversation(dialogue.system))
                for _ in range(2)
            ]
            for turn in dialogue.turns:
                readings = typed(turn, self._options, self._rng)
                await self._turn(relayed, whole, readings, turn.barge_in_after)

    async def speak(self, recording: Path) -> None:
        """Say what a recording says."""
        system = "You are the assistant of a car. Answer in one short sentence."
        start, seconds = SPEECH
        source = SpeechSource(recording, start=start, seconds=seconds)
        async with AsyncExitStack() as stack:
            relayed, whole = [
                await stack.enter_async_context(self._conversation(system)) for _ in range(2)
            ]
            await self._turn(relayed, whole, source.readings(), None, spoken=True)

    def _conversation(self, system: str):  # type: ignore[no-untyped-def]  # a context manager of a Talk
        return self._agent.conversation(system=system, max_tokens=self._options.max_tokens)

    async def _turn(
        self,
        relayed: Talk,
        whole: Talk,
        readings: AsyncIterator[Reading],
        barge_in_after: int | None,
        *,
        spoken: bool = False,
    ) -> None:
        timeline: list[tuple[float, str, str]] = []
        started = time.monotonic()
        back, traffic = relayed.tokens_taken_back, self._agent.traffic
        before = (traffic.bytes_sent, traffic.frames_sent)
        resent = updates = 0
        text = ""
        async for reading in readings:
            text = reading.text
            if reading.ended:
                break
            await relayed.revise(text, reading.stable or None)
            log = relayed.stream.log
            say("text", text=text, committed=len(log), tail=len(log.tail))
            timeline.append((time.monotonic() - started, "text", f"{len(log)}+{len(log.tail)}"))
            resent += len(json.dumps({"text": text}, ensure_ascii=False).encode())
            updates += 1
        pieces = relayed.finish(text)
        ended = time.monotonic() - started
        tokens = len(relayed.stream.log)
        traffic = self._agent.traffic
        sent = (traffic.bytes_sent - before[0], traffic.frames_sent - before[1])
        shown = await read(relayed, pieces, barge_in_after, started, timeline)
        first = await self._whole(whole, text, barge_in_after)
        reply = relayed.reply
        assert reply is not None
        assert reply.first_at is not None
        say(
            "turn",
            text=text,
            reply=shown,
            reason=reply.reason,
            spoken=spoken,
            tokens=tokens,
            taken_back=relayed.tokens_taken_back - back,
            relayed_ms=(reply.first_at - reply.asked_at) * 1e3,
            whole_ms=first * 1e3,
            relay_bytes=sent[0],
            relay_frames=sent[1],
            json_resent_bytes=resent,
            json_updates=updates,
            json_once_bytes=len(json.dumps({"text": text}, ensure_ascii=False).encode()),
            ended=ended,
            timeline=timeline,
        )

    async def _whole(self, talk: Talk, text: str, barge_in_after: int | None) -> float:
        """Send the turn whole at its end; return seconds to the first token."""
        await read(talk, talk.finish(text), barge_in_after, 0.0, [])
        reply = talk.reply
        assert reply is not None
        assert reply.first_at is not None
        return reply.first_at - reply.asked_at


async def read(
    talk: Talk,
    pieces: AsyncIterator[str],
    barge_in_after: int | None,
    started: float,
    timeline: list[tuple[float, str, str]],
) -> str:
    """Read a reply; if the driver barges in, only its first `barge_in_after` tokens."""
    shown = ""
    async for piece in pieces:
        shown += piece
        if started:
            say("piece", piece=piece)
            timeline.append((time.monotonic() - started, "reply", piece))
        if barge_in_after is not None and talk.reply and talk.reply.shown >= barge_in_after:
            await talk.revise("")  # the driver begins to speak
            break
    return shown


def say(event: str, **values: object) -> None:
    """Report one event."""
    print(json.dumps({"event": event, **values}, ensure_ascii=False), flush=True)


async def drive(options: Options) -> None:
    """Connect and hold all dialogues of a vehicle."""
    known = {dialogue.id: dialogue for dialogue in load_dialogues()}
    async with connect(options.to, device=options.device) as agent:
        vehicle = Vehicle(agent, options)
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)  # the fleet starts together
        if options.speak:
            await vehicle.speak(shipped_recording())
        for name in options.dialogues:
            await vehicle.hold(known[name])
        say("done")


def main(arguments: Sequence[str]) -> None:
    """Run one vehicle."""
    ask = argparse.ArgumentParser(prog="simulations.vehicle")
    ask.add_argument("--to", required=True)
    ask.add_argument("--device", required=True)
    ask.add_argument("--dialogue", action="append", default=[])
    ask.add_argument("--speak", action="store_true")
    ask.add_argument("--pace", type=float, default=6.0)
    ask.add_argument("--max-tokens", type=int, default=12)
    ask.add_argument("--pause", type=float, default=0.25)
    o = ask.parse_args(arguments)
    die_with_parent()
    asyncio.run(
        drive(Options(o.to, o.device, tuple(o.dialogue), o.speak, o.pace, o.max_tokens, o.pause))
    )


if __name__ == "__main__":
    main(sys.argv[1:])
