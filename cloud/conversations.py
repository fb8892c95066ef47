"""Who holds which conversation here: begun, resumed, attached to connections, forgotten.

A conversation outlives connections until BYE, `keep_seconds` or the bounds on their number.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cloud.access.admission import Admission
from cloud.access.allowance import Allowance
from cloud.connection import Connection
from cloud.conversation import Conversation
from cloud.sampling import check_sampling, check_stops
from cloud.snapshot.format import SavedConversation
from cloud.snapshot.keeper import EPOCH_JUMP
from cloud.template import ChatTurn
from cloud.voice import Voice
from shared.errors import CapacityError
from shared.frames import HelloBody
from shared.session import CloudStream
from shared.session.cloud import MAX_STREAMS
from shared.session.cloud_stream import IdCheck
from shared.session.saved_stream import resume_stream

MAX_CONVERSATIONS = 4096
Key = tuple[str, str]
"""A device, and its name for a conversation."""


@dataclass(slots=True)
class _Entry:
    """A conversation and the connection it is on, if any."""

    conversation: Conversation
    connection: Connection | None


class Conversations:
    """The conversations of one decoder.

    Args:
        on_forgotten: called when a conversation is not held any more (device, name).
    """

    def __init__(
        self,
        voice: Voice,
        admission: Admission,
        check_ids: IdCheck,
        on_forgotten: Callable[[str, str], None],
    ) -> None:
        self._voice, self._admission, self._check_ids = voice, admission, check_ids
        self._on_forgotten = on_forgotten
        self._entries: dict[Key, _Entry] = {}
        self._epochs: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> list[Key]:
        """Device and name of each."""
        return list(self._entries)

    def get(self, device: str, name: str) -> Conversation | None:
        """Return a conversation by its identity."""
        entry = self._entries.get((device, name))
        return entry.conversation if entry is not None else None

    def of_device(self, device: str) -> list[str]:
        """Return the names that a device has for its conversations."""
        return [name for holder, name in self._entries if holder == device]

    # --- epochs

    def epoch_of(self, device: str) -> int:
        """Return the epoch a device was granted last; 0: none."""
        return self._epochs.get(device, 0)

    def grant(self, device: str, epoch: int) -> None:
        """A device was granted this epoch."""
        self._epochs[device] = epoch

    # --- connections

    def attach(self, connection: Connection, hello: HelloBody) -> dict[int, CloudStream]:
        """Return what is held of the conversations a device names, by its stream numbers."""
        held: dict[int, CloudStream] = {}
        for number, name in hello.conversations.items():
            entry = self._entries.get((hello.device, name))
            if entry is not None:
                entry.connection = connection
                held[number] = entry.conversation.stream
        return held

    def detach(self, connection: Connection) -> None:
        """A connection is gone; what was on it waits for its device."""
        for entry in self._entries.values():
            if entry.connection is connection:
                entry.connection = None

    # --- coming and going

    def begin(
        self,
        device: str,
        stream: CloudStream,
        connection: Connection | None,
        turns: Sequence[ChatTurn | None] | None = None,
    ) -> Conversation:
        """Begin a conversation, or go on with one that had these turns.

        Raises:
            ContextLengthError, ModelError, InputError: it cannot be served as asked.
        """
        body = stream.body
        check_sampling(body.sampling, self._voice.tokenizer.header.vocabulary)
        check_stops(body.stop)
        self._make_room(device)
        key = (device, body.conversation)

        def put_on_wire() -> None:
            entry = self._entries.get(key)
            if entry is not None and entry.connection is not None:
                entry.connection.pump()

        def notice(topic: str, text: str) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry.connection is not None:
                entry.connection.session.notice(stream.number, topic, text)

        allowance = Allowance(self._admission, device, self._voice.clock)
        conversation = Conversation(
            stream, self._voice, allowance, on_change=put_on_wire, notice=notice, turns=turns
        )
        self._entries[key] = _Entry(conversation, connection)
        return conversation

    def resume(self, saved: SavedConversation) -> Conversation:
        """Go on with a conversation of an earlier process, without its device.

        Raises:
            RemoteProtocolError: its ids are none of this vocabulary.
            ContextLengthError, ModelError, InputError: it cannot be served.
        """
        turns = [None if turn is None else ChatTurn(*turn) for turn in saved.turns]
        for turn in saved.turns:
            if turn is not None:
                self._check_ids(turn[0])
                self._check_ids(turn[1], reply=True)
        stream = resume_stream(saved.stream, self._check_ids)
        conversation = self.begin(saved.device, stream, None, turns)
        conversation.handle.known = saved.adapter
        epoch = saved.epoch + EPOCH_JUMP
        self.grant(saved.device, max(self.epoch_of(saved.device), epoch))
        return conversation

    def forget(self, device: str, name: str) -> None:
        """Drop a conversation and what the engine holds of it."""
        entry = self._entries.pop((device, name), None)
        if entry is not None:
            entry.conversation.close()
            self._on_forgotten(device, name)

    def forget_device(self, device: str) -> tuple[int, set[str]]:
        """Drop all conversations of a device; return how many there were, and their tenants."""
        names = self.of_device(device)
        tenants = {self._entries[device, name].conversation.tenant for name in names}
        for name in names:
            self.forget(device, name)
        self._epochs.pop(device, None)
        return len(names), tenants

    def sweep(self, untouched_since: float, connected: Iterable[str]) -> None:
        """Drop those whose device has been away, and that nobody has touched since then.

        A device that is away and has none left is forgotten with its epoch: it tells its own when
        it comes back.
        """
        for (device, name), entry in list(self._entries.items()):
            if entry.connection is None and entry.conversation.touched < untouched_since:
                self.forget(device, name)
        known = {device for device, _ in self._entries}.union(connected)
        for device in self._epochs.keys() - known:
            del self._epochs[device]

    def _make_room(self, device: str) -> None:
        """Drop the coldest conversation: the device's own, if it has as many as any may have."""
        own = [key for key in self._entries if key[0] == device]
        full = len(self._entries) >= MAX_CONVERSATIONS
        keys = own if len(own) >= MAX_STREAMS else list(self._entries) if full else []
        away = [key for key in keys if self._entries[key].connection is None]
        if not keys:
            return
        coldest = min(away or keys, key=lambda k: self._entries[k].conversation.touched)
        entry = self._entries[coldest]
        if entry.connection is not None:
            error = CapacityError(f"{len(keys)} conversations are held: this one had to go")
            entry.connection.session.refuse_stream(entry.conversation.stream.number, error)
            entry.connection.pump()
        self.forget(*coldest)
