"""Changes logits before a token is drawn: penalties, bias, what a grammar forbids. In place."""

from collections import Counter
from collections.abc import Mapping

import torch

from cloud.engine.sequence import Generation, Sequence


def adjust(logits: torch.Tensor, sequence: Sequence) -> None:
    """Apply what a sequence's generation asks for to its row of logits: (vocabulary,)."""
    generation = sequence.generation
    assert generation is not None
    _penalize(logits, sequence.ids, generation)
    _add(logits, generation.sampling.logit_bias)
    if generation.constraint is not None:
        generation.constraint.mask(logits)
    if generation.min_tokens > generation.produced:
        _put_off(logits, generation.stop_ids)


def _penalize(logits: torch.Tensor, ids: list[int], generation: Generation) -> None:
    sampling = generation.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(ids)), device=logits.device)
        before, by = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(before > 0, before / by, before * by)
    if (sampling.presence_penalty or sampling.frequency_penalty) and generation.produced:
        times = Counter(ids[-generation.produced :])
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        _add(logits, {token: -presence - frequency * count for token, count in times.items()})


def _add(logits: torch.Tensor, bias: Mapping[int, float]) -> None:
    if bias:
        tokens = torch.tensor(list(bias), device=logits.device)
        logits[tokens] += torch.tensor(list(bias.values()), device=logits.device)


def _put_off(logits: torch.Tensor, stop_ids: frozenset[int]) -> None:
    """Forbid stop ids, unless the reply cannot go on: a grammar may be at its end."""
    others = logits.clone()
    others[list(stop_ids)] = float("-inf")
    if others.max() > float("-inf"):
        logits.copy_(others)
