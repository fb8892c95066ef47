"""Log-likelihoods of given texts: by an engine that is taught them, and by plain torch in fp32."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cloud.engine.batch import Batch
from cloud.engine.engine import BatchRunner, Engine
from cloud.engine.sequence import Generation
from shared.frames import Sampling
from shared.nn.checkpoint import Checkpoint
from shared.nn.llama import forward


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Ids, and at which places (ascending, none at 0) the likelihood of the id there counts."""

    ids: list[int]
    places: list[int]


def engine_log_likelihood(engine: Engine, texts: Sequence[ScoredText]) -> float:
    """Return the sum of ln p(id | ids before it) over the places of all texts.

    All texts go side by side, from place to place: each step appends a text's ids up to its next
    place and draws a token there, which the true ids then replace. So it is decode steps and
    appends that are measured, and the cache they leave behind.
    """
    runner = engine.runner
    engine.runner = teacher = Teacher(runner)
    sequences = [engine.add() for _ in texts]
    teacher.texts = {s.number: text for s, text in zip(sequences, texts, strict=True)}
    for number in range(max(len(text.places) for text in texts)):
        for sequence, text in zip(sequences, texts, strict=True):
            if number < len(text.places):
                held, place = text.places[number - 1] if number else 0, text.places[number]
                engine.splice(sequence, held, text.ids[held:place])
                one = Generation(Sampling(), 1, frozenset(), lambda _token, _why: None)
                engine.generate(sequence, one, 0.0)
        while engine.step() is not None:
            pass
    for sequence in sequences:
        engine.remove(sequence)
    engine.runner = runner
    return teacher.log_likelihood


class Teacher:
    """Runs batches; adds up how likely the next id of each text was."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self.texts: dict[int, ScoredText] = {}
        """By number of their sequence."""
        self.log_likelihood = 0.0

    def run(self, batch: Batch) -> torch.Tensor:
        """Run, and add up."""
        logits = self._runner.run(batch)
        sampled = [chunk for chunk in batch.chunks if chunk.sample]
        for row, chunk in zip(logits, sampled, strict=True):
            following = self.texts[chunk.sequence.number].ids[chunk.start + chunk.count]
            self.log_likelihood += float(row.double().log_softmax(-1)[following])
        return logits

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        self._runner.copy_block(source, target)


@torch.inference_mode()
def reference_log_likelihood(checkpoint: Checkpoint, texts: Sequence[ScoredText]) -> float:
    """Return what `engine_log_likelihood` does, by the naive forward pass in float32."""
    weights = {name: weight.dense() for name, weight in checkpoint.weights.items()}
    total = 0.0
    for text in texts:
        logits = forward(checkpoint.config, weights, torch.tensor(text.ids))  # (length, vocabulary)
        places = torch.tensor(text.places)
        scores = logits[places - 1].double().log_softmax(-1)
        total += float(scores[torch.arange(len(places)), torch.tensor(text.ids)[places]].sum())
    return total
