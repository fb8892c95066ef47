"""What the two ends compare before they talk: content digests, golden vectors of a tokenizer."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

GOLDEN_TEXTS = (
    "",
    " ",
    "\n",
    "Hello world",
    " Hello",
    "hello  world",
    "a   b",
    "tab\there",
    "line\nbreak\n\n  indented",
    "they're we'll I'd don't it's",
    "THEY'RE",
    "'s 't 'll",
    "3.14159 and 42",
    "2026-11-30 07:45",
    "12345678901234567890",
    "!?.,;:--...(){}[]",
    "e-mail: a.b+c@example.org",
    "Straße, Größe, Übung",
    "naïve café",
    "cafe\u0301",
    "最寄りの充電所を探して",
    "東京駅まで、お願いします。",
    "한국어 문장",
    "Привет, мир",
    "مرحبا",
    "🙂",
    "👩‍👩‍👧‍👦 family",
    "🇩🇪🇯🇵",
    "<|im_start|>user",
    "<s></s>[INST]",
    "x" * 40,
    "trailing space ",
)
"""Texts both ends encode; equal vectors mean that two library versions split alike."""


def sha256(data: bytes) -> str:
    """Return the hexadecimal SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def golden_digest(encode: Callable[[str], Sequence[int]]) -> str:
    """Return the SHA-256 over the ids that `encode` gives for every golden text."""
    total = hashlib.sha256()
    for text in GOLDEN_TEXTS:
        ids = encode(text)
        total.update(struct.pack(f"<I{len(ids)}I", len(ids), *ids))
    return total.hexdigest()
