"""A decoder's announcement at the broker: whoever may publish there writes what it likes."""

import msgspec

from shared.transport.mqtt_topics import State, role_of


def seeds() -> list[bytes]:
    """Announcements, withdrawn, of another role, with more keys."""
    return [
        msgspec.json.encode(State("decoder", "b0")),
        b"",
        b'{"role":"other"}',
        b'{"role":"decoder","later":[1,{"a":[null,true,1e9,"\\u00e9\xc3\xa9"]}]}',
    ]


def target(data: bytes) -> None:
    """It has a role, or none."""
    assert isinstance(role_of(data), str)
