"""Committed ids, a provisional tail, and a rolling CRC at every length. No I/O, no clock.

The one data structure both ends of the relay keep. The CRC at length n is the CRC-32 of the first n
committed ids, each as four little-endian bytes; it is kept for every length, so that taking ids
back is a truncation and two ends can compare any common length.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence

from shared.errors import LocalProtocolError

_ID = struct.Struct("<I")
MAX_ID = (1 << 32) - 1
"""Largest token id: the rolling CRC takes ids as four bytes."""


class TokenLog:
    """The token ids of one turn."""

    __slots__ = ("_committed", "_crcs", "_tail")

    def __init__(self, committed: Iterable[int] = (), tail: Iterable[int] = ()) -> None:
        self._committed: list[int] = []
        self._crcs = [0]
        self._tail: tuple[int, ...] = tuple(tail)
        self.commit(committed)

    def __len__(self) -> int:
        return len(self._committed)

    def __repr__(self) -> str:
        return f"TokenLog({self._committed!r}, {self._tail!r})"

    @property
    def committed(self) -> Sequence[int]:
        """Ids that only `rewind` takes back. Not to be changed by the caller."""
        return self._committed

    @property
    def tail(self) -> tuple[int, ...]:
        """Ids after the committed ones that the next revision may change."""
        return self._tail

    @tail.setter
    def tail(self, ids: Iterable[int]) -> None:
        self._tail = tuple(ids)

    @property
    def ids(self) -> list[int]:
        """Committed and tail, a new list."""
        return [*self._committed, *self._tail]

    def commit(self, ids: Iterable[int]) -> None:
        """Append `ids` to the committed ones; the tail stays as it is.

        Raises:
            LocalProtocolError: one of them is no token id; nothing changed.
        """
        ids, crc, crcs = check_ids(ids), self._crcs[-1], []
        for token in ids:
            crc = zlib.crc32(_ID.pack(token), crc)
            crcs.append(crc)
        self._committed += ids
        self._crcs += crcs

    def rewind(self, to: int) -> None:
        """Take back every committed id from index `to` on, and the tail.

        Raises:
            LocalProtocolError: `to` is negative or beyond what is committed.
        """
        if not 0 <= to <= len(self._committed):
            raise LocalProtocolError(f"rewind to {to}: committed are 0..{len(self._committed)}")
        del self._committed[to:]
        del self._crcs[to + 1 :]
        self._tail = ()

    def crc(self, length: int | None = None) -> int:
        """Return the CRC-32 of the first `length` committed ids (of all of them by default)."""
        return self._crcs[-1 if length is None else length]

    def matches(self, length: int, crc: int) -> bool:
        """Tell whether these are the first `length` committed ids here, too."""
        return 0 <= length < len(self._crcs) and self._crcs[length] == crc


def crc_of(ids: Iterable[int], crc: int = 0) -> int:
    """Return the CRC-32 of `ids` as a `TokenLog` would keep it, behind ids with `crc`."""
    return zlib.crc32(b"".join(map(_ID.pack, check_ids(ids))), crc)


def history_crc(user_ids: Sequence[int], reply_ids: Sequence[int], before: int = 0) -> int:
    """Return the CRC of a history: that of the turns `before`, and one more turn."""
    return crc_of((len(user_ids), *user_ids, len(reply_ids), *reply_ids), before)


def check_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return `ids` as a tuple, if each of them can be a token id.

    Raises:
        LocalProtocolError: one of them cannot.
    """
    ids = tuple(ids)
    if ids and not (min(ids) >= 0 and max(ids) <= MAX_ID):
        wrong = next(token for token in ids if not 0 <= token <= MAX_ID)
        raise LocalProtocolError(f"token id {wrong} is outside 0..2^32-1")
    return ids


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading ids `a` and `b` share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next((i for i in range(n) if a[i] != b[i]), n)  # n: a list and a tuple
