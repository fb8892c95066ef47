"""What waking another process costs on this machine, without any of our code: a floor."""

import asyncio
import mmap
import os
import socket
import struct
import sys
import time

NUM_WAKES = 500
_TIME = struct.Struct("<d")


async def bare_wake(gap: float) -> list[float]:
    """Return seconds from a byte on a socket to the callback in another process's event loop.

    Args:
        gap: seconds between two wake-ups.
    """
    (wake, other), memory = _pair(), os.memfd_create("wake")
    os.ftruncate(memory, mmap.PAGESIZE)
    program = [sys.executable, "-m", "simulations.bench.wake", str(other.fileno()), str(memory)]
    pipe, passed = asyncio.subprocess.PIPE, (other.fileno(), memory)
    sleeper = await asyncio.create_subprocess_exec(*program, stdout=pipe, pass_fds=passed)
    assert sleeper.stdout is not None
    try:
        with mmap.mmap(memory, mmap.PAGESIZE) as shared:
            await sleeper.stdout.readline()
            for _ in range(NUM_WAKES):
                await asyncio.sleep(gap)
                _TIME.pack_into(shared, 0, time.monotonic())
                wake.send(b"w")
            await asyncio.sleep(0.1)
        wake.close()
        took = await asyncio.wait_for(sleeper.stdout.readline(), 10)
    finally:
        if sleeper.returncode is None:
            sleeper.kill()
        await sleeper.wait()
        wake.close()
        other.close()
        os.close(memory)
    return [float(seconds) for seconds in took.split()]


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def _sleep(fd: int, memory: int) -> None:
    wake = socket.socket(fileno=fd)
    shared = mmap.mmap(memory, mmap.PAGESIZE)
    took: list[float] = []
    done = asyncio.Event()

    def woken() -> None:
        if not wake.recv(1):
            done.set()
        else:
            took.append(time.monotonic() - _TIME.unpack_from(shared, 0)[0])

    asyncio.get_running_loop().add_reader(wake, woken)
    print("ready", flush=True)
    await done.wait()
    print(*took, flush=True)


if __name__ == "__main__":
    asyncio.run(_sleep(int(sys.argv[1]), int(sys.argv[2])))
