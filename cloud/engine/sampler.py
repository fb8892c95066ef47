"""Draws the next token from logits."""

import torch

from cloud.engine.sequence import Sequence
from shared.frames import Sampling


class Sampler:
    """Greedy, or temperature, top-k, top-p, min-p; a seeded draw depends on its position only."""

    def __init__(self, seed: int | None = None) -> None:
        self._generator = torch.Generator()
        if seed is not None:
            self._generator.manual_seed(seed)

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Return a token per row of `logits` (rows, vocabulary); row i is of `sequences[i]`."""
        for row, sequence in enumerate(sequences):
            if sequence.generation is not None and sequence.generation.constraint is not None:
                sequence.generation.constraint.mask(logits[row])
        tokens: list[int] = logits.argmax(-1).tolist()
        for row, sequence in enumerate(sequences):
            generation = sequence.generation
            assert generation is not None
            if generation.sampling.temperature > 0:
                seeded = _generator(generation.sampling.seed, len(sequence.ids))
                probabilities = distribution(logits[row], generation.sampling)
                drawn = torch.multinomial(probabilities, 1, generator=seeded or self._generator)
                tokens[row] = int(drawn)
        return tokens


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return what `sampling`, of a temperature above 0, makes of `logits`: (vocabulary,)."""
    logits = logits.float().cpu() / sampling.temperature
    if sampling.top_k > 0:
        lowest = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.min_p > 0:
        probabilities = probabilities.masked_fill(
            probabilities < sampling.min_p * probabilities.max(), 0.0
        )
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p * ordered.sum()
        probabilities = probabilities.index_fill(0, order[outside], 0.0)
    return probabilities / probabilities.sum()


def _generator(seed: int | None, position: int) -> torch.Generator | None:
    if seed is None:
        return None
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & ((1 << 63) - 1)
    return torch.Generator().manual_seed(mixed)
