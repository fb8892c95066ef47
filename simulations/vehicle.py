"""One vehicle of a fleet, as a process: speaks or types its dialogues, reports JSON lines.

Every turn is held twice, in two conversations of the same agent: relayed while it grows, and right
after its reply once more whole, with one END_TURN when it ends. Both have their earlier turns
cached.
"""

import argparse
import asyncio
import dataclasses
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
from shared.channel import Traffic
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
            relayed, whole = await self._conversations(stack, dialogue.system)
            for turn in dialogue.turns:
                readings = typed(turn, self._options, self._rng)
                await self._turn(relayed, whole, readings, turn.barge_in_after)

    async def speak(self, recording: Path) -> None:
        """Say what a recording says."""
        system = "You are the assistant of a car. Answer in one short sentence."
        start, seconds = SPEECH
        source = SpeechSource(recording, start=start, seconds=seconds)
        async with AsyncExitStack() as stack:
            relayed, whole = await self._conversations(stack, system)
            await self._turn(relayed, whole, source.readings(), None, spoken=True)

    async def _conversations(self, stack: AsyncExitStack, system: str) -> list[Talk]:
        """Open two of the same kind. The decoder shares prefixes: they differ in the first word."""
        most = self._options.max_tokens
        return [
            await stack.enter_async_context(
                self._agent.conversation(system=f"{greeting} {system}", max_tokens=most)
            )
            for greeting in ("Hello.", "Welcome.")
        ]

    async def _turn(
        self,
        relayed: Talk,
        whole: Talk,
        readings: AsyncIterator[Reading],
        barge_in_after: int | None,
        *,
        spoken: bool = False,
    ) -> None:
        record = TurnRecord(relayed, self._agent.traffic)
        text = ""
        async for reading in readings:
            text = reading.text
            if reading.ended:
                break
            await relayed.revise(text, reading.stable or None)
            record.heard(text)
        pieces = relayed.finish(text)
        record.ended(text)
        shown = await read(relayed, pieces, barge_in_after, record)
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
            relayed_ms=(reply.first_at - reply.asked_at) * 1e3,
            whole_ms=first * 1e3,
            **record.figures,
        )

    async def _whole(self, talk: Talk, text: str, barge_in_after: int | None) -> float:
        """Send the turn whole at its end; return seconds to the first token."""
        await read(talk, talk.finish(text), barge_in_after, None)
        reply = talk.reply
        assert reply is not None
        assert reply.first_at is not None
        return reply.first_at - reply.asked_at


class TurnRecord:
    """What a turn cost and when what happened, from its first word on."""

    def __init__(self, talk: Talk, traffic: Traffic) -> None:
        self._talk, self._traffic = talk, traffic
        self._started = time.monotonic()
        self._back, self._before = talk.tokens_taken_back, dataclasses.replace(traffic)
        self._resent: list[int] = []
        self._timeline: list[tuple[float, str, str]] = []
        self.figures: dict[str, object] = {"timeline": self._timeline}

    def heard(self, text: str) -> None:
        """The text so far was relayed."""
        log = self._talk.stream.log
        say("text", text=text, committed=len(log), tail=len(log.tail))
        self._note("text", f"{len(log)}+{len(log.tail)}")
        self._resent.append(json_size(text))

    def ended(self, text: str) -> None:
        """The turn ended with `text`."""
        talk, traffic, before = self._talk, self._traffic, self._before
        self.figures |= {
            "ended": time.monotonic() - self._started,
            "tokens": len(talk.stream.log),
            "taken_back": talk.tokens_taken_back - self._back,
            "relay_bytes": traffic.bytes_sent - before.bytes_sent,
            "relay_frames": traffic.frames_sent - before.frames_sent,
            "json_resent_bytes": sum(self._resent),
            "json_updates": len(self._resent),
            "json_once_bytes": json_size(text),
        }

    def replied(self, piece: str) -> None:
        """A piece of the reply was shown."""
        say("piece", piece=piece)
        self._note("reply", piece)

    def _note(self, kind: str, what: str) -> None:
        self._timeline.append((time.monotonic() - self._started, kind, what))


def json_size(text: str) -> int:
    """Return the bytes of a text as the JSON message that would carry it."""
    return len(json.dumps({"text": text}, ensure_ascii=False).encode())


async def read(
    talk: Talk, pieces: AsyncIterator[str], barge_in_after: int | None, record: TurnRecord | None
) -> str:
    """Read a reply; if the driver barges in, only its first `barge_in_after` tokens."""
    shown = ""
    async for piece in pieces:
        shown += piece
        if record is not None:
            record.replied(piece)
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
    ask.add_argument("--max-tokens", type=int, default=10)
    ask.add_argument("--pause", type=float, default=0.25)
    o = ask.parse_args(arguments)
    die_with_parent()
    asyncio.run(
        drive(Options(o.to, o.device, tuple(o.dialogue), o.speak, o.pace, o.max_tokens, o.pause))
    )


if __name__ == "__main__":
    main(sys.argv[1:])
