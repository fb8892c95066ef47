"""A process that gets its memory as any client does, and then keeps to no rule.

`python -m tests.hostile_peer SOCKET ATTACK UID` connects as user UID (0 and our own: as we are) and
prints `done` when it has done its worst. What a decoder owes nobody, it does not wait for.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from random import Random

from shared import frames
from shared.frames import HelloBody, OpenBody
from shared.tokenlog import crc_of
from shared.transport.handover import receive_memory
from shared.transport.ring import HEADER, SLOT, SLOTS, Consumer, Producer
from shared.transport.segment import SIZE
from tests.test_shared_frames import EXAMPLES

SECONDS = 0.3
"""How long an attack that knows no end goes on."""
WORDS = (0, 1, 2, SLOTS, SLOTS + 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
PRODUCED, CONSUMED, WANTED = 128, 256, 384
DOWN = SIZE // 2
"""Where the ring begins that the decoder writes."""


class Peer:
    """One connection, with the memory under its fingers."""

    def __init__(self, path: str, seed: int) -> None:
        self.rng = Random(seed)
        self.device = f"bad-{os.getpid()}-{seed}"
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.connect(path)
        self.fd, self.sealed = receive_memory(self.control)
        self.control.setblocking(False)
        self.memory = mmap.mmap(self.fd, SIZE)
        self.up = Producer(memoryview(self.memory)[:DOWN])

    def close(self) -> None:
        """Leave; the memory goes with the process."""
        self.control.close()
        os.close(self.fd)

    def wake(self) -> bool:
        """Wake the decoder; return whether it still takes that."""
        try:
            self.control.send(b"w")
        except BlockingIOError:  # more wake-ups than it has taken
            return True
        except OSError:
            return False
        return True

    def send(self, *sent: frames.Frame | bytes) -> bool:
        """Write frames as one should; return whether the decoder is still there."""
        for frame in sent:
            data = frame if isinstance(frame, bytes) else frames.encode(frame)
            until = time.monotonic() + SECONDS
            while not self.up.write(data):
                if time.monotonic() > until or not self.wake():
                    return False
        return self.wake()

    def welcome(self) -> frames.WelcomeBody:
        """Read what the decoder answered to HELLO."""
        down = Consumer(memoryview(self.memory)[DOWN:])
        until = time.monotonic() + 10
        while (data := down.read()) is None:
            assert time.monotonic() < until, "no answer to HELLO"
        frame = frames.decode(data)
        assert isinstance(frame, frames.Welcome)
        return frame.body

    def word(self, at: int, value: int) -> None:
        """Write a cursor."""
        struct.pack_into("<Q", self.memory, at, value)

    def greet(self, *, epoch: int = 0) -> int:
        """Say HELLO, open stream 1; return the epoch that was granted."""
        hello = HelloBody(self.device, "b", epoch=epoch, clock_us=time.monotonic_ns())
        self.send(frames.Hello(0, 0, hello))
        self.send(frames.Open(1, epoch + 1, 1, OpenBody(self.device, max_tokens=100)))
        return epoch + 1


def cursors(peer: Peer) -> None:
    """Put a cursor where it cannot be, of either ring."""
    for at in (PRODUCED, CONSUMED, WANTED, DOWN + PRODUCED, DOWN + CONSUMED, DOWN + WANTED):
        peer.word(at, peer.rng.choice(WORDS))
        peer.wake()


def headers(peer: Peer) -> None:
    """Write frames, and change sequence, length or CRC behind the producer's back."""
    for number in range(20):
        at = HEADER + number * SLOT + peer.rng.choice((0, 8, 11, 12))
        peer.up.write(b"x" * peer.rng.choice((0, 1, SLOT - 16, 3 * SLOT)))
        struct.pack_into("<I", peer.memory, at, peer.rng.choice(WORDS) & 0xFFFFFFFF)
        peer.wake()


def endless(peer: Peer) -> None:
    """Write one frame that goes on and on."""
    peer.up.write(b"\x10" * ((SLOT - 16) * SLOTS))
    peer.wake()


def geometry(peer: Peer) -> None:
    """Change what the creator wrote, then everything."""
    peer.greet()
    struct.pack_into("<4I", peer.memory, 0, 0, 0, 1 << 30, 1 << 30)
    struct.pack_into("<4I", peer.memory, DOWN, 0, 0, 1 << 30, 1 << 30)
    peer.wake()
    peer.memory[:] = bytes(SIZE)
    peer.wake()


def scribble(peer: Peer) -> None:
    """Write anything anywhere while the decoder reads."""
    epoch, until = peer.greet(), time.monotonic() + SECONDS
    while time.monotonic() < until and peer.wake():
        with contextlib.suppress(Exception):
            peer.send(frames.Tail(1, epoch, turn=0, after=1, tick=1, ids=(7,)))
        at = peer.rng.choice((0, DOWN)) + peer.rng.randrange(HEADER + 4 * SLOT)
        peer.memory[at : at + 8] = peer.rng.randbytes(8)


