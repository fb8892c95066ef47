"""What waits to be sent at QoS 1, and what is under way: order, window, bounds. Pure."""

from collections import Counter, deque
from typing import NamedTuple

from shared.transport import MAX_PENDING

MAX_WINDOW = 8
"""QoS 1 messages under way at once, and at most half of what the broker allows."""
MAX_SHARE = MAX_PENDING // 16
"""Bytes that may wait on one topic when room is scarce."""


class Message(NamedTuple):
    """A message; a retained one counts for no bound, it is of our own making."""

    topic: str
    payload: bytes
    retain: bool = False


class SendWindow:
    """Messages in the order in which they were given."""

    def __init__(self) -> None:
        self.size = 1
        """Messages that may be under way at once."""
        self._waiting: deque[Message] = deque()
        self.num_bytes = 0
        """Bytes that wait."""
        self._by_topic = Counter[str]()
        self._under_way: dict[int, str] = {}
        """What the broker has not acknowledged: number and topic."""

    @property
    def is_idle(self) -> bool:
        """Nothing waits."""
        return not self._waiting

    def allow(self, receive_maximum: int) -> None:
        """The broker takes so many messages at once."""
        self.size = max(1, min(MAX_WINDOW, receive_maximum // 2))

    def add(self, message: Message) -> None:
        """Let a message wait."""
        self._waiting.append(message)
        if not message.retain:
            self._count(message.topic, len(message.payload))

    def take(self) -> Message | None:
        """Return the next message, if the window has room; tell `sent` its number."""
        if not self._waiting or len(self._under_way) >= self.size:
            return None
        message = self._waiting.popleft()
        if not message.retain:
            self._count(message.topic, -len(message.payload))
        return message

    def sent(self, number: int, topic: str) -> None:
        """A message is under way."""
        self._under_way[number] = topic

    def acknowledged(self, number: int) -> str | None:
        """Return the topic of what was acknowledged; None: it was none of the window's."""
        return self._under_way.pop(number, None)

    def is_crowded_by(self, topic: str) -> bool:
        """Tell whether there is little room left, and one topic has more than its share of it."""
        return self.num_bytes > MAX_PENDING // 2 and self._by_topic[topic] > MAX_SHARE

    def drop(self, topic: str) -> None:
        """Forget what waits on one topic."""
        self._waiting = deque(message for message in self._waiting if message.topic != topic)
        self._count(topic, -self._by_topic[topic])

    def _count(self, topic: str, more: int) -> None:
        self.num_bytes += more
        self._by_topic[topic] += more
        if self._by_topic[topic] == 0:
            del self._by_topic[topic]
