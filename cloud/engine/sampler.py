"""Draws the next token from logits."""

import torch

from cloud.engine.logits import adjust
from cloud.engine.scores import score
from cloud.engine.sequence import Generation, Sequence
from shared.frames import Sampling

_COLDEST = 1e-6
"""Temperatures below draw the likeliest token as well; division by them would overflow."""


class Sampler:
    """Greedy, or temperature, top-k, top-p, min-p; a seeded draw depends on its position only."""

    def __init__(self, seed: int | None = None) -> None:
        self._generator = torch.Generator()
        if seed is not None:
            self._generator.manual_seed(seed)

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Return a token per row of `logits` (rows, vocabulary); row i is of `sequences[i]`.

        Scores that are wanted are left with the generations.
        """
        generations = [s.generation for s in sequences if s.generation is not None]
        assert len(generations) == len(logits)
        unchanged = {
            row: logits[row].clone()
            for row, g in enumerate(generations)
            if g.top_scores is not None
        }
        for row, sequence in enumerate(sequences):
            adjust(logits[row], sequence)
        tokens: list[int] = logits.argmax(-1).tolist()
        for row, (generation, sequence) in enumerate(zip(generations, sequences, strict=True)):
            if generation.sampling.temperature > 0:
                tokens[row] = self._sample(logits[row], generation, len(sequence.ids))
        for row, before in unchanged.items():
            top = generations[row].top_scores or 0
            generations[row].scores += score(before.unsqueeze(0), [tokens[row]], top)
        return tokens

    def _sample(self, logits: torch.Tensor, generation: Generation, position: int) -> int:
        seeded = _generator(generation.sampling.seed, position)
        probabilities = distribution(logits, generation.sampling)
        return int(torch.multinomial(probabilities, 1, generator=seeded or self._generator))


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return what `sampling`, of a temperature above 0, makes of `logits`: (vocabulary,)."""
    logits = logits.float().cpu()
    logits = (logits - logits.max()) / max(sampling.temperature, _COLDEST)
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
