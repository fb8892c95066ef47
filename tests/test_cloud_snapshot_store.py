"""The files of snapshots: whole or not there, bounded in bytes and age, nobody else's."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from cloud.snapshot.format import SavedConversation
from cloud.snapshot.reader import folder_of_conversation, forget_device, read_conversations
from cloud.snapshot.store import Kept, Layout, SnapshotStore
from shared.errors import CapacityError, ConfigError, InputError
from tests.test_cloud_snapshot_format import FINGERPRINT, conversation

TOKENIZER = "ab" * 32
BLOCK_BYTES = 1024


class Clock:
    """Seconds since 1970, as files have them, moved by hand."""

    def __init__(self) -> None:
        import time

        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def open_store(
    root: Path,
    clock: Clock | None = None,
    *,
    quota: int = 1 << 20,
    seconds: float = 3600,
    fingerprint: bytes = FINGERPRINT,
) -> SnapshotStore:
    layout = Layout(fingerprint, BLOCK_BYTES)
    return SnapshotStore(
        root, layout, most_bytes=quota, most_seconds=seconds, clock=clock or Clock()
    )


def of(device: str, name: str = "c1") -> SavedConversation:
    saved = conversation(device=device)
    body = msgspec.structs.replace(saved.stream.body, conversation=name)
    stream = msgspec.structs.replace(saved.stream, body=body)
    return msgspec.structs.replace(saved, stream=stream)


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def blocks(count: int, seed: int = 0) -> Iterator[memoryview]:
    rng = Random(seed)
    for _ in range(count):
        yield memoryview(rng.randbytes(BLOCK_BYTES))


def put(store: SnapshotStore, device: str, *numbers: int) -> Kept:
    kept = store.put_log(of(device))
    if numbers:
        store.put_blocks(kept, keys(*numbers), blocks(len(numbers)))
    return kept


def bytes_below(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "car", 1, 2)
    put(store, "car", 3)
    store.close()
    again = open_store(tmp_path)
    [(kept, saved)] = again.load(TOKENIZER)
    assert saved == of("car")
    assert [head.keys for head in kept.segments.values()] == [tuple(keys(1, 2)), tuple(keys(3))]
    path, head = next(iter(kept.segments.items()))
    assert bytes(again.read_segment(path, head)) == b"".join(blocks(2))
    assert again.counts.files_rejected == 0


def test_an_unchanged_log_is_not_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "car")
    written = store.counts.bytes_written
    put(store, "car")
    assert store.counts.bytes_written == written > 0


def test_only_we_may_read_what_drivers_said(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir(mode=0o755)
    store = open_store(tmp_path / "snapshots")
    put(store, "car", 1)
    for path in (tmp_path / "snapshots", *(tmp_path / "snapshots").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", ".", "\0", "x" * 5000, "\ud800"])
def test_no_id_that_a_peer_chose_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = folder_of_conversation(tmp_path, name, name)
    assert folder.parent.parent == tmp_path
    assert folder.name.isalnum()


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = put(store, "car", 1)
    before = bytes_below(tmp_path)

    def failing() -> Iterator[memoryview]:
        yield memoryview(bytes(BLOCK_BYTES))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.put_blocks(kept, keys(2, 3), failing())
    assert bytes_below(tmp_path) == before
    assert kept.keys == set(keys(1))


def test_the_rest_of_a_write_that_a_kill_interrupted_is_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = put(store, "car", 1)
    store.close()
    (kept.folder / "kv-00000002.new").write_bytes(b"half")
    again = open_store(tmp_path)
    [(found, _)] = again.load(TOKENIZER)
    assert sorted(path.name for path in found.folder.iterdir()) == ["kv-00000001", "log"]


def test_the_quota_is_kept_by_deleting_what_was_written_longest_ago(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, clock, quota=10 * BLOCK_BYTES)
    for number in range(8):
        clock.now += 1
        put(store, f"car-{number}", *range(3))
        assert bytes_below(tmp_path) <= 10 * BLOCK_BYTES
    left = {saved.device for saved in read_conversations(tmp_path)}
    assert left == {"car-6", "car-7"}
    assert store.counts.evicted == 6


def test_a_smaller_quota_holds_from_the_start(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, clock)
    for number in range(8):
        put(store, f"car-{number}", *range(3))
    store.close()
    again = open_store(tmp_path, clock, quota=10 * BLOCK_BYTES)
    assert len(again.load(TOKENIZER)) == 2
    assert bytes_below(tmp_path) <= 10 * BLOCK_BYTES


def test_a_conversation_beyond_the_quota_is_refused_and_costs_nobody_else(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota=10 * BLOCK_BYTES)
    put(store, "small", 1)
    with pytest.raises(CapacityError, match="snapshot_mb"):
        put(store, "large", *range(12))
    assert {saved.device for saved in read_conversations(tmp_path)} == {"small", "large"}


def test_what_is_older_than_its_age_allows_is_deleted(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, clock, seconds=100)
    put(store, "old", 1)
    clock.now += 60
    put(store, "new", 1)
    clock.now += 60
    store.sweep()
    assert [saved.device for saved in read_conversations(tmp_path)] == ["new"]
    store.close()
    clock.now += 60
    again = open_store(tmp_path, clock, seconds=100)
    again.load(TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_keys_and_values_of_another_model_are_deleted_and_the_log_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "car", 1)
    store.close()
    again = open_store(tmp_path, fingerprint=bytes(32))
    [(kept, saved)] = again.load(TOKENIZER)
    assert (kept.segments, saved) == ({}, of("car"))
    assert again.counts.files_rejected == 1
    assert [path.name for path in kept.folder.iterdir()] == ["log"]


def test_a_conversation_of_another_tokenizer_is_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "car", 1)
    store.close()
    again = open_store(tmp_path)
    assert again.load("cd" * 32) == []
    assert again.counts.files_rejected == 1
    assert bytes_below(tmp_path) == 0


def test_damage_to_a_log_costs_that_conversation_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, _ = put(store, "first", 1), put(store, "second", 1)
    store.close()
    (first.folder / "log").write_bytes(b"")
    again = open_store(tmp_path)
    assert [saved.device for _, saved in again.load(TOKENIZER)] == ["second"]
    assert not first.folder.exists()


def test_a_log_under_another_devices_name_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = put(store, "car")
    store.close()
    moved = folder_of_conversation(tmp_path, "truck", "c1")
    moved.parent.mkdir()
    kept.folder.rename(moved)
    again = open_store(tmp_path)
    assert again.load(TOKENIZER) == []


def test_a_folder_serves_one_decoder_at_a_time(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ConfigError, match="another decoder"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"snapshots = .*file/there"):
        open_store(tmp_path / "file" / "there")


def test_segments_nobody_needs_go_and_others_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "car", 1, 2)
    put(store, "car", 3)
    kept = put(store, "car", 2, 4)
    store.drop_spare(kept, keys(2, 3))
    assert [head.keys for head in kept.segments.values()] == [tuple(keys(3)), tuple(keys(2, 4))]
    assert len(list(kept.folder.glob("kv-*"))) == 2


def test_forgetting_a_device_leaves_nothing_of_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "car", 1)
    store.put_log(of("car", "c2"))
    put(store, "truck", 1)
    store.forget_device("car")
    assert [saved.device for saved in read_conversations(tmp_path)] == ["truck"]
    assert forget_device(tmp_path, "truck")
    assert not forget_device(tmp_path, "truck")
    assert bytes_below(tmp_path) == 0
    assert put(store, "truck", 1).keys == set(keys(1))
    assert [saved.device for saved in read_conversations(tmp_path)] == ["truck"]


def test_forgetting_the_last_conversation_of_a_device_leaves_no_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "car", 1)
    store.forget("car", "c1")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_reader_says_which_folder_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        list(read_conversations(tmp_path / "nowhere"))


def test_reading_conversations_takes_no_torch() -> None:
    program = "import sys, cloud.snapshot.reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
