"""Log probabilities of tokens, for those who ask for them: of a reply's, or of a prompt's own."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class TokenScore(NamedTuple):
    """How likely a token was, by the model alone: before temperature, penalties and grammar."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at its place with their log probabilities, best first."""


@dataclass(slots=True, eq=False)
class PromptScores:
    """Scores of a prompt's ids behind the first, filled in as they are run."""

    length: int
    """Ids of the prompt."""
    top: int
    """Alternatives to give for each."""
    entries: list[TokenScore] = field(default_factory=list[TokenScore])

    @property
    def is_complete(self) -> bool:
        """All there will be is there."""
        return len(self.entries) >= self.length - 1

    def take(self, start: int, ids: Ids[int], logits: torch.Tensor) -> None:
        """Take logits (rows, vocabulary) behind `ids[start : start + rows]`."""
        first = max(start, len(self.entries))  # what was run before an eviction is known
        end = min(start + len(logits), self.length - 1)
        if first < end:
            wanted = ids[first + 1 : end + 1]
            self.entries += score(logits[first - start : end - start], wanted, self.top)


def score(logits: torch.Tensor, tokens: Ids[int], top: int) -> list[TokenScore]:
    """Return the scores of one token per row of `logits` (rows, vocabulary)."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1)
    if not top:
        return [TokenScore(t, p, ()) for t, p in zip(tokens, own.tolist(), strict=True)]
    best = logprobs.topk(min(top, logprobs.shape[1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenScore(token, logprob, tuple(zip(*row, strict=True)))
        for token, logprob, row in zip(tokens, own.tolist(), pairs, strict=True)
    ]
