"""Gets a decoder's tokenizer: from the cache, or piece by piece from the decoder."""

import asyncio
import hashlib
from collections.abc import Callable

from shared.errors import LinkError, RemoteProtocolError
from shared.frames import HelloBody, WelcomeBody
from shared.models import cached_blob, store_blob
from shared.session import BlobArrived, EdgeSession
from shared.session.agreement import mismatch
from shared.tokenizer import MAX_BLOB, Tokenizer, load_tokenizer

FETCH_TIMEOUT = 30.0


class TokenizerFetch:
    """Fetches over one session; `pump` sends what the session owes."""

    def __init__(self, session: EdgeSession, pump: Callable[[], None]) -> None:
        self._session, self._pump = session, pump
        self._wanted = ""
        """Digest of what is being fetched."""
        self._blob = bytearray()
        self._size = -1
        self._changed = asyncio.Event()

    async def tokenizer(self, welcome: WelcomeBody, pinned: bytes | None) -> Tokenizer:
        """Return the tokenizer of the decoder that said `welcome`.

        Args:
            pinned: the blob to insist on.

        Raises:
            TokenizerMismatchError: the decoder has another, or it splits texts otherwise there.
            LinkError: it cannot be fetched.
        """
        digest = welcome.tokenizer
        blob = pinned or cached_blob(digest)
        if blob is None:
            if not self._session.live:
                raise LinkError(
                    f"tokenizer {digest} is not cached here and no decoder can be reached: "
                    "connect once before going offline"
                )
            blob = await self._fetch(digest)
        tokenizer = load_tokenizer(blob)
        mine = HelloBody("", "", tokenizer=tokenizer.digest, golden=tokenizer.golden)
        error = mismatch(mine, welcome)
        if error is not None:
            raise error
        return tokenizer

    def take(self, event: BlobArrived) -> None:
        """A piece has arrived; one that was not asked for, or a second copy, is ignored.

        Raises:
            RemoteProtocolError: the whole is larger than a tokenizer may be, or than was said.
        """
        if event.digest != self._wanted or event.offset != len(self._blob) or not event.data:
            return
        end = event.offset + len(event.data)
        if not end <= event.size <= MAX_BLOB or self._size not in (-1, event.size):
            raise RemoteProtocolError(
                f"bytes {event.offset} to {end} of a blob of {event.size} bytes "
                f"(it had {self._size} before): at most {MAX_BLOB} are taken"
            )
        self._blob += event.data
        self._size = event.size
        self._changed.set()

    async def _fetch(self, digest: str) -> bytes:
        """Fetch a blob from the decoder, verify and cache it."""
        self._blob.clear()
        self._size, self._wanted = -1, digest
        try:
            async with asyncio.timeout(FETCH_TIMEOUT):
                while len(self._blob) != self._size:
                    self._changed.clear()
                    self._session.fetch(digest, len(self._blob))
                    self._pump()
                    await self._changed.wait()
        except TimeoutError:
            raise LinkError(f"tokenizer {digest} did not arrive in {FETCH_TIMEOUT:g} s") from None
        finally:
            self._wanted = ""
        blob = bytes(self._blob)
        self._blob.clear()
        found = hashlib.sha256(blob).hexdigest()
        if found != digest:
            raise RemoteProtocolError(
                f"the decoder sent a tokenizer of digest {found}, not {digest}"
            )
        store_blob(digest, blob)
        return blob
