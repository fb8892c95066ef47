"""What snapshots did, for metrics. No torch, no I/O."""

from dataclasses import dataclass


@dataclass(slots=True)
class SnapshotCounts:
    """What snapshots did so far."""

    bytes_written: int = 0
    bytes_restored: int = 0
    tokens_restored: int = 0
    """Whose keys and values were put back into the pool."""
    restore_seconds: float = 0.0
    """From the first file read to the last block in the pool."""
    files_rejected: int = 0
    """Damaged, or of another model or version; deleted."""
    evicted: int = 0
    """Conversations whose files went for their age or for want of room."""
    failures: int = 0
    """Writes that failed."""
