"""Changes logits before a token is drawn: penalties, bias, what a grammar forbids. In place."""

from collections import Counter

import torch

from cloud.engine.sequence import Generation, Sequence


def adjust(logits: torch.Tensor, sequence: Sequence) -> None:
    """Apply what a sequence's generation asks for to its row of logits: (vocabulary,)."""
    generation = sequence.generation
    assert generation is not None
    _penalize(logits, sequence.ids, generation)
    for token, bias in generation.sampling.logit_bias.items():
        logits[token] += bias
    if generation.min_tokens > generation.produced:
        logits[list(generation.stop_ids)] = float("-inf")
    if generation.constraint is not None:
        generation.constraint.mask(logits)


def _penalize(logits: torch.Tensor, ids: list[int], generation: Generation) -> None:
    sampling = generation.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(ids)), device=logits.device)
        before, by = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(before > 0, before / by, before * by)
    if (sampling.presence_penalty or sampling.frequency_penalty) and generation.produced:
        for token, times in Counter(ids[-generation.produced :]).items():
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
