"""Fetching a tokenizer from a decoder that may send anything: what is kept of it has a bound."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import pytest

from edge.fetch import TokenizerFetch
from shared.errors import RemoteProtocolError
from shared.frames import HelloBody
from shared.session import BlobArrived, EdgeSession
from shared.tokenizer import MAX_BLOB
from tests.relay_world import SHA

BLOB = bytes(range(250))
DIGEST = hashlib.sha256(BLOB).hexdigest()


class Asked(EdgeSession):
    """A session that notes what it is asked to fetch."""

    def __init__(self) -> None:
        super().__init__(HelloBody("car", "b"))
        self.offsets: list[int] = []

    def fetch(self, digest: str, offset: int = 0) -> None:
        self.offsets.append(offset)


def piece(start: int, end: int, *, size: int = len(BLOB), digest: str = DIGEST) -> BlobArrived:
    return BlobArrived(digest, start, size, BLOB[start:end])


def fetching(
    test: Callable[[TokenizerFetch, Asked, "asyncio.Task[bytes]"], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run `test` while `BLOB` is fetched."""
    monkeypatch.setattr("edge.fetch.store_blob", lambda *_: True)

    async def main() -> None:
        session = Asked()
        fetch = TokenizerFetch(session, lambda: None)
        task = asyncio.create_task(fetch._fetch(DIGEST))
        await asyncio.sleep(0)
        try:
            await test(fetch, session, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_pieces_in_order_make_the_blob_and_copies_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(fetch: TokenizerFetch, session: Asked, task: "asyncio.Task[bytes]") -> None:
        for start, end in ((0, 100), (0, 100), (200, 250), (100, 200), (200, 250)):
            fetch.take(piece(start, end))
            await asyncio.sleep(0)
        assert await task == BLOB
        assert session.offsets == [0, 100, 200]

    fetching(test, monkeypatch)


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, 100, size=MAX_BLOB + 1)],
        [piece(0, 100, size=99)],
        [piece(0, 100), piece(100, 200, size=100)],
        [piece(0, 100), piece(100, 200, size=300)],
    ],
)
def test_a_blob_that_grows_beyond_its_size_or_the_bound_ends_the_connection(
    pieces: list[BlobArrived], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(fetch: TokenizerFetch, session: Asked, task: "asyncio.Task[bytes]") -> None:
        for early in pieces[:-1]:
            fetch.take(early)
        with pytest.raises(RemoteProtocolError, match="of a blob of"):
            fetch.take(pieces[-1])
        assert len(fetch._blob) <= 100

    fetching(test, monkeypatch)


def test_what_was_not_asked_for_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(fetch: TokenizerFetch, session: Asked, task: "asyncio.Task[bytes]") -> None:
        fetch.take(piece(0, 250, digest=SHA))
        assert not fetch._blob
        fetch.take(piece(0, 250))
        await task
        for late in (piece(0, 250), piece(250, 250), piece(0, 250)):
            fetch.take(late)
        assert not fetch._blob

    fetching(test, monkeypatch)
