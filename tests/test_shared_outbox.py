"""The outbox: what is in it outlives the process, stays in bounds, and nothing goes silently."""

import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from shared.errors import ConfigError, LinkError
from shared.outbox import Bounds, Change, Cut, Item, Kind, Outbox, Put, Remember
from shared.outbox.changes import Counts
from shared.outbox.file import OutboxFile


def put(stream: str, seq: int, payload: bytes = b"x", kind: Kind = Kind.WORDS) -> Put:
    return Put(Item(kind, stream, seq, payload))


@contextmanager
def opened(folder: Path, bounds: Bounds | None = None, **more: object) -> Iterator[Outbox]:
    outbox = Outbox(folder / "outbox.sqlite", bounds, **more)  # type: ignore[arg-type]
    try:
        yield outbox
    finally:
        outbox.close()


def written(outbox: Outbox, *changes: Change, urgent: bool = False) -> None:
    """Write and wait until it is done."""
    done = threading.Event()
    outbox.write(*changes, urgent=urgent, then=done.set)
    assert done.wait(10)


def places(outbox: Outbox) -> list[tuple[str, int]]:
    return [(item.stream, item.seq) for item in outbox.items()]


@contextmanager
def bare(
    folder: Path, bounds: Bounds | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Iterator[OutboxFile]:
    file = OutboxFile(folder / "outbox.sqlite", bounds or Bounds(), Counts(), clock)
    try:
        yield file
    finally:
        file.close()


def test_what_was_written_is_there_after_a_restart_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        for seq in (2, 0, 1):
            outbox.write(put("b", seq, bytes([seq])), put("a", seq))
        outbox.write(Remember("epoch", b"7"))
    with opened(tmp_path) as outbox:
        assert places(outbox) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
        assert outbox.items()[3].payload == b"\0"
        assert outbox.recall("epoch") == b"7"
        assert outbox.recall("nothing") is None


def test_a_cut_and_what_follows_it_are_one_change(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        written(outbox, *(put("a", seq) for seq in range(5)), put("b", 9))
        written(outbox, Cut("a", 2), put("a", 2, b"new"))
        assert places(outbox) == [("a", 0), ("a", 1), ("a", 2), ("b", 9)]
        assert outbox.items()[2].payload == b"new"


_WRITER = """
import os, signal, sys, threading
from pathlib import Path
from shared.outbox import Item, Kind, Outbox, Put
outbox = Outbox(Path(sys.argv[1]))
for seq in range(50):
    done = threading.Event()
    outbox.write(Put(Item(Kind.WORDS, "a", seq, bytes(100))), urgent=seq % 7 == 0, then=done.set)
    done.wait()
    print(seq, flush=True)
    if seq == 30:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_reported_written_outlives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"
    root = str(Path(__file__).parents[1])
    child = subprocess.run(
        [sys.executable, "-c", _WRITER, str(path)], cwd=root, capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    reported = [int(line) for line in child.stdout.split()]
    assert reported[-1] == 30
    with opened(tmp_path) as outbox:
        assert [seq for _, seq in places(outbox)] == reported
        assert outbox.counts.bad_files == 0


def test_words_are_synced_to_the_disk_and_telemetry_is_not(tmp_path: Path) -> None:
    with bare(tmp_path) as file:
        said: list[str] = []
        file._db.set_trace_callback(said.append)
        file.commit([put("t", 0, kind=Kind.TELEMETRY)], sync=False)
        assert "PRAGMA synchronous = NORMAL" in said
        file.commit([], sync=True)
        assert said.index("PRAGMA synchronous = FULL") < len(said) - 2
        assert any("INSERT OR REPLACE INTO facts" in line for line in said), "an empty commit"


def test_words_reach_the_disk_by_themselves_soon_after_the_last(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        synced = threading.Event()
        commit = outbox._file.commit

        def watch(changes: object, *, sync: bool) -> None:
            commit(changes, sync=sync)  # type: ignore[arg-type]
            if sync:
                synced.set()

        outbox._file.commit = watch  # type: ignore[method-assign]
        written(outbox, put("t", 0, kind=Kind.TELEMETRY))
        assert not synced.wait(0.3)
        written(outbox, put("a", 0))
        assert synced.wait(10)


def test_under_pressure_the_least_valuable_goes_first_and_is_counted(tmp_path: Path) -> None:
    now = [0.0]
    with bare(tmp_path, Bounds(num_bytes=1000), lambda: now[0]) as file:
        for seq, kind in enumerate([Kind.WORDS, Kind.SUMMARY, Kind.FEATURES, Kind.TELEMETRY] * 2):
            now[0] += 1
            file.commit([put(kind.name, seq, bytes(200), kind)], sync=False)
        file.trim(set())
        kinds = [item.kind for item in file.items()]
        assert kinds == [Kind.FEATURES, Kind.SUMMARY, Kind.SUMMARY, Kind.WORDS, Kind.WORDS]
        assert file._counts.dropped == {Kind.TELEMETRY: 2, Kind.FEATURES: 1}
        assert file.items()[0].seq == 6, "the older one goes first"


def test_a_stream_of_words_goes_as_a_whole_and_never_one_that_is_in_use(tmp_path: Path) -> None:
    now = [0.0]
    with bare(tmp_path, Bounds(num_bytes=1000), lambda: now[0]) as file:
        for stream in ("open", "old", "new"):
            for seq in range(4):
                now[0] += 1
                file.commit([put(stream, seq, bytes(100))], sync=False)
        file.trim({"open"})
        assert {item.stream for item in file.items()} == {"open", "new"}
        file.commit([put("open", seq, bytes(500)) for seq in range(4, 8)], sync=False)
        file.trim({"open"})
        assert {item.stream for item in file.items()} == {"open"}
        assert len(file.items()) == 8


def test_an_open_conversation_beyond_the_bound_is_kept_and_said(tmp_path: Path) -> None:
    with opened(tmp_path, Bounds(num_bytes=1000)) as outbox:
        outbox.pin("open")
        written(outbox, put("open", 0, bytes(2000)))
        written(outbox)
        assert places(outbox) == [("open", 0)]
        assert "2000 bytes of 1000" in outbox.trouble
        written(outbox, Cut("open"))
        written(outbox)
        assert outbox.trouble == ""


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    now = [0.0]
    with bare(tmp_path, Bounds(age=100), lambda: now[0]) as file:
        file.commit([put("a", 0), put("b", 0), put("t", 0, kind=Kind.TELEMETRY)], sync=False)
        now[0] = 90
        file.commit([put("b", 1)], sync=False)
        now[0] = 110
        file.trim(set())
        assert [(i.stream, i.seq) for i in file.items()] == [("b", 0), ("b", 1)]


def test_a_damaged_file_is_set_aside_and_the_outbox_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        outbox.write(*(put("a", seq, bytes(500)) for seq in range(40)))
    path = tmp_path / "outbox.sqlite"
    whole = path.read_bytes()
    rng = Random(5)
    kept = aside = 0
    for cut in range(60):
        damaged = bytearray(whole)
        if cut % 3 == 0:
            damaged = damaged[: rng.randrange(1, len(whole))]
        else:
            for _ in range(rng.choice([1, 50, 500])):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with opened(tmp_path) as outbox:
            items = outbox.items()
            if outbox.counts.bad_files:
                aside += 1
                assert items == []
                assert Path(f"{path}.bad").read_bytes() == damaged
            else:
                kept += 1
                assert all(item.payload == bytes(500) for item in items)
            written(outbox, put("b", 0))
            assert ("b", 0) in places(outbox)
    assert aside > 10
    assert kept > 0


def test_damage_while_running_is_told_so_that_what_is_known_is_written_anew(tmp_path: Path) -> None:
    lost = threading.Event()
    with opened(tmp_path, on_lost=lost.set) as outbox:
        written(outbox, *(put("a", seq, bytes(3000)) for seq in range(50)))
        broken = iter([sqlite3.DatabaseError("database disk image is malformed")])
        commit = outbox._file.commit

        def once(changes: object, *, sync: bool) -> None:
            for error in broken:
                raise error
            commit(changes, sync=sync)  # type: ignore[arg-type]

        outbox._file.commit = once  # type: ignore[method-assign]
        written(outbox, put("b", 0))
        assert lost.wait(10)
        assert outbox.counts.bad_files == 1
        written(outbox, put("b", 1))
        assert places(outbox) == [("b", 0), ("b", 1)]


def fill_up(outbox: Outbox) -> None:
    """Let the file take no more pages, as a full disk does."""
    db = outbox._file._db
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")


def make_room(outbox: Outbox) -> None:
    outbox._file._db.execute("PRAGMA max_page_count = 1000000")


def test_a_full_disk_turns_the_outbox_red_and_what_waits_is_written_when_there_is_room(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as outbox:
        written(outbox, put("a", 0))
        fill_up(outbox)
        written(outbox, put("a", 1, bytes(100_000)))
        assert "full" in outbox.trouble
        written(outbox, put("a", 2))
        assert places(outbox) == [("a", 0)]
        make_room(outbox)
        written(outbox, put("a", 3))
        assert outbox.trouble == ""
        assert places(outbox) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]
        assert outbox.counts.failures >= 2


def test_memory_is_bounded_while_the_disk_is_full_and_telemetry_goes_first(tmp_path: Path) -> None:
    lost = threading.Event()
    with opened(tmp_path, Bounds(memory=300_000), on_lost=lost.set) as outbox:
        fill_up(outbox)
        written(outbox, put("t", 0, bytes(200_000), Kind.TELEMETRY))
        written(outbox, put("a", 0, bytes(200_000)))
        assert outbox.counts.dropped == {Kind.TELEMETRY: 1}
        assert not lost.is_set()
        written(outbox, put("a", 1, bytes(200_000)))
        assert lost.is_set(), "words had to go: whoever has them writes them anew"
        make_room(outbox)
        written(outbox, put("a", 2))
        assert places(outbox) == [("a", 2)]


def test_another_process_reads_while_this_one_writes(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        written(outbox, put("a", 0))
        reader = sqlite3.connect(tmp_path / "outbox.sqlite")
        assert reader.execute("SELECT count(*) FROM items").fetchone() == (1,)
        written(outbox, put("a", 1))
        assert reader.execute("SELECT count(*) FROM items").fetchone() == (2,)
        reader.close()


def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {99 | (99 ^ 0xFFFF) << 16 & 0x7FFFFFFF}")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        Outbox(path)
    assert path.exists()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"nowhere/outbox\.sqlite"):
        Outbox(tmp_path / "nowhere" / "outbox.sqlite")


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        written(outbox, put("a", 0))
        assert (tmp_path / "outbox.sqlite").stat().st_mode & 0o777 == 0o600
