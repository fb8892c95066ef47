"""The frame kinds: immutable values, one class each. Pure."""

from typing import ClassVar

import msgspec

from shared.frames.bodies import Held, HelloBody, OpenBody, WelcomeBody

CONNECTION = 0
"""The stream of HELLO, WELCOME, FETCH, BLOB and of errors that concern the whole connection."""


class Frame(msgspec.Struct, frozen=True):
    """What every frame carries."""

    kind: ClassVar[int] = 0
    reliable: ClassVar[bool] = False
    """In the gapless sequence of its stream."""
    provisional: ClassVar[bool] = False
    """Soon outdated by the next one: may be lost (MQTT: QoS 0)."""
    stream: int
    epoch: int


class Reliable(Frame, frozen=True):
    """A frame of the gapless, acknowledged sequence of its stream."""

    reliable: ClassVar[bool] = True
    seq: int


class Hello(Frame, frozen=True):
    kind: ClassVar[int] = 0x01
    body: HelloBody


class Open(Reliable, frozen=True):
    """Begin the conversation of this stream anew; what the decoder held of it is dropped."""

    kind: ClassVar[int] = 0x02
    body: OpenBody


class Commit(Reliable, frozen=True):
    """Extend the committed ids of `turn` from index `base`; `crc` is the rolling CRC then."""

    kind: ClassVar[int] = 0x03
    turn: int
    base: int
    ids: tuple[int, ...]
    crc: int


class Rewind(Reliable, frozen=True):
    """Lower the committed ids of `turn` to the first `to`."""

    kind: ClassVar[int] = 0x04
    turn: int
    to: int


class EndTurn(Reliable, frozen=True):
    """Commit `ids` (the tail) and ask for a reply; `attempt` counts how often it was taken back."""

    kind: ClassVar[int] = 0x05
    turn: int
    attempt: int
    ids: tuple[int, ...]
    length: int
    crc: int


class Cancel(Reliable, frozen=True):
    """End the reply of `turn`; history keeps its first `heard` ids."""

    kind: ClassVar[int] = 0x06
    turn: int
    heard: int


class Reopen(Reliable, frozen=True):
    """Take the end of `turn` back; its next end is `attempt`."""

    kind: ClassVar[int] = 0x07
    turn: int
    attempt: int


class History(Reliable, frozen=True):
    """Set `turn` to these ids. Not `done`: the reply goes on after `reply_ids` (as `attempt`)."""

    kind: ClassVar[int] = 0x08
    turn: int
    attempt: int
    user_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    done: bool


class Bye(Reliable, frozen=True):
    """The conversation is over; the decoder forgets it."""

    kind: ClassVar[int] = 0x09


class Tail(Frame, frozen=True):
    """The whole provisional tail of `turn`; valid only behind frame `after`, newest tick wins."""

    kind: ClassVar[int] = 0x0A
    provisional: ClassVar[bool] = True
    turn: int
    after: int
    tick: int
    ids: tuple[int, ...]


class ReplyAck(Frame, frozen=True):
    """The edge holds `index` ids of the reply, with `crc`; `again` asks for what follows."""

    kind: ClassVar[int] = 0x0B
    turn: int
    index: int
    crc: int
    again: bool


class Fetch(Frame, frozen=True):
    """Ask for the bytes of a blob from `offset` on."""

    kind: ClassVar[int] = 0x0C
    digest: str
    offset: int


class Welcome(Frame, frozen=True):
    kind: ClassVar[int] = 0x20
    body: WelcomeBody


class Ack(Frame, frozen=True):
    """Everything up to `seq` is applied; `credit` more reliable frames may follow.

    Not provisional: the last one of a burst has no successor that would heal its loss.
    """

    kind: ClassVar[int] = 0x21
    seq: int
    credit: int
    load: int


class Resync(Frame, frozen=True):
    """The decoder's view differs: this is what it holds, and all frames under way are void."""

    kind: ClassVar[int] = 0x22
    held: Held


class Tokens(Frame, frozen=True):
    """Reply ids of `turn` from index `index` on; idempotent by (turn, attempt, index)."""

    kind: ClassVar[int] = 0x23
    turn: int
    attempt: int
    index: int
    ids: tuple[int, ...]


class Finish(Frame, frozen=True):
    """The reply of `turn` has `length` ids and ended for `reason`."""

    kind: ClassVar[int] = 0x24
    turn: int
    attempt: int
    length: int
    reason: str


class Notice(Frame, frozen=True):
    """Something the user may want to know and nothing has to answer: `topic` is for programs."""

    kind: ClassVar[int] = 0x25
    topic: str
    text: str


class Error(Frame, frozen=True):
    """An error of the tree in `shared.errors`, by code. On stream 0 the connection ends with it."""

    kind: ClassVar[int] = 0x26
    code: int
    text: str


class Blob(Frame, frozen=True):
    """`data` of the blob `digest` at `offset`; the blob has `size` bytes."""

    kind: ClassVar[int] = 0x27
    digest: str
    offset: int
    size: int
    data: bytes
