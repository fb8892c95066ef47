"""The files of a decoder's snapshots: written as a whole or not at all, bounded in bytes and age.

Used by one thread at a time. Nothing is synced to the disk: after a power cut a file may be damaged
or missing, which its CRC tells, and the vehicles have it all.
"""

import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree

from cloud.snapshot.counts import SnapshotCounts
from cloud.snapshot.files import NEW, own_folder, remove_conversation, whole_file
from cloud.snapshot.format import (
    KEY_BYTES,
    SavedConversation,
    SegmentHead,
    check_blocks,
    decode_head,
    encode_head,
    encode_log,
)
from cloud.snapshot.reader import (
    LOG,
    SEGMENTS,
    conversation_folders,
    folder_of,
    folder_of_conversation,
    read_log,
)
from shared.errors import CapacityError, InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """What keys and values of a decoder are."""

    fingerprint: bytes
    """Of all that decides their bits, but for namespace and ids."""
    block_bytes: int


@dataclass(eq=False)
class Kept:
    """A conversation's files."""

    folder: Path
    written: float
    """When its log was last written, in seconds since 1970."""
    log_bytes: int = 0
    log_crc: int = 0
    segments: dict[Path, SegmentHead] = field(default_factory=dict[Path, SegmentHead])
    """In the order they were written."""

    @property
    def keys(self) -> set[bytes]:
        """Of all blocks it has."""
        return {key for head in self.segments.values() for key in head.keys}

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return self.log_bytes + sum(head.size for head in self.segments.values())


