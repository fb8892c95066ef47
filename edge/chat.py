"""`deltarelay chat`: type in a terminal; every keystroke is relayed, the reply starts on Enter."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence

from edge.__main__ import EdgeSettings, edge_settings
from edge.agent import connect
from edge.converse import Observer, converse
from edge.reply import Reply
from edge.sources.keyboard import KeyboardSource
from edge.talk import Talk
from shared.child import open_decoder
from shared.commands import parser, progress, start_logging
from shared.errors import TurnError
from shared.transport.mqtt_address import without_secrets

_CLEAR = "\r\x1b[K"


def chat(arguments: Sequence[str]) -> int:
    """Chat until Ctrl-D."""
    ask = parser("chat", "Type to a decoder; every keystroke is relayed.", settings=True)
    ask.add_argument("--to", metavar="ADDRESS", help="shm:///path or mqtt://host:port of a decoder")
    ask.add_argument(
        "--whole", action="store_true", help="send turns whole, to feel the difference"
    )
    ask.add_argument(
        "--serve", default="smollm2-135m-instruct", help="model, if a decoder is started"
    )
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    return asyncio.run(_chat(edge_settings(options), options))


async def _chat(settings: EdgeSettings, options: argparse.Namespace) -> int:
    async with contextlib.AsyncExitStack() as stack:
        url = settings.to
        if not url:
            progress(f"starting a decoder with {options.serve} (a few seconds)")
            url = (await stack.enter_async_context(open_decoder(options.serve))).address
        agent = await stack.enter_async_context(
            connect(
                url,
                model=settings.model,
                device=settings.device,
                fleet=settings.fleet,
                decoder=settings.decoder or None,
                credentials=settings.credentials,
            )
        )
        talk = await stack.enter_async_context(
            agent.conversation(
                system=settings.system,
                max_tokens=settings.max_tokens,
                deadline=settings.deadline,
                adapter=settings.adapter,
            )
        )
        where = without_secrets(url)
        print(f"{agent.welcome.model} at {where}. Enter sends, Ctrl-U clears, Ctrl-D leaves.")
        screen = Screen(talk)
        observer = Observer(screen.show, screen.piece, screen.reply, screen.error)
        with KeyboardSource() as keyboard:
            screen.show("")
            await converse(talk, keyboard, observer, whole=options.whole, overlap=True)
    print()
    return 0


class Screen:
    """One input line, replies below it."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._replying = False

    def show(self, text: str) -> None:
        """Show the line as it is typed, with what has been relayed of it."""
        if self._replying:
            print("\n[interrupted]")
            self._replying = False
        committed, tail = len(self._talk.stream.log), len(self._talk.stream.log.tail)
        print(f"{_CLEAR}\x1b[2m[{committed}+{tail}]\x1b[0m > {text}", end="", flush=True)

    def piece(self, piece: str) -> None:
        """Show a piece of the reply."""
        if not self._replying:
            print()
            self._replying = True
        print(piece, end="", flush=True)

    def reply(self, _text: str, reply: Reply) -> None:
        """The reply is over."""
        if reply.reason == "cancelled":
            return
        self._replying = False
        first = (reply.first_at or time.monotonic()) - reply.asked_at
        print(f"\n\x1b[2m[first token after {first * 1e3:.1f} ms]\x1b[0m")
        self.show("")

    def error(self, error: TurnError) -> None:
        """A turn could not be answered."""
        print(f"\n{error}", file=sys.stderr)
