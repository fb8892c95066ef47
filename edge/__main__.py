"""`deltarelay edge`: an agent fed by standard input, a speech recording or a script."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge.agent import connect
from edge.converse import Observer, converse
from edge.reply import Reply
from edge.sources import Source
from edge.sources.text import LineSource, ScriptSource
from edge.talk import Talk
from shared.commands import parser, print_json, progress, run, start_logging
from shared.config import load_settings
from shared.errors import TurnError
from shared.paths import default_socket
from shared.transport.credentials import Credentials


class EdgeSettings(msgspec.Struct, frozen=True):
    """Settings of `deltarelay edge` and `deltarelay chat`."""

    to: str = ""
    """Where a decoder is: shm:///path or mqtt://host:port."""
    model: str = ""
    """Refuse a decoder that serves another model."""
    device: str = ""
    """This vehicle's name in its fleet, the same at every start; no VIN."""
    fleet: str = "fleet"
    decoder: str = ""
    spool: str = ""
    """Folder of this device in which its conversation outlives the process; empty: nothing does."""
    conversation: str = "drive"
    """Name of the conversation that the spool goes on with."""
    credentials: Credentials = Credentials()
    """How to get into an MQTT broker."""
    system: str = "You are the assistant of a car. Answer the driver in one short sentence."
    max_tokens: int = 64
    deadline: float = 30.0
    stop: list[str] = []
    adapter: str = ""
    """Name of a LoRA adapter of the decoder that replies; empty: the base model does."""


def edge(arguments: Sequence[str]) -> int:
    """Run an agent until its source is exhausted."""
    ask = parser(
        "edge",
        "An edge agent. Standard input: a line is the text so far, an empty line ends a turn.",
        settings=True,
        reports=True,
    )
    ask.add_argument("--to", metavar="ADDRESS", help="shm:///path or mqtt://host:port of a decoder")
    source = ask.add_mutually_exclusive_group()
    source.add_argument("--speech", type=Path, metavar="WAV", help="recognize a recording")
    source.add_argument("--script", type=Path, metavar="JSONL", help="type the turns of a dialogue")
    ask.add_argument("--speed", type=float, default=12.0, help="typing speed, characters a second")
    ask.add_argument("--whole", action="store_true", help="send turns whole, at their end")
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    settings = edge_settings(options)
    return asyncio.run(_run(settings, _source(options), whole=options.whole, as_json=options.json))


def edge_settings(options: argparse.Namespace) -> EdgeSettings:
    """Return the settings that `options` ask for."""
    changes = list(options.changes)
    if options.to:
        changes.append(f'to="{options.to}"')
    return load_settings(EdgeSettings, options.config, changes)


def _source(options: argparse.Namespace) -> Source:
    if options.speech is not None:
        from edge.sources.speech import SpeechSource

        return SpeechSource(options.speech)
    if options.script is not None:
        return ScriptSource(options.script, characters_per_second=options.speed)
    return LineSource()


class Reporter:
    """Prints replies as they come, or keeps them for one JSON object at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self.turns: list[dict[str, object]] = []

    def piece(self, piece: str) -> None:
        """A piece of the reply."""
        if not self._as_json:
            print(piece, end="", flush=True)

    def reply(self, text: str, reply: Reply, *, timed: bool = True) -> None:
        """A reply is over; `timed`: this process has seen its turn end."""
        first = None
        if timed and reply.first_at is not None:
            first = round((reply.first_at - reply.asked_at) * 1e3, 2)
        self.turns.append(
            {"text": text, "reply": reply.text, "reason": reply.reason, "first_token_ms": first}
        )
        if not self._as_json:
            after = f", first token after {first} ms" if timed else ""
            print(f"\n[{reply.reason}{after}]", flush=True)

    def error(self, error: TurnError) -> None:
        """A turn could not be answered."""
        progress(f"deltarelay edge: {error}")


async def _run(settings: EdgeSettings, source: Source, *, whole: bool, as_json: bool) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    report = Reporter(as_json=as_json)
    observer = Observer(on_piece=report.piece, on_reply=report.reply, on_error=report.error)
    try:
        async with connect(
            settings.to or f"shm://{default_socket()}",
            model=settings.model,
            device=settings.device,
            fleet=settings.fleet,
            decoder=settings.decoder or None,
            spool=Path(settings.spool) if settings.spool else None,
            credentials=settings.credentials,
        ) as agent:
            decoder = f"decoder {agent.welcome.decoder} ({agent.welcome.model})"
            progress(f"connected to {decoder}" if agent.is_connected else f"waiting for {decoder}")
            async with agent.conversation(
                settings.conversation if settings.spool else "",
                system=settings.system,
                max_tokens=settings.max_tokens,
                deadline=settings.deadline,
                stop=settings.stop,
                adapter=settings.adapter,
                keep=bool(settings.spool),
            ) as talk:
                await _finish_reply(talk, report)
                await converse(talk, source, observer, whole=whole)
    except asyncio.CancelledError:
        return 143
    if as_json:
        print_json({"turns": report.turns})
    return 0


async def _finish_reply(talk: Talk, report: Reporter) -> None:
    """Show the reply that an earlier process was still waiting for."""
    if not talk.pending:
        return
    reply = talk.reply
    assert reply is not None
    try:
        async for piece in talk.resume():
            report.piece(piece)
    except TurnError as error:
        report.error(error)
    report.reply("", reply, timed=False)


if __name__ == "__main__":
    sys.exit(run("edge", edge, sys.argv[1:]))
