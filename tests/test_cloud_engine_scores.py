"""What is asked of logits besides the next token: scores, penalties, bias, least lengths."""

import math
from random import Random

import pytest
import torch

from cloud.engine.plan import SCORED_ROWS
from cloud.engine.sampler import Sampler
from cloud.engine.scores import PromptScores
from cloud.engine.sequence import Generation, Sequence
from cloud.sampling import check_sampling
from shared.errors import InputError
from shared.frames import Sampling
from shared.nn.checkpoint import load_checkpoint
from shared.nn.llama import forward
from tests.test_cloud_engine import brain, generation, model_folder, run, some_ids


def naive_logprobs(ids: list[int]) -> torch.Tensor:
    checkpoint = load_checkpoint(model_folder())
    weights = {name: weight.dense() for name, weight in checkpoint.weights.items()}
    return forward(checkpoint.config, weights, torch.tensor(ids)).log_softmax(-1)


@pytest.mark.parametrize("length", [1, 2, SCORED_ROWS, SCORED_ROWS + 1, 3 * SCORED_ROWS - 5])
def test_a_prompt_is_scored_as_the_naive_pass_scores_it(length: int) -> None:
    engine = brain("exact").engine
    ids = some_ids(Random(length), length)
    others = [engine.add() for _ in range(2)]
    for other in others:
        engine.splice(other, 0, ids)
        engine.generate(other, generation(9), 0.0)
    engine.step()
    scored = engine.add()
    engine.splice(scored, 0, ids)
    scored.scores = PromptScores(len(ids), 3)
    engine.generate(scored, generation(2), 0.0)
    run(engine)
    expected = naive_logprobs(ids)
    assert scored.adopted == 0
    assert [entry.token for entry in scored.scores.entries] == ids[1:]
    for row, entry in enumerate(scored.scores.entries):
        assert entry.logprob == pytest.approx(float(expected[row, entry.token]), abs=0.01)
        best = expected[row].topk(3).values.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=0.01)


def test_a_prompt_that_is_evicted_half_way_is_scored_once() -> None:
    made = brain("exact")
    engine, ids = made.engine, some_ids(Random(3), 2 * SCORED_ROWS + 7)
    sequence = engine.add()
    engine.splice(sequence, 0, ids)
    sequence.scores = PromptScores(len(ids), 0)
    engine.step()
    assert 0 < len(sequence.scores.entries) < len(ids) - 1
    engine.splice(sequence, 0, [])  # all keys and values are given up
    engine.splice(sequence, 0, ids)
    run(engine)
    assert [entry.token for entry in sequence.scores.entries] == ids[1:]


def test_scores_of_a_reply_are_of_the_model_whatever_is_asked_of_the_draw() -> None:
    engine = brain("exact").engine
    ids = some_ids(Random(5), 30)
    biased = Sampling(temperature=0.7, seed=1, logit_bias={17: 50.0}, presence_penalty=1.0)
    reply = Generation(biased, 3, frozenset(), lambda _t, _w: None, top_scores=2)
    sequence = engine.add()
    engine.splice(sequence, 0, ids)
    engine.generate(sequence, reply, 0.0)
    run(engine)
    expected = naive_logprobs(sequence.ids)
    assert [entry.token for entry in reply.scores] == sequence.ids[30:] == [17, 17, 17]
    for row, entry in enumerate(reply.scores, 29):
        assert entry.logprob == pytest.approx(float(expected[row, entry.token]), abs=0.01)
        assert len(entry.top) == 2


def drawn(logits: list[float], sampling: Sampling, ids: list[int], **about: int) -> int:
    """Return what is drawn behind `ids`, of which the last `produced` are the reply so far."""
    sequence = Sequence(0, ids)
    sequence.generation = Generation(sampling, 9, frozenset({3}), lambda _t, _w: None, **about)  # type: ignore[arg-type]
    return Sampler().draw(torch.tensor([logits]), [sequence])[0]


def test_penalties_count_what_they_say() -> None:
    logits = [2.0, 1.5, 1.0, -9.0]
    assert drawn(logits, Sampling(presence_penalty=0.6), [1, 0, 0], produced=2) == 1
    assert drawn(logits, Sampling(presence_penalty=0.6), [0, 0, 1], produced=1) == 0
    assert drawn(logits, Sampling(frequency_penalty=0.4), [0, 0, 1], produced=3) == 0
    assert drawn(logits, Sampling(frequency_penalty=0.4), [2, 0, 0], produced=3) == 1
    assert drawn(logits, Sampling(repetition_penalty=3.0), [0, 1], produced=0) == 2
    assert drawn([-1.0, -1.5, -9.0, -9.0], Sampling(repetition_penalty=2.0), [0]) == 1


def test_bias_and_least_length_change_what_is_drawn() -> None:
    assert drawn([1.0, 0.0, 0.0, 0.0], Sampling(logit_bias={2: 1.5}), [0]) == 2
    assert drawn([1.0, 0.0, 0.0, 5.0], Sampling(), [0]) == 3
    assert drawn([1.0, 0.0, 0.0, 5.0], Sampling(), [0, 1], min_tokens=2, produced=1) == 0
    assert drawn([1.0, 0.0, 0.0, 5.0], Sampling(), [0, 1, 1], min_tokens=2, produced=2) == 3


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (Sampling(temperature=-0.1), "temperature = -0.1"),
        (Sampling(temperature=math.nan), "temperature = nan"),
        (Sampling(top_p=1.5), "top_p = 1.5"),
        (Sampling(top_k=-1), "top_k = -1"),
        (Sampling(min_p=math.inf), "min_p = inf"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty = 0.0"),
        (Sampling(frequency_penalty=-3), "frequency_penalty = -3"),
        (Sampling(seed=2**63), "seed = 9223372036854775808"),
        (Sampling(logit_bias={500: 1.0}), "token id 500; the vocabulary has 0..499"),
        (Sampling(logit_bias={5: math.nan}), "logit_bias[5] = nan"),
        (Sampling(logit_bias=dict.fromkeys(range(2000), 1.0)), "2000 entries"),
    ],
)
def test_parameters_out_of_bounds_are_refused_by_name(sampling: Sampling, says: str) -> None:
    with pytest.raises(InputError) as error:
        check_sampling(sampling, 500)
    assert says in str(error.value)
