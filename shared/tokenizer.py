"""Tokenizers as the relay needs them: exact, content-addressed, open about where a text can be cut.

A tokenizer travels as a blob: one line of JSON (`TokenizerHeader`), then the library's own format
(a Hugging Face tokenizer.json without added tokens, or a SentencePiece model). Its digest is the
SHA-256 of the blob: the edge fetches it from the decoder and knows what it got. Control tokens are
not registered with the library, so control strings that a user types are plain text.

`split` cuts a text into segments that are encoded independently of each other, and `horizon` says
up to where these cuts stay whatever follows. Both rules are proven per kind of pre-tokenizer, see
below; a kind without a rule is refused by name.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from shared.bpe_document import check_document
from shared.digest import golden_digest, sha256
from shared.errors import ModelError

MAX_BLOB = 64 * 1024 * 1024
"""Bytes of the longest blob accepted: a vocabulary of 256,000 takes a third of it."""


class TokenizerHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a tokenizer blob."""

    kind: Literal["bpe", "spm"]
    pre: str
    """Pre-tokenizer: `smollm`, `gpt-2`, `llama-bpe`, `qwen2` (BPE), `space` (SentencePiece)."""
    vocabulary: int
    control: list[int]
    """Ids that never come from text: a user stream that carries one is refused."""
    bos: int = -1
    eos: int = -1
    add_bos: bool = False
    """The model was trained with `bos` before every text."""
    add_prefix: bool = False
    """SentencePiece's dummy prefix: a text begins with an implied space."""


class Segment(NamedTuple):
    """A piece of text that is encoded on its own."""

    end: int
    """Characters from the start of the given text to the end of this piece."""
    ids: list[int]


class Tokenizer(Protocol):
    """One loaded tokenizer."""

    header: TokenizerHeader
    digest: str

    def split(self, text: str, *, first: bool) -> list[Segment]:
        """Cut `text` into independent segments. `first`: it is the start of a whole text."""
        ...

    def horizon(self, text: str) -> int:
        """Return h such that every cut of `text` at or before h stays, whatever is appended."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a whole text, without BOS."""
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token; of control tokens and unknown ids, none."""
        ...

    def controls(self) -> dict[str, int]:
        """Return the control tokens by their text, as a template writes them."""
        ...

    @property
    def golden(self) -> str:
        """Digest of the golden vectors."""
        return golden_digest(self.encode)


_HORIZON_SPACES = frozenset({"llama-bpe", "qwen2"})
BPE_RULES = frozenset({"smollm", "gpt-2"}) | _HORIZON_SPACES
"""Pre-tokenizers with a proven horizon.

