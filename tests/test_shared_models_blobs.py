"""The edge's cache of tokenizer blobs: verified on every read, small, and never in the way."""

import hashlib
import os
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models import MAX_BLOBS, cached_blob, store_blob


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deltarelay"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_stored_blob_comes_back_and_an_unknown_one_is_absent(cache: Path) -> None:
    assert cached_blob(digest(b"a")) is None
    assert store_blob(digest(b"a"), b"a")
    assert store_blob(digest(b"a"), b"a")
    assert cached_blob(digest(b"a")) == b"a"
    assert [path.name for path in (cache / "blobs").iterdir()] == [digest(b"a")]


@pytest.mark.parametrize("damage", [b"", b"b", b"aa"])
def test_a_damaged_blob_is_removed_and_counts_as_absent(damage: bytes, cache: Path) -> None:
    store_blob(digest(b"a"), b"a")
    path = cache / "blobs" / digest(b"a")
    path.write_bytes(damage)
    assert cached_blob(digest(b"a")) is None
    assert not path.exists()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "", "A" * 64, digest(b"b"), digest(b"a")[:63]]
)
def test_a_blob_that_is_not_what_its_digest_says_is_refused(name: str, cache: Path) -> None:
    with pytest.raises(ModelError, match="1 bytes has SHA-256"):
        store_blob(name, b"a")
    assert cached_blob(name) is None
    assert not cache.exists()


def test_only_the_blobs_used_last_are_kept(cache: Path) -> None:
    contents = [bytes([i]) for i in range(MAX_BLOBS + 3)]
    for age, content in enumerate(contents):
        store_blob(digest(content), content)
        path = cache / "blobs" / digest(content)
        os.utime(path, (age, age))
        if age == 5:
            assert cached_blob(digest(contents[0])) == contents[0]  # used: now the youngest
    kept = {content for content in contents if cached_blob(digest(content)) is not None}
    assert len(kept) == MAX_BLOBS
    assert contents[0] in kept
    assert contents[1] not in kept


def test_a_cache_that_refuses_a_blob_stops_nobody(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert store_blob(digest(b"a"), b"a") is False
    assert cached_blob(digest(b"a")) is None
