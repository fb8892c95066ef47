"""Shared memory between two users, really: a child process that gives up root.

Runs as root only; elsewhere `test_shm` does the same with an assumed uid.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shared.errors import LinkError
from shared.transport.shm_listener import ShmListener
from tests.conformance.ends import listening, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65_534

_CLIENT = """
import asyncio, mmap, os, sys
from shared.errors import DeltarelayError
from shared.transport.segment import SIZE
from shared.transport.shm import connect_shm
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))

async def main():
    try:
        transport = await connect_shm(sys.argv[1])
    except DeltarelayError as error:
        print("refused:", error, flush=True)
        return
    memory = transport._segment.memory
    for size in (0, SIZE - 4096, SIZE + 4096):
        try:
            os.ftruncate(memory, size)
            print("shrunk", flush=True)
        except PermissionError:
            pass
    heard = asyncio.Event()
    transport.start(lambda frame: (print("heard", frame, flush=True), heard.set()), print)
    transport.send(b"from another user")
    await heard.wait()
    transport.close()

asyncio.run(main())
"""


@pytest.fixture
def path() -> Generator[Path, None, None]:
    """A socket in a folder that every user may enter."""
    with TemporaryDirectory(prefix="deltarelay-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder) / "decoder.sock"


@asynccontextmanager
async def client(path: Path) -> AsyncGenerator[Process, None]:
    """A client that runs as nobody."""
    command = [sys.executable, "-c", _CLIENT, str(path), str(NOBODY)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=PIPE, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    )
    try:
        yield process
    finally:
        await process.wait()


async def said(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode()


def test_the_socket_keeps_other_users_out_before_we_are_asked(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path)) as waiting, client(path) as process:
            text = await said(process)
            assert "Permission denied" in text
            assert "may this user connect" in text
            assert waiting.ends == []

    run(test)


def test_a_user_who_is_not_on_the_list_is_refused_by_number(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path, allow_uids=[12_345])) as waiting:
            async with client(path) as process:
                assert f"user {NOBODY} may not connect" in await said(process)
                assert waiting.ends == []

    run(test)


def test_a_user_on_the_list_talks_over_memory_that_it_cannot_shrink(path: Path) -> None:
    async def test() -> None:
        async with listening(ShmListener(path, allow_uids=[NOBODY])) as waiting:
            async with client(path) as process:
                end = await waiting.next()
                assert await end.has(1) == [b"from another user"]
                end.transport.send(b"welcome")
                assert await said(process) == "heard b'welcome'\n", "and nothing was shrunk"
                assert isinstance(await end.ended(), LinkError)

    run(test)
