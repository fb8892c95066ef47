"""What waking another process costs on this machine, without any of our code: a floor."""

import asyncio
import mmap
import os
import struct
import sys
import time

NUM_WAKES = 500
_TIME = struct.Struct("<d")


async def bare_wake(gap: float) -> list[float]:
    """Return seconds from a write to an eventfd to the callback in another process's event loop.

    Args:
        gap: seconds between two wake-ups.
    """
    wake, memory = os.eventfd(0, os.EFD_NONBLOCK), os.memfd_create("wake")
    os.ftruncate(memory, mmap.PAGESIZE)
    program = [sys.executable, "-m", "simulations.bench.wake", str(wake), str(memory)]
    pipe = asyncio.subprocess.PIPE
    sleeper = await asyncio.create_subprocess_exec(*program, stdout=pipe, pass_fds=(wake, memory))
    assert sleeper.stdout is not None
    try:
        with mmap.mmap(memory, mmap.PAGESIZE) as shared:
            await sleeper.stdout.readline()
            for _ in range(NUM_WAKES):
                await asyncio.sleep(gap)
                _TIME.pack_into(shared, 0, time.monotonic())
                os.eventfd_write(wake, 1)
            await asyncio.sleep(0.1)
        os.eventfd_write(wake, NUM_WAKES)
        took = await asyncio.wait_for(sleeper.stdout.readline(), 10)
    finally:
        if sleeper.returncode is None:
            sleeper.kill()
        await sleeper.wait()
        os.close(wake)
        os.close(memory)
    return [float(seconds) for seconds in took.split()]


async def _sleep(wake: int, memory: int) -> None:
    shared = mmap.mmap(memory, mmap.PAGESIZE)
    took: list[float] = []
    done = asyncio.Event()

    def woken() -> None:
        if os.eventfd_read(wake) >= NUM_WAKES:
            done.set()
        else:
            took.append(time.monotonic() - _TIME.unpack_from(shared, 0)[0])

    asyncio.get_running_loop().add_reader(wake, woken)
    print("ready", flush=True)
    await done.wait()
    print(*took, flush=True)


if __name__ == "__main__":
    asyncio.run(_sleep(int(sys.argv[1]), int(sys.argv[2])))
