"""The frame kinds and their bytes. Pure: no I/O, no clock, no state.

Every frame begins with a version byte (major << 4 | minor), a kind byte, the stream and the epoch
as varints; reliable kinds follow with their gapless sequence number. Stream 0 is the connection
itself, every other stream is one conversation. Fields follow in the order of `codec.FIELDS`, which
is the wire contract: its bytes are pinned by golden vectors in the tests, and whoever changes them
raises the version.

A newer minor version may append fields: an older reader ignores trailing bytes of a frame whose
minor is above its own. Kinds from `OPTIONAL_KINDS` on may be skipped by a reader that does not know
them.
"""

from shared.frames.bodies import (
    DRAINING,
    MAJOR,
    MAX_FRAME,
    MINOR,
    RATE_LIMITED,
    Held,
    HelloBody,
    Load,
    OpenBody,
    Reason,
    Sampling,
    WelcomeBody,
)
from shared.frames.codec import OPTIONAL_KINDS, decode, encode
from shared.frames.kinds import (
    CONNECTION,
    Ack,
    Blob,
    Bye,
    Cancel,
    Commit,
    EndTurn,
    Error,
    Fetch,
    Finish,
    Frame,
    Hello,
    History,
    Notice,
    Open,
    Reliable,
    Reopen,
    ReplyAck,
    Resync,
    Rewind,
    Tail,
    Tokens,
    Welcome,
)

__all__ = [
    "CONNECTION",
    "DRAINING",
    "MAJOR",
    "MAX_FRAME",
    "MINOR",
    "OPTIONAL_KINDS",
    "RATE_LIMITED",
    "Ack",
    "Blob",
    "Bye",
    "Cancel",
    "Commit",
    "EndTurn",
    "Error",
    "Fetch",
    "Finish",
    "Frame",
    "Held",
    "Hello",
    "HelloBody",
    "History",
    "Load",
    "Notice",
    "Open",
    "OpenBody",
    "Reason",
    "Reliable",
    "Reopen",
    "ReplyAck",
    "Resync",
    "Rewind",
    "Sampling",
    "Tail",
    "Tokens",
    "Welcome",
    "WelcomeBody",
    "decode",
    "encode",
]
