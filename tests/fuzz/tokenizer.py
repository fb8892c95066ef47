"""Tokenizer blobs: an edge fetches them from a decoder that it need not trust."""

from shared.errors import ModelError
from shared.tokenizer import decode, load_tokenizer
from tests.vocabularies import small_blob

TEXT = "Wo ist <s> it's 7:45,\n\n  東京 \u2581x"


def seeds() -> list[bytes]:
    """A blob of every kind."""
    return [small_blob(name) for name in ("small-gpt-2", "small-llama-bpe", "small-spm")]


def target(data: bytes) -> None:
    """What loads can be used: ids are of the vocabulary, and every id has bytes."""
    try:
        tokenizer = load_tokenizer(data)
    except ModelError:
        return
    size = tokenizer.header.vocabulary
    ids = tokenizer.encode(TEXT)
    assert all(0 <= token < size for token in ids)
    assert 0 <= tokenizer.horizon(TEXT) <= len(TEXT)
    segments = tokenizer.split(TEXT, first=True)
    assert [segment.end for segment in segments] == sorted(segment.end for segment in segments)
    decode(tokenizer, ids)
    for token in (-1, 0, size - 1, size, 1 << 40):
        tokenizer.piece(token)
    tokenizer.controls()
    assert tokenizer.golden
