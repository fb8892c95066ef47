"""The quality bench: what an engine is found to lose, and that fp32 loses nothing."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cloud.decoder import Brain
from cloud.engine.batch import Batch
from shared.errors import InputError
from shared.nn.llama import forward
from simulations.bench.command import bench
from simulations.bench.kvret import OracleReply, load_dialogues, load_replies
from simulations.bench.likelihood import (
    ScoredText,
    engine_log_likelihood,
    reference_log_likelihood,
)
from simulations.bench.quality import (
    MODES,
    Agreement,
    agree,
    bench_quality,
    measure_mode,
    measure_reference,
    render,
)
from tests.brains import small_brain, small_settings, write_model
from tests.vocabularies import data, smollm2

DIALOGUES = [
    (("Find a charger", "There is one near the office."), ("Take me there", "On the way.")),
    (("Wie heiß wird es heute?", "Dreißig Grad."),),
    (("it's 7:45, I can't be there before 8", "I tell them."),),
]
NUM_TOKENS = 6
"""Of the naive replies."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quality") / "model")


@pytest.fixture
def exact(model: Path) -> Brain:
    return small_brain(model, precision="exact")


def naive_replies(brain: Brain) -> list[OracleReply]:
    """Greedy replies to the dialogues' first words, by the plain forward pass."""
    checkpoint = brain.checkpoint
    weights = {name: weight.dense() for name, weight in checkpoint.weights.items()}
    replies: list[OracleReply] = []
    for (user, _), *_ in DIALOGUES:
        opening, behind = brain.template.opening(""), brain.template.reply_opening
        prompt = [*opening, *brain.tokenizer.encode(user), *behind]
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            logits = forward(checkpoint.config, weights, torch.tensor(ids))
            ids.append(int(logits[-1].argmax()))
        replies.append(OracleReply(user, prompt, ids[len(prompt) :]))
    return replies


def changed(reply: OracleReply, place: int) -> OracleReply:
    """The same reply with another token at a place."""
    ids = list(reply.greedy_ids)
    ids[place] += 1
    return OracleReply(reply.user, reply.prompt_ids, ids)


def texts(brain: Brain) -> list[ScoredText]:
    return [render(brain.template, brain.tokenizer, dialogue) for dialogue in DIALOGUES]


def test_what_is_said_is_scored_and_what_the_template_adds_is_not(exact: Brain) -> None:
    text = texts(exact)[0]
    said = [said for turn in DIALOGUES[0] for said in turn]
    encoded = [exact.tokenizer.encode(part) for part in said]
    assert [text.ids[place] for place in text.places] == [i for ids in encoded for i in ids]
    template, turns = exact.template, list(zip(encoded[::2], encoded[1::2], strict=True))
    prompt = template.opening("")
    for user, reply in turns:
        prompt += [*user, *template.reply_opening, *reply, *template.user_opening]
    assert text.ids == prompt
    assert text.places == sorted(text.places)


def test_an_engine_in_fp32_has_the_likelihood_of_the_naive_forward_pass(exact: Brain) -> None:
    made = texts(exact)
    expected = reference_log_likelihood(exact.checkpoint, made)
    assert engine_log_likelihood(exact.engine, made) == pytest.approx(expected, rel=1e-5)


def test_the_naive_likelihood_is_the_sum_over_places(exact: Brain) -> None:
    (text,) = texts(exact)[1:2]
    each = [
        reference_log_likelihood(exact.checkpoint, [ScoredText(text.ids, [place])])
        for place in text.places
    ]
    assert reference_log_likelihood(exact.checkpoint, [text]) == pytest.approx(sum(each))
    assert all(score < 0 for score in each)


def test_the_engine_is_as_before_when_it_has_been_taught(exact: Brain) -> None:
    runner, free = exact.engine.runner, exact.engine.num_free_blocks
    first = engine_log_likelihood(exact.engine, texts(exact))
    assert exact.engine.runner is runner
    assert exact.engine.num_free_blocks == free
    assert list(exact.engine.sequences) == []
    exact.engine.check()
    assert engine_log_likelihood(exact.engine, texts(exact)) == first


