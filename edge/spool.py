"""A device's conversations on disk: what a new process goes on from.

The log in memory is the truth; the file is told the difference to what it was told before, as the
decoder is. Places of a conversation's stream in the outbox: 0 is how it began, k + 1 is finished
turn k, behind them come the pieces of the open turn.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shared.errors import LinkError
from shared.frames import OpenBody, WelcomeBody
from shared.outbox import Bounds, Change, Cut, Item, Kind, Outbox, Put, Remember
from shared.session import ConversationLog, Turn
from shared.tokenlog import common_prefix

log = logging.getLogger(__name__)

_STREAM = "conversation/"
_WELCOME = "welcome"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """A time that outlives the process: monotonic within one boot of the host, else wall clock."""

    boot: str
    monotonic: float
    wall: float

    @staticmethod
    def now() -> "Moment":
        """Return this moment."""
        return Moment(_boot_id(), time.monotonic(), time.time())

    def age(self) -> float:
        """Return the seconds since then; never negative."""
        same = self.boot == _boot_id()
        then, now = (self.monotonic, time.monotonic()) if same else (self.wall, time.time())
        return max(0.0, now - then)


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A conversation, as it was opened."""

    body: OpenBody


class Exchanged(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """A finished turn."""

    user_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    reason: str
    unread: bool
    """Its reply was complete when no application had the conversation."""


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """Of the open turn's committed ids `keep` stand, and `ids` follow."""

    keep: int
    ids: tuple[int, ...]
    attempt: int
    ended: Moment | None


class Heard(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    """Ids of the reply to the open turn, from index `index` on."""

    index: int
    ids: tuple[int, ...]


Record = Began | Exchanged | Said | Heard
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


@dataclass(slots=True)
class Kept:
    """A conversation as the disk has it."""

    body: OpenBody
    turns: list[Turn] = field(default_factory=list[Turn])
    ids: list[int] = field(default_factory=list[int])
    ended: Moment | None = None
    """When the open turn ended; None: it has not."""
    attempt: int = 0
    reply: list[int] = field(default_factory=list[int])
    unread: bool = False
    """No application has had the last turn's reply."""
    pieces: int = 0
    """Records of the open turn."""

    @property
    def next_place(self) -> int:
        """Where the next record goes."""
        return 1 + len(self.turns) + self.pieces

    def apply(self, record: Record) -> None:
        """Follow a record."""
        self.pieces += 1
        match record:
            case Began(body):
                self.body, self.pieces = body, 0
            case Exchanged(user_ids, reply_ids, reason, unread):
                self.turns.append(Turn(user_ids, reply_ids, reason))
                self.unread = unread
                self.ids, self.ended, self.attempt = [], None, 0
                self.reply, self.pieces = [], 0
            case Said(keep, ids, attempt, ended):
                self.ids[keep:] = ids
                self.attempt, self.ended = attempt, ended
                self.reply = self.reply if ended is not None else []
            case Heard(index, ids):
                self.reply[index:] = ids

    def restore(self, into: ConversationLog) -> None:
        """Have a new log go on from here."""
        ended = self.ended is not None
        into.restore(self.turns, self.ids, self.reply, ended=ended, attempt=self.attempt)


class Recorder:
    """Tells the disk what of one conversation it was not told yet.

    Args:
        kept: what the disk has of it.
    """

    def __init__(self, outbox: Outbox, name: str, stream: ConversationLog, kept: Kept) -> None:
        self._outbox, self._stream = outbox, stream
        self._name = _STREAM + name
        self._body, self._told = kept.body, kept
        self._end = (len(kept.turns), kept.attempt, kept.ended or Moment.now())
        """The last end of a turn: which turn, which attempt, when."""
        self.unread = kept.unread
        """No application has had the last turn's reply."""

    @property
    def ended(self) -> Moment | None:
        """When the open turn ended; None: it has not."""
        stream = self._stream
        if not stream.ended:
            return None
        if self._end[:2] != (stream.turn, stream.attempt):
            self._end = (stream.turn, stream.attempt, Moment.now())
        return self._end[2]

    def claim(self) -> None:
        """It is in use: write all of it, and let nothing of it be dropped."""
        self._outbox.pin(self._name)
        self.begin()

    def begin(self) -> None:
        """Write all of it, in place of whatever is there."""
        self._told = Kept(self._body)
        began = self._put(Began(self._body), at=0)
        self._outbox.write(Cut(self._name), began, *self._news())

    def record(self, then: Callable[[], object] | None = None, *, sync: bool = False) -> None:
        """Write what is new.

        Args:
            then: called from another thread when it would outlive this process.
            sync: and a loss of power, too.
        """
        changes = self._news()
        if changes or then is not None:
            self._outbox.write(*changes, urgent=sync, then=then)

    def release(self) -> None:
        """It is not in use any more, and stays."""
        self._outbox.unpin(self._name)

    def drop(self) -> None:
        """It is over: delete it."""
        self._outbox.unpin(self._name)
        self._outbox.write(Cut(self._name))

    # --- inside

    def _news(self) -> list[Change]:
        """Return what the disk is to be told; from now on it counts as told."""
        changes: list[Change] = []
        for turn in self._stream.turns[len(self._told.turns) :]:
            at = 1 + len(self._told.turns)
            unread = self.unread and at == len(self._stream.turns)
            record = Exchanged(turn.user_ids, turn.reply_ids, turn.reason, unread)
            changes += [Cut(self._name, at), self._put(record, at)]
        for piece in self._open_turn():
            changes.append(self._put(piece, self._told.next_place))
        return changes

    def _open_turn(self) -> Generator[Record, None, None]:
        stream, told = self._stream, self._told
        ids, ended = stream.log.committed, self.ended
        keep = common_prefix(told.ids, ids)
        same_words = keep == len(told.ids) == len(ids)
        if not same_words or (told.attempt, told.ended) != (stream.attempt, ended):
            yield Said(keep, tuple(ids[keep:]), stream.attempt, ended)
        reply = stream.reply.ids
        have = common_prefix(told.reply, reply)
        if have < max(len(told.reply), len(reply)):
            yield Heard(have, tuple(reply[have:]))

    def _put(self, record: Record, at: int) -> Put:
        self._told.apply(record)
        return Put(Item(Kind.WORDS, self._name, at, _encode(record)))


class Spool:
    """The durable folder of one device; one process at a time.

    Raises:
        LinkError: the folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path, bounds: Bounds | None = None) -> None:
        self.on_lost: Callable[[], object] = lambda: None
        """Called from another thread when what was written may be gone: write it anew."""
        with contextlib.ExitStack() as undo:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LinkError(
                    f"spool {folder}: another agent uses it; stop that one, or give each device "
                    "its own folder"
                ) from None
            except OSError as error:
                raise LinkError(
                    f"spool {folder}: {error.strerror}; check the folder and its rights"
                ) from None
            self.outbox = Outbox(folder / "spool.sqlite", bounds, on_lost=self._lost)
            self._undo = undo.pop_all()
        self.kept = _read(self.outbox)
        """Conversations that the disk has, by name."""

    def close(self) -> None:
        """Write what waits, and let go of the folder."""
        self.outbox.close()
        self._undo.close()

    def _lost(self) -> None:
        self.on_lost()

    @property
    def welcome(self) -> WelcomeBody | None:
        """What a decoder said last, to this process or an earlier one."""
        raw = self.outbox.recall(_WELCOME)
        try:
            return None if raw is None else msgspec.msgpack.decode(raw, type=WelcomeBody)
        except msgspec.DecodeError:
            return None  # of a version that said it otherwise

    def remember(self, welcome: WelcomeBody) -> None:
        """A decoder answered: its epoch and its tokenizer are wanted again."""
        lean = msgspec.structs.replace(welcome, held=[])
        self.outbox.write(Remember(_WELCOME, msgspec.msgpack.encode(lean)))


def _read(outbox: Outbox) -> dict[str, Kept]:
    kept: dict[str, Kept] = {}
    for item in outbox.items():
        name = item.stream.removeprefix(_STREAM)
        if item.kind is not Kind.WORDS or name == item.stream:
            continue
        try:
            record = _decode(item.payload)
        except msgspec.DecodeError as error:  # of a version that wrote it otherwise
            log.error("spool: item %d of %s: %s; it begins anew", item.seq, item.stream, error)
            kept.pop(name, None)
            continue
        if isinstance(record, Began):
            kept[name] = Kept(record.body)
        elif name in kept:
            kept[name].apply(record)
    return kept


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
