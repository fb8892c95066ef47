"""The one error tree. Every error has a code on the wire and an exit status in the shell.

A message names the value, the bound and the place, and says what to do next.
"""

from typing import ClassVar


class DeltarelayError(Exception):
    """Base of every error this project raises on purpose."""

    code: ClassVar[int] = 1
    """Code on the wire, in an ERROR frame."""
    exit_status: ClassVar[int] = 1
    """Exit status of a command that ends with this error (BSD sysexits where one fits)."""


class InputError(DeltarelayError):
    """What a user or caller gave is not acceptable: a value, a file, a sequence of calls."""

    code, exit_status = 2, 65


class ConfigError(InputError):
    """A configuration key or value is wrong; the message names its path."""

    code, exit_status = 3, 78


class ModelError(DeltarelayError):
    """A model file is missing, damaged or of an unsupported kind."""

    code, exit_status = 4, 66


class ProtocolError(DeltarelayError):
    """Base of the two kinds of protocol mistakes."""

    code, exit_status = 10, 76


class LocalProtocolError(ProtocolError):
    """We tried to do what the protocol does not allow in this state."""

    code = 11


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol does not allow; its connection ends, nobody else's."""

    code = 12


class TokenizerMismatchError(ProtocolError):
    """Both ends tokenize differently; both digests are named."""

    code = 13


class SupersededError(ProtocolError):
    """Another connection of the same device took over with a higher epoch."""

    code = 14


class LinkError(DeltarelayError):
    """The link to the peer is absent, refused or broken."""

    code, exit_status = 20, 69


class TurnError(DeltarelayError):
    """A turn cannot be answered as asked (too long, expired, cancelled by the decoder)."""

    code, exit_status = 30, 65


class ContextLengthError(TurnError):
    """A turn or conversation does not fit the model's context."""

    code = 31


class CapacityError(DeltarelayError):
    """A bounded resource (memory, blocks, /dev/shm, sessions) is exhausted."""

    code, exit_status = 40, 75


class AccessError(DeltarelayError):
    """Somebody may not do this here: not registered, revoked, or not who they say they are."""

    code, exit_status = 50, 77
