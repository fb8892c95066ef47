"""When conversations are written to disk, and how a decoder that starts takes them up again.

Lives in the event loop. Every few seconds a round looks for conversations that were touched since
they were written whole, and has them written in a thread, one after the other. What a crash loses
of a log the vehicle has; what it loses of keys and values is prefilled again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from cloud.conversation import Conversation
from cloud.decoder import Brain
from cloud.engine.cache import BLOCK
from cloud.settings import DecoderSettings
from cloud.snapshot.counts import SnapshotCounts
from cloud.snapshot.fingerprint import layout_of
from cloud.snapshot.format import SavedConversation, block_keys
from cloud.snapshot.restore import Wanted, restore_blocks
from cloud.snapshot.store import Kept, SnapshotStore
from cloud.snapshot.writer import SnapshotWriter
from cloud.worker import Worker
from shared.errors import CapacityError, DeltarelayError
from shared.session.saved_stream import save_stream

log = logging.getLogger(__name__)

EPOCH_JUMP = 1024
"""How far a device's epoch moves on when it is read from a snapshot: beyond every one that was
granted after it was written."""
AFTER_FAILURE = 30.0
"""Seconds without a round when the disk has refused."""
MB = 1024 * 1024
_NEVER = float("-inf")
Resume = Callable[[SavedConversation], Conversation]


class Held(Protocol):
    """The conversations that are kept, as `cloud.conversations` has them."""

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Device and name of each."""
        ...

    def get(self, device: str, name: str) -> Conversation | None: ...
    def epoch_of(self, device: str) -> int: ...


class Snapshots:
    """The snapshots of one decoder.

    Raises:
        ConfigError: the folder that settings name cannot be used.
    """

    def __init__(self, held: Held, brain: Brain, worker: Worker, settings: DecoderSettings) -> None:
        self._held, self._brain, self._every = held, brain, settings.snapshot_every
        self._store = SnapshotStore(
            Path(settings.snapshots),
            layout_of(brain, settings),
            most_bytes=settings.snapshot_mb * MB,
            most_seconds=settings.snapshot_hours * 3600,
            clock=time.time,
        )
        rate = settings.snapshot_mb_per_second * MB
        self._writer = SnapshotWriter(self._store, worker, brain.cache, rate)
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._written: dict[tuple[str, str], float] = {}
        """When a conversation was touched last before it was written whole."""
        self._round_at = 0.0
        self._rounds: asyncio.Task[None] | None = None

    @property
    def counts(self) -> SnapshotCounts:
        """What was done so far."""
        return self._store.counts

    def restore(self, resume: Resume, most: int) -> None:
        """Take up the conversations of an earlier process, before the worker starts.

        Those that were written last come first. As many as the pool has room for are prefilled,
        but for the blocks that are restored; the others are when their devices come back.

        Args:
            resume: makes a conversation that stands where the log was written.
            most: conversations; the others are deleted.
        """
        began = time.perf_counter()
        room = self._brain.num_blocks
        wanted: list[Wanted] = []
        conversations: list[Conversation] = []
        found = self._store.load(self._brain.tokenizer.digest)
        for _, saved in found[most:]:
            self._store.forget(saved.device, saved.name)
        for kept, saved in found[:most]:
            conversation = self._resume(kept, saved, resume)
            if conversation is None:
                continue
            room -= len(conversation.prompt) // BLOCK + 1
            if room >= 0:
                prompt = conversation.prompt
                wanted.append(Wanted(kept, conversation.handle.namespace, prompt))
                conversations.append(conversation)
        restore_blocks(self._store, self._brain.engine, self._brain.cache, reversed(wanted))
        for conversation in conversations:
            conversation.prefill()
        counts = self.counts
        counts.restore_seconds = time.perf_counter() - began
        log.info(
            "restored %d conversations and %d tokens of keys and values in %.2f s",
            len(self._written),
            counts.tokens_restored,
            counts.restore_seconds,
        )

    def start(self) -> None:
        """Begin to write."""
        self._rounds = asyncio.create_task(self._run(), name="snapshots")
        self._rounds.add_done_callback(_say_why)

    def forget(self, device: str, name: str) -> None:
        """Delete what there is of a conversation."""
        self._written.pop((device, name), None)
        self._thread.submit(self._store.forget, device, name)

    async def forget_device(self, device: str) -> None:
        """Delete what there is of a device, behind what is being written of it."""
        for key in [key for key in self._written if key[0] == device]:
            del self._written[key]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._store.forget_device, device)

    async def close(self) -> None:
        """Write what has changed, while the engine still runs, and let go of the folder."""
        if self._rounds is not None:
            self._rounds.cancel()
            await self._round(hurry=True)
        await asyncio.to_thread(self._thread.shutdown)
        self._store.close()

    # --- inside

    def _resume(self, kept: Kept, saved: SavedConversation, resume: Resume) -> Conversation | None:
        try:
            conversation = resume(saved)
        except DeltarelayError as error:
            log.warning("device %s: a conversation cannot go on: %s", saved.device, error)
            self._store.forget(saved.device, saved.name)
            return None
        keys = block_keys(conversation.handle.namespace, conversation.prompt, BLOCK)
        whole = kept.keys.issuperset(keys)
        self._written[saved.device, saved.name] = conversation.touched if whole else _NEVER
        return conversation

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            if not await self._round():
                await asyncio.sleep(AFTER_FAILURE)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.sweep)

    async def _round(self, *, hurry: bool = False) -> bool:
        """Write every conversation that has changed; return whether it went well."""
        last, self._round_at = self._round_at, time.monotonic()
        for key in self._held.keys:
            conversation = self._held.get(*key)
            if conversation is None or conversation.touched <= self._written.get(key, _NEVER):
                continue
            idle = conversation.is_between_turns or conversation.touched < last
            try:
                await self._write(key, conversation, idle=idle, hurry=hurry)
            except CapacityError as error:
                self._written[key] = conversation.touched  # it is no use to try once more
                self._failed(key, error)
            except OSError as error:
                self._failed(key, error)
                return False
        return True

    def _failed(self, key: tuple[str, str], error: Exception) -> None:
        self.counts.failures += 1
        log.warning("device %s: no snapshot: %s", key[0], error)

    async def _write(
        self, key: tuple[str, str], conversation: Conversation, *, idle: bool, hurry: bool
    ) -> None:
        touched, device = conversation.touched, key[0]
        saved = SavedConversation(
            self._brain.tokenizer.digest,
            device,
            self._held.epoch_of(device),
            save_stream(conversation.stream),
            conversation.handle.known,
            [
                None if turn is None else (tuple(turn.user), tuple(turn.reply))
                for turn in conversation.turns
            ],
        )
        work = partial(self._writer.write, saved, conversation.handle.look, idle=idle, hurry=hurry)
        whole = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        if self._held.get(*key) is conversation:
            self._written[key] = touched if whole else _NEVER


def _say_why(rounds: asyncio.Task[None]) -> None:
    if not rounds.cancelled() and (error := rounds.exception()) is not None:
        log.error("snapshots have ended, the decoder goes on without", exc_info=error)
