"""How a decoder hands the descriptors of a segment to a client, over their Unix socket."""

import array
import os
import socket
import struct

from shared.errors import LinkError, RemoteProtocolError
from shared.transport.segment import Descriptors

_GREETING = struct.Struct("<4sBB")
_MAGIC, _VERSION = b"DRSM", 1
_CREDENTIALS = struct.Struct("iII")


def peer_of(control: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end."""
    raw = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def send_descriptors(control: socket.socket, descriptors: Descriptors, *, sealed: bool) -> None:
    """Pass them on; the receiver gets descriptors of its own.

    Raises:
        OSError: the client is gone.
    """
    greeting = _GREETING.pack(_MAGIC, _VERSION, int(sealed))
    fds = [descriptors.memory, descriptors.client_wake, descriptors.server_wake]
    socket.send_fds(control, [greeting], fds)


def send_refusal(control: socket.socket, why: str) -> None:
    """Say why there are none, if the client still listens."""
    control.send(why.encode()[:250])


def receive_descriptors(control: socket.socket) -> tuple[Descriptors, bool]:
    """Take the descriptors that have arrived, and whether their memory is said to be sealed.

    Raises:
        LinkError: the decoder refused.
        RemoteProtocolError: not all of them arrived, or another version sent them.
    """
    space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    data, ancillary, flags, _ = control.recvmsg(256, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    whole = len(data) == _GREETING.size and len(fds) == 3 and not flags & socket.MSG_CTRUNC
    if whole and _GREETING.unpack(data)[:2] == (_MAGIC, _VERSION):
        return Descriptors(*fds), bool(_GREETING.unpack(data)[2])
    for fd in fds:
        os.close(fd)
    if not data:
        raise LinkError("the decoder hung up at once")
    if not data.startswith(_MAGIC):
        raise LinkError(f"the decoder refused: {data.decode(errors='replace')}")
    raise RemoteProtocolError(
        f"{len(fds)} of 3 descriptors arrived: raise the limit on open files, "
        "or update the older end"
    )
