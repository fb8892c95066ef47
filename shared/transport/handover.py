"""How a decoder hands the memory of a segment to a client, over their Unix socket."""

import array
import os
import socket
import struct

from shared.errors import LinkError, RemoteProtocolError

_GREETING = struct.Struct("<4sBB")
_MAGIC, _VERSION = b"DRSM", 2
_CREDENTIALS = struct.Struct("iII")


def peer_of(control: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end."""
    raw = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def send_memory(control: socket.socket, memory: int, *, sealed: bool) -> None:
    """Pass the descriptor `memory` on; the receiver gets one of its own.

    Raises:
        OSError: the client is gone.
    """
    greeting = _GREETING.pack(_MAGIC, _VERSION, int(sealed))
    socket.send_fds(control, [greeting], [memory])


def send_refusal(control: socket.socket, why: str) -> None:
    """Say why there is none, if the client still listens."""
    control.send(why.encode()[:250])


def receive_memory(control: socket.socket) -> tuple[int, bool]:
    """Take the descriptor that has arrived, and whether its memory is said to be sealed.

    Raises:
        LinkError: the decoder refused.
        RemoteProtocolError: it did not arrive, or another version sent it.
    """
    space = socket.CMSG_SPACE(array.array("i").itemsize)
    data, ancillary, flags, _ = control.recvmsg(256, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    whole = len(data) == _GREETING.size and len(fds) == 1 and not flags & socket.MSG_CTRUNC
    if whole and _GREETING.unpack(data)[:2] == (_MAGIC, _VERSION):
        return fds[0], bool(_GREETING.unpack(data)[2])
    for fd in fds:
        os.close(fd)
    if not data:
        raise LinkError("the decoder hung up at once")
    if not data.startswith(_MAGIC):
        raise LinkError(f"the decoder refused: {data.decode(errors='replace')}")
    raise RemoteProtocolError(
        f"{len(fds)} descriptors arrived, 1 is expected: raise the limit on open files, "
        "or update the older end"
    )