class SnapshotStore:
    """The snapshot folder of a running decoder.

    Args:
        most_bytes: of all files together; the conversation that was written longest ago goes first.
        most_seconds: after which a conversation that nothing was written of goes.
        clock: seconds since 1970, as file times are.

    Raises:
        ConfigError: the folder cannot be used, or another decoder uses it.
    """

    def __init__(
        self,
        root: Path,
        layout: Layout,
        *,
        most_bytes: int,
        most_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.layout, self.counts = layout, SnapshotCounts()
        self._root, self._clock = root, clock
        self._most_bytes, self._most_seconds = most_bytes, most_seconds
        self._kept: dict[Path, Kept] = {}
        self._at_most = 0
        """Bytes of all files, or more: what is deleted is not taken off at once."""
        self._lock = own_folder(root)

    def close(self) -> None:
        """Let another decoder use the folder."""
        os.close(self._lock)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(kept.num_bytes for kept in self._kept.values())

    # --- what was written before

    def load(self, tokenizer: str) -> list[tuple[Kept, SavedConversation]]:
        """Look at what there is; what cannot be used is deleted.

        Args:
            tokenizer: digest; ids of another one mean nothing here.

        Returns:
            Every conversation, the one written last first.
        """
        found: list[tuple[Kept, SavedConversation]] = []
        for folder in list(conversation_folders(self._root)):
            try:
                for path in folder.glob("*" + NEW):
                    path.unlink()
                saved = read_log(folder)
                if saved.tokenizer != tokenizer:
                    raise InputError(f"{folder / LOG}: its ids are of tokenizer {saved.tokenizer}")
                found.append((self._look(folder), saved))
            except InputError as error:
                self._reject(folder, error)
            except OSError as error:
                self._reject(folder, InputError(f"{folder}: {error.strerror}"))
        found.sort(key=lambda pair: -pair[0].written)
        self.sweep()
        return [pair for pair in found if pair[0].folder in self._kept]

    def read_segment(self, path: Path, head: SegmentHead) -> memoryview:
        """Return the blocks of a segment. Any thread may do this.

        Raises:
            InputError: they are not what was written.
        """
        data = bytearray(head.size)
        try:
            with path.open("rb") as file:
                count = file.readinto(data)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        whole = memoryview(data)
        if count != len(data) or decode_head(whole[: head.start], count, str(path)) != head:
            raise InputError(f"{path}: changed since its head was read")
        blocks = whole[head.start :]
        check_blocks(head, blocks, str(path))
        return blocks

    def reject(self, kept: Kept, path: Path, error: InputError) -> None:
        """Delete a segment that cannot be used."""
        kept.segments.pop(path, None)
        self._reject(path, error)

    # --- writing

    def put_log(self, saved: SavedConversation) -> Kept:
        """Write a conversation's log, if it is another one than was written.

        Raises:
            OSError: it cannot be written; what was there before still is.
            CapacityError: it alone is beyond the quota.
        """
        folder = folder_of_conversation(self._root, saved.device, saved.name)
        kept = self._kept.get(folder)
        if kept is None or not folder.exists():  # somebody may have deleted a device's folder
            kept = self._kept[folder] = Kept(folder, self._clock())
            for one in (folder.parent, folder):
                one.mkdir(mode=0o700, exist_ok=True)
        data = encode_log(saved)
        crc = zlib.crc32(data)
        if crc != kept.log_crc or len(data) != kept.log_bytes:
            self._make_room(len(data) - kept.log_bytes, kept)
            with whole_file(folder / LOG) as file:
                file.write(data)
            kept.log_bytes, kept.log_crc = len(data), crc
            self.counts.bytes_written += len(data)
        kept.written = self._clock()
        return kept

    def put_blocks(self, kept: Kept, keys: Collection[bytes], blocks: Iterable[memoryview]) -> None:
        """Write a segment of the blocks with these keys, whose bytes `blocks` yields in any pieces.

        Raises:
            OSError: they cannot be written; what was there before still is.
            CapacityError: the conversation alone is beyond the quota.
        """
        head = SegmentHead(self.layout.fingerprint, self.layout.block_bytes, tuple(keys), 0)
        self._make_room(head.size, kept)
        last = max((_number(path) for path in kept.segments), default=0)
        path = kept.folder / f"kv-{last + 1:08d}"
        with whole_file(path) as file:
            file.write(encode_head(head))
            crc = 0
            for piece in blocks:
                file.write(piece)
                crc = zlib.crc32(piece, crc)
            assert file.tell() == head.size, "blocks and keys differ"
            head = replace(head, crc=crc)
            file.seek(0)
            file.write(encode_head(head))
        kept.segments[path] = head
        self.counts.bytes_written += head.size

    def drop_spare(self, kept: Kept, wanted: Collection[bytes]) -> None:
        """Delete segments of whose blocks none is wanted that no other segment has."""
        copies = Counter(key for head in kept.segments.values() for key in head.keys)
        for path, head in list(kept.segments.items()):
            if all(copies[key] > 1 for key in head.keys if key in wanted):
                copies.subtract(head.keys)
                path.unlink(missing_ok=True)
                del kept.segments[path]

    # --- deleting

    def forget(self, device: str, name: str) -> None:
        """Delete all files of a conversation."""
        folder = folder_of_conversation(self._root, device, name)
        self._kept.pop(folder, None)
        remove_conversation(folder)

    def forget_device(self, device: str) -> None:
        """Delete all files of a device."""
        folder = folder_of(self._root, device)
        for one in [path for path in self._kept if path.parent == folder]:
            del self._kept[one]
        rmtree(folder, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what is too old, and what is beyond the quota."""
        limit = self._clock() - self._most_seconds
        for kept in list(self._kept.values()):
            if kept.written < limit:
                self._evict(kept)
        self._at_most = self.num_bytes
        if self._at_most > self._most_bytes:
            self._evict_coldest(self._most_bytes)

    # --- inside

    def _look(self, folder: Path) -> Kept:
        """Take stock of a conversation whose log is good."""
        data = (folder / LOG).read_bytes()
        written = min((folder / LOG).stat().st_mtime, self._clock())
        kept = Kept(folder, written, len(data), zlib.crc32(data))
        self._kept[folder] = kept
        for path in sorted(folder.glob(SEGMENTS)):
            try:
                kept.segments[path] = self._read_head(path)
            except InputError as error:
                self._reject(path, error)
        return kept

    def _read_head(self, path: Path) -> SegmentHead:
        size = path.stat().st_size
        most = 128 + KEY_BYTES * (size // max(1, self.layout.block_bytes) + 1)
        with path.open("rb") as file:
            head = decode_head(file.read(most), size, str(path))
        if (head.fingerprint, head.block_bytes) != (
            self.layout.fingerprint,
            self.layout.block_bytes,
        ):
            raise InputError(f"{path}: keys and values of another model, precision or version")
        _number(path)
        return head

    def _reject(self, path: Path, error: InputError) -> None:
        log.warning("deleted: %s", error)
        self.counts.files_rejected += 1
        if path.is_dir():
            remove_conversation(path)
        else:
            path.unlink(missing_ok=True)

    def _evict(self, kept: Kept) -> None:
        self.counts.evicted += 1
        del self._kept[kept.folder]
        remove_conversation(kept.folder)

    def _make_room(self, more: int, kept: Kept) -> None:
        """Delete other conversations until `more` bytes of this one are within the quota.

        Raises:
            CapacityError: they never are.
        """
        if kept.num_bytes + more > self._most_bytes:
            raise CapacityError(
                f"{kept.folder}: {kept.num_bytes + more} bytes for one conversation are more than "
                f"snapshot_mb allows ({self._most_bytes} bytes): raise it"
            )
        if self._at_most + more > self._most_bytes:
            self._evict_coldest(self._most_bytes - more, besides=kept)
        self._at_most += more

    def _evict_coldest(self, most: int, besides: Kept | None = None) -> None:
        """Delete conversations until all files have at most so many bytes."""
        total = self.num_bytes
        for kept in sorted(self._kept.values(), key=lambda kept: kept.written):
            if total <= most:
                break
            if kept is not besides:
                total -= kept.num_bytes
                self._evict(kept)
        self._at_most = total


def _number(path: Path) -> int:
    """Return a segment's number."""
    try:
        return int(path.name.removeprefix("kv-"))
    except ValueError:
        raise InputError(f"{path}: segments are named kv-00000001 and so on") from None
