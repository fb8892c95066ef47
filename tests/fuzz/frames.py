"""Frames: whatever arrives is one frame, or one error."""

from shared import frames
from shared.errors import LocalProtocolError, RemoteProtocolError
from tests.test_shared_frames import EXAMPLES


def seeds() -> list[bytes]:
    """A frame of every kind."""
    return [frames.encode(frame) for frame in EXAMPLES]


def target(data: bytes) -> None:
    """What parses has one canonical form, which parses to itself."""
    try:
        frame = frames.decode(data)
    except RemoteProtocolError:
        return
    if frame is None:
        return
    try:
        canonical = frames.encode(frame)
    except LocalProtocolError:  # a number that took two bytes may take nine
        assert len(data) > frames.MAX_FRAME // 9
        return
    again = frames.decode(canonical)
    assert again is not None
    assert frames.encode(again) == canonical
