"""Tokenizer blobs: an edge fetches them from a decoder that it need not trust."""

from functools import cache

from sentencepiece import SentencePieceProcessor

from shared.bpe_document import bpe_document
from shared.errors import ModelError
from shared.tokenizer import TokenizerHeader, decode, load_tokenizer, pack_tokenizer
from tests.fuzz.choices import Choices
from tests.vocabularies import small_blob, small_bpe

TEXT = "Wo ist <s> it's 7:45,\n\n  東京 \u2581x"
_BLOB, _PIECES, _MERGES = b"b", b"p", b"m"
"""What an input is: a blob; a SentencePiece model; lines of tokens, then of merges."""


@cache
def seeds() -> list[bytes]:
    """A blob of every kind, and what the libraries get of it."""
    blobs = [small_blob(name) for name in ("small-gpt-2", "small-llama-bpe", "small-spm")]
    tokens, merges = small_bpe()
    pieces = blobs[-1].partition(b"\n")[2]
    lines = "\n".join([*tokens[:300], "", *merges[:40]]).encode()
    whole = [_PIECES + pieces, _PIECES + pieces[:600] + pieces[-200:], _MERGES + lines]
    return [*(_BLOB + blob for blob in blobs), *whole]


def target(data: bytes) -> None:
    """What loads can be used: ids are of the vocabulary, and every id has bytes."""
    kind, rest = data[:1], data[1:]
    blob = _of_pieces(rest) if kind == _PIECES else _of_merges(rest) if kind == _MERGES else rest
    try:
        tokenizer = load_tokenizer(blob)
    except ModelError:
        return
    size = tokenizer.header.vocabulary
    ids = tokenizer.encode(TEXT)
    assert all(0 <= token < size for token in ids)
    assert 0 <= tokenizer.horizon(TEXT) <= len(TEXT)
    ends = [segment.end for segment in tokenizer.split(TEXT, first=True)]
    assert ends == sorted(ends)
    decode(tokenizer, ids)
    for token in (-1, 0, size - 1, size, 1 << 40):
        tokenizer.piece(token)
    tokenizer.controls()


def _of_pieces(model: bytes) -> bytes:
    """Give a SentencePiece model a header that fits it, if it loads at all."""
    try:
        size = SentencePieceProcessor(model_proto=model).vocab_size()
    except (RuntimeError, UnicodeDecodeError):  # what it says of damaged bytes may be no text
        size = 0
    return pack_tokenizer(TokenizerHeader("spm", "space", size, [0], add_prefix=True), model)


def _of_merges(lines: bytes) -> bytes:
    """Write a vocabulary and its merges as a decoder does that means no good."""
    tokens, _, merges = lines.decode(errors="replace").partition("\n\n")
    vocabulary = list(dict.fromkeys(tokens.split("\n")))
    rule = Choices(lines).pick(("gpt-2", "llama-bpe"))
    document = bpe_document(vocabulary, merges.split("\n"), rule)
    return pack_tokenizer(TokenizerHeader("bpe", rule, len(vocabulary), [0]), document)
