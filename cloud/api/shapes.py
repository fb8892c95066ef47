"""Pieces of replies as the OpenAI API shows them: of chats and plain completions."""

from collections.abc import Sequence
from typing import Any, Protocol

from cloud.completion import Completion, Piece
from cloud.engine.scores import TokenScore
from shared.tokenizer import TextDecoder, Tokenizer, decode

Json = dict[str, Any]


class Shape(Protocol):
    """How one endpoint shows replies."""

    prefix: str
    """Of request ids."""
    whole: str
    """`object` of a whole answer."""
    part: str
    """`object` of a streamed one."""

    def choice(self, completion: Completion, pieces: Sequence[Piece]) -> Json:
        """Return a whole reply."""
        ...

    def delta(self, completion: Completion, piece: Piece, *, first: bool) -> Json:
        """Return some more of a reply."""
        ...


class ChatShape:
    """Of `/v1/chat/completions`."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, scored: bool) -> None:
        self._tokenizer, self._scored = tokenizer, scored

    def choice(self, completion: Completion, pieces: Sequence[Piece]) -> Json:
        """Return a whole reply."""
        text = "".join(piece.text for piece in pieces)
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": text},
            "logprobs": self._logprobs([s for piece in pieces for s in piece.scores]),
            "finish_reason": pieces[-1].reason,
        }

    def delta(self, completion: Completion, piece: Piece, *, first: bool) -> Json:
        """Return some more of a reply."""
        delta: Json = {"role": "assistant"} if first else {}
        if piece.text or first:
            delta["content"] = piece.text
        return {
            "index": completion.index,
            "delta": delta,
            "logprobs": self._logprobs(piece.scores),
            "finish_reason": piece.reason or None,
        }

    def _logprobs(self, scores: Sequence[TokenScore]) -> Json | None:
        if not self._scored:
            return None
        entries = [
            self._entry(s.token, s.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in s.top]}
            for s in scores
        ]
        return {"content": entries}

    def _entry(self, token: int, logprob: float) -> Json:
        data = list(self._tokenizer.piece(token))
        return {"token": token_text(self._tokenizer, token), "logprob": logprob, "bytes": data}


class TextShape:
    """Of `/v1/completions`."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], *, echo: bool, scored: bool
    ) -> None:
        self._tokenizer, self._prompts = tokenizer, prompts
        self._echo, self._scored = echo, scored
        self._texts: dict[int, tuple[TextDecoder, int]] = {}
        """The text so far, and its characters, by reply."""

    def choice(self, completion: Completion, pieces: Sequence[Piece]) -> Json:
        """Return a whole reply."""
        text = "".join(piece.text for piece in pieces)
        scores = [s for piece in pieces for s in piece.scores]
        return self._choice(completion, text, scores, pieces[-1].reason, first=True)

    def delta(self, completion: Completion, piece: Piece, *, first: bool) -> Json:
        """Return some more of a reply."""
        return self._choice(completion, piece.text, piece.scores, piece.reason or None, first=first)

    def _choice(
        self,
        completion: Completion,
        text: str,
        scores: Sequence[TokenScore],
        reason: str | None,
        *,
        first: bool,
    ) -> Json:
        entries: list[TokenScore | int] = list(scores)
        if first and self._echo:
            prompt = self._prompts[completion.prompt]
            text = decode(self._tokenizer, prompt) + text
            if completion.scores is not None:
                entries = [prompt[0], *completion.scores.entries, *entries]
        return {
            "index": completion.index,
            "text": text,
            "logprobs": self._logprobs(completion.index, entries) if self._scored else None,
            "finish_reason": reason,
        }

    def _logprobs(self, index: int, entries: Sequence[TokenScore | int]) -> Json:
        """Show scores; a bare token is a prompt's first, of which there is none."""
        ids = [entry if isinstance(entry, int) else entry.token for entry in entries]
        tokens = [token_text(self._tokenizer, token) for token in ids]
        offsets: list[int] = []
        text, at = self._texts.get(index, (TextDecoder(self._tokenizer), 0))
        for token in ids:
            offsets.append(at)
            at += len(text.feed([token]))
        self._texts[index] = text, at
        return {
            "tokens": tokens,
            "token_logprobs": [None if isinstance(e, int) else e.logprob for e in entries],
            "top_logprobs": [None if isinstance(e, int) else self._top(e) for e in entries],
            "text_offset": offsets,
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        """Return the best tokens, and the one that was taken, by their text."""
        pairs = [*score.top, (score.token, score.logprob)]
        return {token_text(self._tokenizer, token): logprob for token, logprob in pairs}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""Return a token as text; part of a character as `bytes:\xe3\x81`, as OpenAI shows it."""
    data = tokenizer.piece(token)
    if not data:
        names = {number: name for name, number in tokenizer.controls().items()}
        return names.get(token, "")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
