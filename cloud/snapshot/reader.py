"""Reads a snapshot folder, also while a decoder writes to it. No torch.

A folder has one of each device, which has one of each of its conversations; names are hashes,
because ids are what a peer chose.
"""

from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from shutil import rmtree

from cloud.snapshot.format import MAX_LOG, SavedConversation, decode_log
from shared.errors import InputError

LOG = "log"
SEGMENTS = "kv-*"


def folder_of(root: Path, device: str) -> Path:
    """Return where everything of a device is."""
    return root / _hashed(device)


def folder_of_conversation(root: Path, device: str, name: str) -> Path:
    """Return where everything of a conversation is."""
    return folder_of(root, device) / _hashed(name)


def read_log(folder: Path) -> SavedConversation:
    """Read the log of the conversation in `folder`.

    Raises:
        InputError: it is missing or damaged, or of another conversation.
    """
    path = folder / LOG
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LOG + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    saved = decode_log(data, str(path))
    if folder_of_conversation(folder.parent.parent, saved.device, saved.name) != folder:
        raise InputError(f"{path}: the log is of device {saved.device}, which has another folder")
    return saved


def conversation_folders(root: Path) -> Iterator[Path]:
    """Yield the folder of every conversation in a snapshot folder."""
    for device in sorted(root.iterdir()):
        if device.is_dir():
            with suppress(FileNotFoundError):  # forgotten just now
                yield from sorted(path for path in device.iterdir() if path.is_dir())


def read_conversations(root: Path) -> Iterator[SavedConversation]:
    """Yield what the snapshot folder `root` says of every conversation, device by device.

    What went away meanwhile is left out.

    Raises:
        InputError: there is no such folder, or a log in it is damaged.
    """
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; settings name it as `snapshots`")
    for folder in conversation_folders(root):
        if (folder / LOG).exists():
            yield read_log(folder)


def forget_device(root: Path, device: str) -> bool:
    """Delete everything of a device; return whether there was something.

    A decoder that serves the device writes it again: have it forget the device first.

    Raises:
        OSError: something could not be deleted.
    """
    folder = folder_of(root, device)
    if not folder.exists():
        return False
    rmtree(folder)
    return True


def _hashed(name: str) -> str:
    return sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]
