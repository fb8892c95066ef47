"""A vehicle that is never done, as a process: types over a bad link, survives kill -9.

It keeps its conversations in a spool and goes on with them in its next life. What happens it
reports as JSON lines, by conversation and turn. Told "stop" on standard input it hears its replies
out and reports what it has on disk; told "leave" then, it ends and keeps them, told "goodbye" it
has them forgotten first.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from edge.agent import Agent, connect
from edge.door import Door, door_to
from edge.talk import Talk
from shared.child import die_with_parent
from shared.commands import start_logging
from shared.errors import LinkError, TurnError
from shared.tokenizer import TextDecoder
from shared.transport import Transport
from simulations.dialogues import load_dialogues
from simulations.link import Direction, EmulatedTransport, Impairments
from simulations.typist import type_text

log = logging.getLogger(__name__)

SYSTEM = "You are the assistant of a car. Answer in one short sentence."
TALKS = ("driver", "passenger")
LONGEST = 80
"""Characters of a turn."""
SHORTEST_PAUSE = 0.25
"""Share of the longest pause."""
ROUGH = 2.0
"""Seconds of a new connection in which frames overtake each other, where they do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a vehicle is told."""

    to: str
    device: str
    spool: Path
    loss: float
    duplicate: float
    reorder: float
    """Share of the frames of a new connection that are overtaken."""
    deadline: float
    max_tokens: int
    pace: float
    """How much faster than a person it types."""
    pause: float
    """Most seconds between a reply and the next word."""
    seed: int
    life: int
    """How often it was started before: chance goes another way each time."""


@cache
def _texts() -> tuple[str, ...]:
    return tuple(t.text for d in load_dialogues() if d.language == "en" for t in d.turns)


def scripted_turn(seed: int, device: str, talk: str, turn: int) -> str:
    """Return what is said in a turn: numbered, so that no two turns of a conversation are equal."""
    text = Random(f"{seed}/{device}/{talk}/{turn}").choice(_texts())
    return f"{turn + 1}. {text[:LONGEST].strip()}"


class BadDoor:
    """Leads where another door does, over a link that is bad to frames."""

    def __init__(self, door: Door, options: Options, rng: Random) -> None:
        self._door, self._rng = door, rng
        self._calm = Impairments(loss=options.loss, duplicate=options.duplicate)
        self._rough = Impairments(
            loss=options.loss,
            duplicate=options.duplicate,
            reorder=options.reorder,
            reorder_delay=0.1,
        )

    async def open(self) -> Transport:
        """Connect."""
        inner = await self._door.open()
        up, down = Direction(self._rng, self._rough), Direction(self._rng, self._rough)

        def calm_down() -> None:
            up.impairments = down.impairments = self._calm

        asyncio.get_running_loop().call_later(ROUGH, calm_down)
        return EmulatedTransport(inner, up=up, down=down)

    def avoid(self) -> None:
        """Whoever is behind the last connection does not answer."""
        self._door.avoid()


class Traveller:
    """Holds the conversations of one vehicle until it is told to stop."""

    def __init__(self, agent: Agent, options: Options) -> None:
        self._agent, self._options = agent, options
        self._stopping = asyncio.Event()
        self._rng = Random(options.device)
        self._last_word = ""

    async def travel(self) -> None:
        """Hold all conversations at once."""
        self._say("ready")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="listen")
            for name in TALKS:
                group.create_task(self._hold(name), name=name)
        if self._last_word == "goodbye":
            for name in TALKS:
                async with self._conversation(name, keep=False):
                    pass

    async def _listen(self) -> None:
        said = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), sys.stdin)
        await said.readline()
        self._stopping.set()
        self._last_word = (await said.readline()).decode().strip()

    def _conversation(self, name: str, *, keep: bool) -> AbstractAsyncContextManager[Talk]:
        return self._agent.conversation(
            name,
            system=f"{name}: {SYSTEM}",
            max_tokens=self._options.max_tokens,
            deadline=self._options.deadline,
            keep=keep,
        )

    async def _hold(self, name: str) -> None:
        async with self._conversation(name, keep=True) as talk:
            if talk.stream.turns:  # how far it was shown before, nobody knows
                number, ids = len(talk.stream.turns) - 1, talk.stream.turns[-1].reply_ids
                self._say("shown", talk=name, turn=number, index=0, ids=ids)
                self._say("done", talk=name, turn=number)
            if talk.pending:
                await self._hear(name, talk, talk.resume())
            while not self._stopping.is_set():
                await self._speak(name, talk)
                await self._pause()
            self._report(name, talk)

    async def _speak(self, name: str, talk: Talk) -> None:
        """Type a turn, from where an earlier life was, and hear its reply."""
        loop = asyncio.get_running_loop()
        number = talk.stream.turn
        text = scripted_turn(self._options.seed, self._options.device, name, number)
        updates = [u for u in type_text(text, Random(text)) if len(u.text) > len(talk.text)]
        began = loop.time() - (updates[0].at if updates else 0.0) / self._options.pace
        for update in updates:
            await asyncio.sleep(max(0.0, began + update.at / self._options.pace - loop.time()))
            await talk.revise(update.text, update.stable or None)
        pieces = talk.finish(text)
        self._say("ended", talk=name, turn=number)
        await self._hear(name, talk, pieces)

    async def _hear(self, name: str, talk: Talk, pieces: AsyncIterator[str]) -> None:
        reply = talk.reply
        assert reply is not None
        heard = 0

        def show() -> None:
            nonlocal heard
            fresh, index = reply.ids[heard : reply.shown], heard
            heard += len(fresh)
            if fresh:
                self._say("shown", talk=name, turn=reply.turn, index=index, ids=fresh)

        try:
            async for _ in pieces:
                show()
        except TurnError as error:
            log.warning("%s, turn %d: %s", name, reply.turn, error)
        show()
        self._say("done", talk=name, turn=reply.turn)

    async def _pause(self) -> None:
        try:
            longest = self._options.pause
            async with asyncio.timeout(self._rng.uniform(SHORTEST_PAUSE * longest, longest)):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _report(self, name: str, talk: Talk) -> None:
        turns = talk.stream.turns
        texts = [TextDecoder(self._agent.tokenizer).feed(list(turn.user_ids)) for turn in turns]
        self._say(
            "log",
            talk=name,
            conversation=talk.stream.body.conversation,
            turns=[(turn.user_ids, turn.reply_ids, turn.reason) for turn in turns],
            texts=texts,
        )

    def _say(self, event: str, **values: object) -> None:
        """Report an event, and which decoder it is at."""
        report = {"event": event, "decoder": self._agent.welcome.decoder, **values}
        print(json.dumps(report), flush=True)


async def travel(options: Options) -> None:
    """Live until told to stop, or killed."""
    rng = Random(f"{options.seed}/{options.device}/{options.life}")
    async with AsyncExitStack() as stack:
        agent = await _connect(stack, options, rng)
        await Traveller(agent, options).travel()


async def _connect(stack: AsyncExitStack, options: Options, rng: Random) -> Agent:
    """Connect; a first life without a link tries again and again."""
    door = door_to(options.to, fleet="fleet", device=options.device)
    if options.loss or options.duplicate or options.reorder:
        door = BadDoor(door, options, rng)
    while True:
        try:
            return await stack.enter_async_context(
                connect(door, device=options.device, spool=options.spool, rng=rng)
            )
        except LinkError as error:
            log.warning("%s; trying again", error)
            await asyncio.sleep(rng.uniform(0.2, 2.0))


def main(arguments: Sequence[str]) -> None:
    """Run one vehicle."""
    ask = argparse.ArgumentParser(prog="simulations.traveller")
    ask.add_argument("--to", required=True)
    ask.add_argument("--device", required=True)
    ask.add_argument("--spool", type=Path, required=True)
    ask.add_argument("--loss", type=float, default=0.0)
    ask.add_argument("--duplicate", type=float, default=0.0)
    ask.add_argument("--reorder", type=float, default=0.0)
    ask.add_argument("--deadline", type=float, default=0.0)
    ask.add_argument("--max-tokens", type=int, default=24)
    ask.add_argument("--pace", type=float, default=3.0)
    ask.add_argument("--pause", type=float, default=2.0)
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--life", type=int, default=0)
    options = ask.parse_args(arguments)
    die_with_parent()
    start_logging("info")
    asyncio.run(travel(Options(**vars(options))))


if __name__ == "__main__":
    main(sys.argv[1:])
