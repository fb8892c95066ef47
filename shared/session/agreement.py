"""What both ends have to agree on, and how a connection ends when they do not. Pure."""

from shared import frames
from shared.errors import (
    AccessError,
    LinkError,
    LocalProtocolError,
    ModelError,
    RemoteProtocolError,
    SupersededError,
    TokenizerMismatchError,
)
from shared.frames import HelloBody, WelcomeBody
from shared.session.events import Disconnected

REFUSALS = (AccessError.code, ModelError.code, TokenizerMismatchError.code)
"""Errors that answer a HELLO, and so its epoch: they are no remains of an earlier connection."""
_FINAL = (SupersededError, AccessError, TokenizerMismatchError, ModelError)
"""Errors that another try would meet again."""


def mismatch(mine: HelloBody, body: WelcomeBody) -> TokenizerMismatchError | ModelError | None:
    """Return why the edge of this HELLO cannot use the decoder of this WELCOME; None: it can."""
    if mine.tokenizer and mine.tokenizer != body.tokenizer:
        return TokenizerMismatchError(
            f"tokenizer here {mine.tokenizer}, at decoder {body.decoder} {body.tokenizer}: "
            "connect with the decoder's (leave `tokenizer` unset to fetch it)"
        )
    if mine.golden and mine.golden != body.golden:
        return TokenizerMismatchError(
            f"tokenizer {body.tokenizer} splits the golden texts differently here "
            f"({mine.golden}) and at decoder {body.decoder} ({body.golden}): "
            "install the same tokenizer library versions"
        )
    if mine.model and mine.model != body.model:
        return ModelError(
            f"model {mine.model!r} was asked for; decoder {body.decoder} serves {body.model!r}"
        )
    return None


def ending(frame: frames.Error) -> Disconnected:
    """Return how a connection ends that the decoder ends with this error."""
    for kind in _FINAL:
        if frame.code == kind.code:
            return Disconnected(kind(frame.text), retry=False)
    if frame.code == RemoteProtocolError.code:
        refused = LocalProtocolError(f"the decoder refused: {frame.text}")
        return Disconnected(refused, retry=False)
    return Disconnected(LinkError(f"the decoder ended the connection: {frame.text}"), retry=True)