GPT-2's rule (`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`)
looks at nothing before a match and decides on its end by at most two characters behind it: one that
ends a greedy run; a whitespace run but its last character needs that character and the non-space
after it; a lone `'` stays alone only if the two characters after it are no contraction. So cuts up
to two characters before the end of the text are final. SmolLM2 first isolates digits, which looks
at nothing else. The cl100k family adds `\\s*[\\r\\n]+`, which reaches over any length of
whitespace, so there no cut inside or behind a trailing whitespace run is final either.
"""


class BpeTokenizer(Tokenizer):
    """Byte-level BPE on Hugging Face tokenizers."""

    def __init__(self, header: TokenizerHeader, payload: bytes, digest: str) -> None:
        if header.pre not in BPE_RULES:
            raise ModelError(
                f"pre-tokenizer {header.pre!r}: where its text can be cut is not proven; "
                f"supported are {', '.join(sorted(BPE_RULES))}"
            )
        from tokenizers import Tokenizer as Library

        check_document(payload, header.pre)
        self.header, self.digest = header, digest
        self._library = Library.from_buffer(payload)
        _check_ids(header, self._library.get_vocab_size())
        rule = self._library.pre_tokenizer
        assert rule is not None  # the document has one
        self._rule = rule
        self._spaces = header.pre in _HORIZON_SPACES
        self._control = frozenset(header.control)
        self._bytes = byte_alphabet()

    def split(self, text: str, *, first: bool) -> list[Segment]:
        """One segment per pre-token: byte-level BPE never merges across them.

        The pre-tokenizer says where they end: a byte without a token (SmolLM2 has none for some
        control characters) leaves no trace in the encoding.
        """
        encoding = self._library.encode(text, add_special_tokens=False)
        segments = [Segment(span[1], []) for _, span in self._rule.pre_tokenize_str(text)]
        for token, word in zip(encoding.ids, encoding.word_ids, strict=True):
            assert word is not None  # only added tokens are of no pre-token, and there are none
            segments[word].ids.append(token)
        return segments

    def horizon(self, text: str) -> int:
        """Two characters before the end, and before trailing whitespace where newlines bind it."""
        end = max(0, len(text) - 2)
        return min(end, len(text.rstrip())) if self._spaces else end

    def encode(self, text: str) -> list[int]:
        """Encode a whole text."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; one that is not of the byte alphabet stands for its text."""
        known = 0 <= token < self.header.vocabulary and token not in self._control
        text = self._library.id_to_token(token) if known else None
        if text is None:
            return b""
        try:
            return bytes(map(self._bytes.__getitem__, text))
        except KeyError:
            return text.encode()

    def controls(self) -> dict[str, int]:
        """Return the control tokens by their text."""
        return {self._library.id_to_token(token) or "": token for token in self.header.control}


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for every byte, inverted (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_CUT = re.compile("(?<=[^ \u2581])(?=[ \u2581])")


class SpmTokenizer(Tokenizer):
    """SentencePiece BPE with the identity normalizer.

    No piece has a space (▁) behind another character (checked when the blob is made), so no merge
    crosses a cut between a character and a space: the two sides are encoded independently, and the
    cut is final at once. The dummy prefix is ours to add: inside the blob it is switched off.
    """

    def __init__(self, header: TokenizerHeader, payload: bytes, digest: str) -> None:
        if header.pre != "space":
            raise ModelError(f"SentencePiece rule {header.pre!r} is unknown; supported is 'space'")
        from sentencepiece import SentencePieceProcessor

        self.header, self.digest = header, digest
        self._library = SentencePieceProcessor(model_proto=payload)
        _check_ids(header, self._library.vocab_size())
        self._pieces = [self._read_piece(token) for token in range(header.vocabulary)]
        self._controls = {self._library.id_to_piece(token): token for token in header.control}

    def split(self, text: str, *, first: bool) -> list[Segment]:
        """One segment per run of non-spaces with the spaces before it."""
        segments: list[Segment] = []
        start = 0
        for end in (*(m.start() for m in _CUT.finditer(text)), len(text)):
            if end > start:
                part = text[start:end]
                if self.header.add_prefix and first and start == 0:
                    part = " " + part
                segments.append(Segment(end, self._library.encode(part)))
                start = end
        return segments

    def horizon(self, text: str) -> int:
        """The last cut."""
        word = len(text.rstrip(" \u2581"))
        if word < len(text):
            return word
        last = max(text.rfind(" "), text.rfind("\u2581"))
        return len(text[: last + 1].rstrip(" \u2581"))

    def encode(self, text: str) -> list[int]:
        """Encode a whole text."""
        prefix = " " if self.header.add_prefix and text else ""
        ids: list[int] = self._library.encode(prefix + text)
        return ids

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def controls(self) -> dict[str, int]:
        """Return the control tokens by their text."""
        return self._controls

    def _read_piece(self, token: int) -> bytes:
        if self._library.is_control(token):
            return b""
        if self._library.is_unknown(token):
            return " \u2047 ".encode()
        text: str = self._library.id_to_piece(token)
        if self._library.is_byte(token):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()


def _check_ids(header: TokenizerHeader, size: int) -> None:
    """Check that the header speaks of the vocabulary that was loaded."""
    if header.vocabulary != size or not all(0 <= token < size for token in header.control):
        raise ValueError(f"the header is of {header.vocabulary} tokens, the vocabulary has {size}")
    if not (-1 <= header.bos < size and -1 <= header.eos < size):
        raise ValueError(f"bos {header.bos} or eos {header.eos} is none of {size} tokens")


def pack_tokenizer(header: TokenizerHeader, payload: bytes) -> bytes:
    """Return the blob of a tokenizer."""
    return msgspec.json.encode(header) + b"\n" + payload


def load_tokenizer(blob: bytes) -> Tokenizer:
    """Load a blob made by `pack_tokenizer`.

    Raises:
        ModelError: it is damaged, or of a kind without a proven rule.
    """
    line, _, payload = blob.partition(b"\n")
    try:
        if len(blob) > MAX_BLOB:
            raise ValueError(f"at most {MAX_BLOB} bytes are accepted")
        header = msgspec.json.decode(line, type=TokenizerHeader)
        make = BpeTokenizer if header.kind == "bpe" else SpmTokenizer
        return make(header, payload, sha256(blob))
    except ModelError:
        raise
    except Exception as error:  # the libraries raise bare Exception and RuntimeError
        raise ModelError(f"tokenizer blob of {len(blob)} bytes is damaged: {error}") from None


class TextDecoder:
    """Turns reply ids into text as they come, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = tokenizer.header.add_prefix

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete."""
        data = b"".join(map(self._tokenizer.piece, ids))
        if self._first and data:
            self._first = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return what is left; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode a whole text."""
    decoder = TextDecoder(tokenizer)
    return decoder.feed(ids) + decoder.flush()
