"""What a simulation leaves behind in the operating system: nothing, if all is well."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.errors import LinkError

POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads for `asyncio.to_thread`, at most (concurrent.futures, ThreadPoolExecutor)."""
SEGMENT = "deltarelay-"
"""Begins the names of shared memory."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What this process and its children hold."""

    segments: frozenset[str]
    """Names in /dev/shm."""
    children: frozenset[str]
    """Commands of the child processes, with their ids."""
    descriptors: frozenset[str]
    """This process's open files, as what they point at."""

    @classmethod
    def now(cls) -> "Resources":
        """Look at what there is (Linux)."""
        shared = (name for name in os.listdir("/dev/shm") if name.startswith(SEGMENT))
        return cls(frozenset(shared), _children(), _descriptors())

    def left_behind(self, before: "Resources") -> list[str]:
        """Return what is there and was not before, in words."""
        return [
            *(f"segment {name}" for name in sorted(self.segments - before.segments)),
            *(f"process {child}" for child in sorted(self.children - before.children)),
            *(f"descriptor {name}" for name in sorted(self.descriptors - before.descriptors)),
        ]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one process holds, by kind: descriptors, threads, memory shared with others."""

    counts: Counter[str]

    @classmethod
    def of(cls, pid: int) -> "Holdings":
        """Look at a process (Linux).

        Raises:
            LinkError: there is none.
        """
        place = Path(f"/proc/{pid}")
        try:
            counts = Counter(map(_kind, _links(place / "fd")))
            counts["thread"] = len(os.listdir(place / "task"))
            maps = (place / "maps").read_text().splitlines()
        except OSError as error:
            raise LinkError(f"process {pid}: {error.strerror}: it has ended") from None
        counts["mapped segment"] = sum(map(_is_segment, maps))
        return cls(counts)

    def beyond(self, before: "Holdings") -> list[str]:
        """Return what there is more of than there was before, in words.

        Threads count from the size of asyncio's pool on, which begins them as it wants them.
        """
        more = self.counts - before.counts - Counter(thread=POOL)
        return [f"{count} more of {kind}" for kind, count in more.items()]


def _links(folder: Path) -> Iterator[str]:
    """Yield what descriptors point at; those that were closed just now are left out."""
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            yield os.readlink(folder / name)


def _kind(target: str) -> str:
    """Return what a descriptor is: a kind of its own for each file."""
    return "segment" if _is_segment(target) else target.partition(":")[0]


def _is_segment(path: str) -> bool:
    """Tell whether a path that may have another root than ours is of shared memory."""
    return path.rpartition("/")[2].startswith(SEGMENT)


def _children() -> frozenset[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:  # it has just ended
                continue
            found.add(f"{pid} {command.replace(bytes(1), b' ').decode(errors='replace').strip()}")
    return frozenset(found)


def _descriptors() -> frozenset[str]:
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # that of the listing
            continue
    return frozenset(found)
