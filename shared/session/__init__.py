"""The relay's state machines, sans I/O and sans clock: bytes and `now` in, events and bytes out.

The edge is the truth. A decoder keeps a copy of each conversation, and the frames are only the
difference between what the edge has and what it knows the decoder to hold. After a break WELCOME
(or RESYNC) says what the decoder holds, and the same difference is computed again: there is no
replay buffer to keep.
"""

from shared.session.cloud import CloudSession
from shared.session.cloud_stream import CloudStream
from shared.session.conversation_log import ConversationLog, Turn
from shared.session.edge import EdgeSession
from shared.session.edge_stream import EdgeStream
from shared.session.events import (
    BlobArrived,
    Cancelled,
    Closed,
    Connected,
    Disconnected,
    Ended,
    Event,
    FetchAsked,
    Finished,
    Greeted,
    HistorySet,
    Noticed,
    Opened,
    Outgoing,
    Refused,
    Reopened,
    Replied,
    Revised,
)

__all__ = [
    "BlobArrived",
    "Cancelled",
    "Closed",
    "CloudSession",
    "CloudStream",
    "Connected",
    "ConversationLog",
    "Disconnected",
    "EdgeSession",
    "EdgeStream",
    "Ended",
    "Event",
    "FetchAsked",
    "Finished",
    "Greeted",
    "HistorySet",
    "Noticed",
    "Opened",
    "Outgoing",
    "Refused",
    "Reopened",
    "Replied",
    "Revised",
    "Turn",
]