def test_a_worse_cache_is_seen_in_the_likelihood(exact: Brain) -> None:
    """Keys and values are spoiled behind every step: the bench must not score from memory."""
    made = texts(exact)
    good = engine_log_likelihood(exact.engine, made)
    inner = exact.engine.runner

    class Spoiled:
        def run(self, batch: Batch) -> torch.Tensor:
            logits = inner.run(batch)
            inner._paged.keys.mul_(0.5)  # type: ignore[attr-defined]
            return logits

        def copy_block(self, source: int, target: int) -> None:
            inner.copy_block(source, target)

    exact.engine.runner = Spoiled()
    assert engine_log_likelihood(exact.engine, made) != pytest.approx(good, rel=1e-5)


def test_the_engine_agrees_with_naive_replies_and_a_difference_is_counted(exact: Brain) -> None:
    same = naive_replies(exact)
    assert agree(exact.engine, same) == Agreement(3, 1.0)
    other = [changed(same[0], 0), changed(same[1], 3), same[2]]
    assert agree(exact.engine, other) == Agreement(2, pytest.approx((0 + 0.5 + 1) / 3))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_near_fp32(model: Path, exact: Brain, mode: str) -> None:
    settings = small_settings(model, **MODES[mode])
    agreement, found = measure_mode(settings, naive_replies(exact), DIALOGUES)
    expected, num_tokens = measure_reference(str(model), DIALOGUES)
    assert num_tokens == sum(len(text.places) for text in texts(exact))
    ratio = math.exp((expected - found) / num_tokens)
    assert ratio == pytest.approx(1.0, abs=1e-5 if mode == "exact" else 0.1)
    assert agreement.first_token >= 2


def test_replies_of_another_model_are_refused(model: Path, exact: Brain) -> None:
    first, *rest = naive_replies(exact)
    other = OracleReply(first.user, [5, *first.prompt_ids], first.greedy_ids)
    with pytest.raises(InputError, match=r"Find a charger.*--model smollm2-135m-instruct"):
        measure_mode(small_settings(model), [*rest, other], DIALOGUES)


def kvret_file(path: Path, *dialogues: list[tuple[str, str]]) -> Path:
    rows: list[dict[str, Any]] = [
        {"dialogue": [{"turn": who, "data": {"utterance": said, "slots": {}}} for who, said in d]}
        for d in dialogues
    ]
    path.write_text(json.dumps(rows))
    return path


def test_dialogues_in_which_both_take_turns_are_read_and_others_left_out(tmp_path: Path) -> None:
    good = [("driver", "Find a charger "), ("assistant", "There is one.")]
    path = kvret_file(
        tmp_path / "dev.json",
        good,
        [*good, ("driver", "Thanks")],
        [("driver", "A"), ("driver", "B")],
        [("driver", "A"), ("assistant", " ")],
        good * 2,
        good,
    )
    pair = ("Find a charger", "There is one.")
    assert load_dialogues(path, 10) == [(pair,), (pair, pair), (pair,)]
    assert load_dialogues(path, 2) == [(pair,), (pair, pair)]
    with pytest.raises(InputError, match="no dialogue"):
        load_dialogues(kvret_file(tmp_path / "none.json"), 2)


def test_data_that_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"replies\.json is not there"):
        load_replies(tmp_path / "replies.json")
    (tmp_path / "replies.json").write_text('[{"user": 3}]')
    with pytest.raises(InputError, match=r"replies\.json cannot be read.*user"):
        load_replies(tmp_path / "replies.json")


def test_without_its_data_the_bench_says_so_before_it_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulations.bench.quality.REPLIES", tmp_path / "replies.json")
    with pytest.raises(InputError, match=r"replies\.json is not there"):
        bench(["quality", "--model", "/no/such/model"])


@pytest.mark.slow
def test_the_served_model_is_as_good_as_its_weights() -> None:
    smollm2()
    data("smollm2-reference", "kvret_dev_40.json")
    data("kvret", "kvret_dev_public.json")
    found = asyncio.run(bench_quality("smollm2-135m-instruct"))
    assert found["exact"] == {"ppl_ratio": pytest.approx(1.0, abs=1e-4), "first_token": 40} | {
        "common_prefix": pytest.approx(1.0, abs=0.02)
    }
    for mode in MODES:
        assert found[mode]["ppl_ratio"] == pytest.approx(1.0, abs=0.03)
        assert found[mode]["first_token"] >= 36
