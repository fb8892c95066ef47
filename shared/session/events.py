"""What a session tells its owner, and what it wants sent. Plain values."""

from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import DeltarelayError
from shared.frames import HelloBody, OpenBody, WelcomeBody


class Outgoing(NamedTuple):
    """A frame to send; `provisional` is the transport's delivery class (MQTT: QoS 0, else 1)."""

    data: bytes
    provisional: bool


# --- at the edge


@dataclass(frozen=True, slots=True)
class Connected:
    """The decoder answered; every conversation has been brought up to date on the wire."""

    welcome: WelcomeBody


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection cannot go on. `retry`: connecting again may help."""

    error: DeltarelayError
    retry: bool


@dataclass(frozen=True, slots=True)
class Replied:
    """New reply ids of the stream's current turn."""

    stream: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply of `turn` is complete."""

    stream: int
    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """The decoder tells something (stream 0: about the connection)."""

    stream: int
    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The decoder will not go on with this conversation."""

    stream: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class BlobArrived:
    """A piece of a blob that was asked for with FETCH."""

    digest: str
    offset: int
    size: int
    data: bytes


# --- in the cloud


@dataclass(frozen=True, slots=True)
class Greeted:
    """HELLO arrived; the owner answers with `CloudSession.welcome` or `refuse`."""

    hello: HelloBody


@dataclass(frozen=True, slots=True)
class Opened:
    """A conversation begins, or begins anew."""

    stream: int
    body: OpenBody


@dataclass(frozen=True, slots=True)
class Revised:
    """The ids of the stream's open turn changed."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The open turn ended; a reply is due, behind the ids that the stream's `reply` may have."""

    stream: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """The end of `turn`, the current one, was taken back; its reply is void, complete or not."""

    stream: int
    turn: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The reply of `turn` is over; history keeps its first `heard` ids.

    `user_ids`: what the turn asked, if its reply was still under way; None: it was complete.
    """

    stream: int
    turn: int
    heard: int
    user_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class HistorySet:
    """`turn` consists of these ids now, and everything after it is void."""

    stream: int
    turn: int
    user_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """The edge said goodbye to this conversation."""

    stream: int
    conversation: str


@dataclass(frozen=True, slots=True)
class FetchAsked:
    """The edge wants the bytes of `digest` from `offset` on; answer with `CloudSession.blob`."""

    digest: str
    offset: int


Event = (
    Connected
    | Disconnected
    | Replied
    | Finished
    | Noticed
    | Refused
    | BlobArrived
    | Greeted
    | Opened
    | Revised
    | Ended
    | Reopened
    | Cancelled
    | HistorySet
    | Closed
    | FetchAsked
)
