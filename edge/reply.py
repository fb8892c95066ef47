"""A reply as it arrives: ids in, text out, and why it ended."""

import asyncio
import time

from shared.errors import DeltarelayError
from shared.frames import Reason
from shared.tokenizer import TextDecoder, Tokenizer

REOPENED = "reopened"
"""Why a reply ended whose turn goes on after all."""


class Reply:
    """A reply as it arrives."""

    def __init__(self, turn: int, tokenizer: Tokenizer) -> None:
        self.turn = turn
        self.asked_at = time.monotonic()
        """When the turn ended, in `time.monotonic`."""
        self.first_at: float | None = None
        """When the first token arrived."""
        self.ids: list[int] = []
        self.shown = 0
        """Ids whose text the reader has taken."""
        self.reason = ""
        """Why it ended; empty while it has not."""
        self.waits = ""
        """Why and how long the decoder makes it wait, if it has said so and nothing has come."""
        self.text = ""
        self._decoder = TextDecoder(tokenizer)
        self._decoded = 0
        self._changed = asyncio.Event()
        self._error: DeltarelayError | None = None

    def extend(self, ids: tuple[int, ...]) -> None:
        """Reply ids arrived."""
        if self.first_at is None:
            self.first_at = time.monotonic()
            self.waits = ""
        self.ids.extend(ids)
        self._changed.set()

    def end(self, reason: str, error: DeltarelayError | None = None) -> None:
        """The reply is over."""
        if not self.reason:
            self.reason, self._error = reason, error
            self._changed.set()

    async def wait(self) -> None:
        """Wait until ids arrive that were not decoded, or the end."""
        while not self.reason and self._decoded == len(self.ids):
            self._changed.clear()
            await self._changed.wait()

    def take(self) -> str:
        """Return the text that arrived since the last call.

        Raises:
            DeltarelayError: the reply ended with an error and there is no text left.
        """
        fresh = self.ids[self._decoded :]
        self._decoded = len(self.ids)
        piece = self._decoder.feed(fresh)
        if self.reason and self._decoded == len(self.ids):
            piece += self._decoder.flush()
        if not piece and self._error is not None:
            error, self._error = self._error, None
            raise error
        self.text += piece
        return piece

    @property
    def withdrawn(self) -> bool:
        """Nobody wants the rest of it: it was interrupted, or the end of its turn taken back."""
        return self.reason in (Reason.CANCELLED, REOPENED)

    @property
    def exhausted(self) -> bool:
        """Nothing more will come."""
        return bool(self.reason) and self._decoded == len(self.ids) and self._error is None
