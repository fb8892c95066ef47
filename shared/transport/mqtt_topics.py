"""MQTT 5 between hosts.

    dr/v1/{fleet}/{decoder}/{device}/up     frames to a decoder
    dr/v1/{fleet}/{device}/down             frames to a device
    dr/v1/{fleet}/{decoder}/state           retained while the decoder is connected
    dr/v1/{fleet}/{device}/presence         an empty message when the device leaves

A device picks one of the decoders that announce themselves by rendezvous hashing, so that it finds
the same one again and a fleet spreads evenly. However a decoder leaves, its last will clears its
state, and however a device leaves, its last will says so: then the connections with it are over. A
decoder that is about to leave says `draining` first: nobody new picks it. A decoder hangs up on one
device by an empty message. A device hears of no other device.
"""

import re

import msgspec

from shared.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VIN = re.compile(r"[A-HJ-NPR-Z0-9]{17}", re.IGNORECASE)
"""A vehicle identification number: 17 characters without I, O and Q (ISO 3779)."""


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """The retained announcement of a decoder: `decoder`, or `draining` before it leaves."""

    role: str
    boot: str = ""


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be a level of a topic.

    Raises:
        ConfigError: it cannot, or has a vehicle identification number in it. Brokers and their logs
            show topics to many, and such a number leads to a person.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{kind} {name!r}: 1..64 letters, digits, '.', '_' and '-' are allowed")
    if any(_VIN.fullmatch(part) for part in re.split("[._-]", name)):
        raise ConfigError(
            f"{kind} name looks like a vehicle identification number (17 letters and digits): it "
            "would stand in topics and logs and leads to a person; choose a name that does not"
        )
    return name


def role_of(payload: bytes) -> str:
    """Return the role that an announcement states; empty: none, or it is none of ours."""
    try:
        return msgspec.json.decode(payload, type=State).role if payload else ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
