"""A peer that keeps to no rule costs its own session: the decoder lives, other vehicles go on."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cloud.server import Decoder
from edge.agent import connect
from tests.brains import small_brain, small_settings
from tests.conformance.ends import open_fds
from tests.conformance.test_shm import shm_names
from tests.hostile_peer import ATTACKS
from tests.test_cloud_server import World, answer, model_folder

NOBODY = 65_534
ROOT = Path(__file__).parents[1]
PATIENCE = 20.0
"""Seconds within which another vehicle's reply is complete, whatever happens beside it."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@contextmanager
def nothing_left(world: World) -> Generator[None, None, None]:
    """Check that no descriptor, segment or thread is left of what happens inside."""
    fds, names, threads = open_fds(), shm_names(), set(threading.enumerate())
    yield
    assert open_fds() == fds
    assert shm_names() == names
    assert set(threading.enumerate()) == threads
    assert not world.decoder._connections


@asynccontextmanager
async def serving(path: Path) -> AsyncGenerator[World, None]:
    """Run a decoder at a Unix socket that any user may connect to."""
    changes = {"precision": "exact", "allow_uids": (NOBODY,)}
    decoder = Decoder(
        small_brain(model_folder(), **changes), small_settings(model_folder(), **changes)
    )
    await decoder.start([f"shm://{path}"])
    try:
        yield World(decoder)
        assert not decoder._failed.done(), "the engine failed"
    finally:
        await decoder.close()


async def attack(path: Path, name: str, user: int) -> None:
    """Run an attack in a process of its own, to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hostile_peer", str(path), name, str(user)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said, _ = await process.communicate()
    assert (said, process.returncode) == (b"done\n", 0)


def under_attack(name: str, user: int) -> None:
    """Let a vehicle talk while a peer attacks; nobody is harmed and nothing is left."""
    errors: list[object] = []

    async def main(path: Path) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: errors.append(told))
        async with serving(path) as world:
            with nothing_left(world):
                async with connect(f"shm://{path}", device="good") as good:
                    attacking = asyncio.create_task(attack(path, name, user))
                    async with good.conversation(max_tokens=8) as talk:
                        while not attacking.done():
                            async with asyncio.timeout(PATIENCE):
                                assert await answer(talk, "Find a charger")
                        await attacking
                        assert await answer(talk, "And then home")
                    assert good.num_reconnects == 0
                async with asyncio.timeout(PATIENCE):
                    while world.decoder._connections:
                        await asyncio.sleep(0.005)
                await world.idle()

    with TemporaryDirectory(prefix="deltarelay-") as folder:
        os.chmod(folder, 0o711)
        asyncio.run(main(Path(folder) / "decoder.sock"))
    assert errors == []


@pytest.mark.parametrize("name", ATTACKS)
def test_a_peer_of_our_own_user_that_attacks_harms_nobody_else(name: str) -> None:
    under_attack(name, 0)


@needs_root
@pytest.mark.parametrize("name", ["seals", "scribble", "cursors", "blocking"])
def test_a_peer_of_another_user_that_attacks_harms_nobody_else(name: str) -> None:
    under_attack(name, NOBODY)
