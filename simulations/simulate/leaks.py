"""What a simulation leaves behind in the operating system: nothing, if all is well."""

import os
from dataclasses import dataclass
from pathlib import Path


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
        shared = (name for name in os.listdir("/dev/shm") if "deltarelay" in name)
        return cls(frozenset(shared), _children(), _descriptors())

    def left_behind(self, before: "Resources") -> list[str]:
        """Return what is there and was not before, in words."""
        return [
            *(f"segment {name}" for name in sorted(self.segments - before.segments)),
            *(f"process {child}" for child in sorted(self.children - before.children)),
            *(f"descriptor {name}" for name in sorted(self.descriptors - before.descriptors)),
        ]


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