def wakes(peer: Peer) -> None:
    """Wake the decoder without a pause and without a reason, and never read a wake-up."""
    peer.greet()
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and peer.wake():
        peer.word(DOWN + WANTED, 1)


def blocking(peer: Peer) -> None:
    """Make blocking all that we were given, so that the decoder might wait for us."""
    for fd in (peer.fd, peer.control.fileno()):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    peer.control.setblocking(False)
    wakes(peer)


def half_closed(peer: Peer) -> None:
    """Close one direction of the socket, and go on."""
    peer.greet()
    peer.control.shutdown(peer.rng.choice((socket.SHUT_RD, socket.SHUT_WR)))
    with contextlib.suppress(OSError):
        peer.send(frames.Bye(1, 1, 2))


def words(peer: Peer) -> None:
    """Say something on the control socket, and pass descriptors there."""
    socket.send_fds(peer.control, [b"w"], [peer.fd] * 50)
    peer.control.send(b"GET / HTTP/1.1")


def disorder(peer: Peer) -> None:
    """Send frames of every kind, before the greeting and after it, until one is too much."""
    greeting = (frames.Hello, frames.Open)
    kinds = [frames.encode(frame) for frame in EXAMPLES if not isinstance(frame, greeting)]
    for epoch in (0, peer.greet(), 1):
        peer.rng.shuffle(kinds)
        kinds.sort(key=lambda data: data[1] >= frames.Welcome.kind)  # what only a decoder says
        peer.send(*(data[:2] + bytes((1, epoch)) + data[4:] for data in kinds))


def ids(peer: Peer) -> None:
    """Commit ids that no vocabulary has, and control ids."""
    epoch = peer.greet()
    bad = peer.rng.choice(((1 << 32) - 1, 1 << 20, 0))
    peer.send(frames.Commit(1, epoch, 2, turn=0, base=0, ids=(bad,), crc=crc_of([bad])))


def deaf(peer: Peer) -> None:
    """Ask for more and more, and read nothing."""
    epoch, tokenizer = peer.greet(), peer.welcome().tokenizer
    end = frames.EndTurn(1, epoch, 2, turn=0, attempt=0, ids=(9,), length=1, crc=crc_of([9]))
    again = frames.ReplyAck(1, epoch, turn=0, index=0, crc=0, again=True)
    alive = peer.send(end)
    until = time.monotonic() + 5 * SECONDS
    while alive and time.monotonic() < until:
        alive = peer.send(*[again, frames.Fetch(0, epoch, digest=tokenizer, offset=0)] * 50)
    assert not alive, "it was given without a bound"


def restless(peer: Peer) -> None:
    """Open conversations with expensive contents, over and over."""
    epoch = peer.greet()
    for number in range(2, 60):
        body = OpenBody(
            f"c{number}",
            system=peer.rng.choice(("", "x" * 99_999, " \n" * 40_000)),
            schema=peer.rng.choice(("", "{", '{"type": "object"}', "[" * 50_000)),
            stop=["x"] * peer.rng.choice((0, 17)),
            deadline=peer.rng.choice((float("nan"), float("inf"), -1.0, 0.0)),
            max_tokens=peer.rng.choice((-1, 0, 1 << 62)),
        )
        peer.send(frames.Open(number, epoch, 1, body))
        peer.send(frames.EndTurn(number, epoch, 2, turn=0, attempt=0, ids=(), length=0, crc=0))


def seals(peer: Peer) -> None:
    """Shrink the memory, grow it, seal it: all of them are refused."""
    assert peer.sealed
    for size in (0, SIZE - 1, SIZE + 1):
        check_refused(lambda size=size: os.ftruncate(peer.fd, size))  # type: ignore[misc]
    for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, 0x10):
        check_refused(lambda seal=seal: fcntl.fcntl(peer.fd, fcntl.F_ADD_SEALS, seal))  # type: ignore[misc]
    peer.greet()


def check_refused(attempt: Callable[[], object]) -> None:
    """Check that the kernel says EPERM."""
    try:
        attempt()
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
    else:
        raise AssertionError("it was allowed")


ATTACKS: dict[str, Callable[[Peer], None]] = {
    attack.__name__: attack
    for attack in (
        *(cursors, headers, endless, geometry, scribble, wakes, blocking, half_closed, words),
        *(disorder, ids, deaf, restless),
    )
}


def main(path: str, name: str, user: str) -> None:
    """Attack three times, each time with other dice, and once leave without a word."""
    if int(user):
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    for seed in range(3):
        peer = Peer(path, seed)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            (seals if name == "seals" else ATTACKS[name])(peer)
        if seed < 2:
            peer.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
