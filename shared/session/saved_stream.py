"""A decoder's copy of a conversation as a value, kept beyond the process. No I/O, no clock."""

from typing import Annotated

import msgspec

from shared.frames import OpenBody, Reason
from shared.frames.bodies import Natural
from shared.session.cloud_stream import CloudStream, IdCheck
from shared.tokenlog import MAX_ID

TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)], ...]


class SavedStream(msgspec.Struct, frozen=True):
    """What WELCOME has to say of a conversation, and a complete reply that was not confirmed.

    A reply under way is no part of it: the edge may hold more of it than was ever kept here. Its
    turn is kept as one that has not ended. The edge then ends it again, and brings the ids that it
    holds (HISTORY), behind which the reply goes on: so nothing is drawn before the device is back,
    and no index twice that it holds.
    """

    body: OpenBody
    turn: Natural
    history: Natural
    """CRC of the turns before."""
    committed: TokenIds
    attempt: Natural
    reply: TokenIds = ()
    """Complete, and of this turn; empty while there is no `reason`."""
    reason: Reason | None = None
    """Why the reply ended; None: the turn is open."""


def save_stream(stream: CloudStream) -> SavedStream:
    """Return what is to be kept of a stream."""
    complete = bool(stream.reason)
    return SavedStream(
        stream.body,
        stream.turn,
        stream.history_crc,
        tuple(stream.log.committed),
        stream.attempt,
        tuple(stream.reply) if complete else (),
        Reason(stream.reason) if complete else None,
    )


def resume_stream(saved: SavedStream, check_ids: IdCheck) -> CloudStream:
    """Return a stream that stands where `saved` was taken, on no connection.

    Raises:
        RemoteProtocolError: an id is one that a peer may not send.
    """
    check_ids(saved.committed)
    check_ids(saved.reply, reply=True)
    stream = CloudStream(saved.body, check_ids)
    stream.turn, stream.history_crc = saved.turn, saved.history
    stream.log.commit(saved.committed)
    stream.attempt = saved.attempt
    if saved.reason is not None:
        stream.ended, stream.reason, stream.reply = True, saved.reason, list(saved.reply)
    return stream
