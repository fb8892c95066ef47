"""The msgpack bodies of HELLO, WELCOME, OPEN and RESYNC, and the protocol's numbers. Pure."""

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

MAJOR, MINOR = 1, 0
MAX_FRAME = 256 * 1024
"""Bytes of one frame; HELLO and WELCOME may agree on less (128 KiB on AWS IoT Core)."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 61)]
"""An int that a peer can make neither negative nor so large that counting on would overflow."""
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
"""A device's name: a level of an MQTT topic, and fit for one line of a log."""
Label = Annotated[str, msgspec.Meta(max_length=1024)]
"""A text that names something, and comes back in messages."""


RATE_LIMITED = "rate-limited"
"""Topic of the NOTICE that says why, and how long, the reply to an ended turn has to wait."""


DRAINING = "draining"
"""Topic of the NOTICE by which a decoder says that it is about to leave: another one takes over."""


class Load(IntEnum):
    """How busy the decoder is: carry on, slow down, hold what can wait."""

    GREEN, YELLOW, RED = 0, 1, 2


class Reason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"  # the model ended it, or a stop string
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"  # barge-in
    DEADLINE = "deadline"  # the conversation's deadline passed
    ERROR = "error"  # an ERROR frame or NOTICE says which


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How reply tokens are drawn. Temperature 0 is greedy.

    Penalties are those of the OpenAI API; `repetition_penalty` is that of CTRL (arXiv 1909.05858).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the reply has already."""
    frequency_penalty: float = 0.0
    """Taken off once for each time the reply has it."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of all tokens seen so far."""
    logit_bias: dict[Natural, float] = {}
    """Added to the logits of single token ids."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What the decoder holds of a conversation; `stream` is the edge's number for it.

    `history` is the CRC of the turns before `turn` (`shared.tokenlog.history_crc`), `length` and
    `crc` are those of its committed ids, and the stream's next frame has the number `seq` + 1.
    """

    stream: Natural
    turn: Natural
    history: Natural
    length: Natural
    crc: Natural
    ended: bool
    attempt: Natural
    seq: Natural


class HelloBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who connects. `conversations`: ids, by the edge's streams, that it wants to go on with."""

    device: Name
    boot: Label
    minor: Natural = MINOR
    epoch: Natural = 0
    tokenizer: Label = ""
    golden: Label = ""
    model: Label = ""
    max_frame: Natural = MAX_FRAME
    conversations: dict[Natural, Label] = {}
    clock_us: int = 0

    @property
    def tag(self) -> str:
        """What tells this HELLO from every other one; WELCOME repeats it."""
        return f"{self.boot}/{self.clock_us}"


class WelcomeBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who answers the HELLO with the tag `answers`. All digests are hexadecimal sha256.

    `adapter` is the digest of what replies where OPEN names none; empty: the base model does.
    """

    decoder: Label
    boot: Label
    epoch: Natural
    tokenizer: Label
    golden: Label
    model: Label
    model_digest: Label
    answers: str = ""
    minor: Natural = MINOR
    template: Label = ""
    adapter: Label = ""
    vocabulary: Natural = 0
    context: Natural = 0
    credit: Natural = 64
    max_frame: Natural = MAX_FRAME
    held: list[Held] = []
    clock_us: int = 0


class OpenBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a conversation is, until BYE. `deadline`: seconds from END_TURN to the reply's end.

    `adapter` is a name; what it stands for may be swapped between two turns (NOTICE "adapter").
    """

    conversation: Label
    system: str = ""
    sampling: Sampling = Sampling()
    max_tokens: int = 256
    stop: list[str] = []
    schema: str = ""
    adapter: Label = ""
    deadline: float = 0.0
