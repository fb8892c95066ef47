"""A durable queue in one SQLite file: what must outlive its process until it was delivered.

`changes` says what can be written, `file` keeps it within bounds, `writer` has the thread.
"""

from shared.outbox.changes import Bounds, Change, Counts, Cut, Item, Kind, Put, Remember
from shared.outbox.writer import Outbox

__all__ = ["Bounds", "Change", "Counts", "Cut", "Item", "Kind", "Outbox", "Put", "Remember"]
