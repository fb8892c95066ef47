"""Real words, revised as recognizers and typists revise them: ids and replies are right."""

import asyncio
import json
from random import Random

import pytest
import torch

from cloud.decoder import Brain, load_brain
from cloud.engine.engine import Engine
from cloud.engine.sequence import Generation, Sequence
from cloud.engine.tables import evict
from cloud.settings import DecoderSettings
from edge.tokenizer import StreamingEncoder
from shared.frames import Sampling
from simulations.typist import type_text
from tests.test_cloud_engine import tapped
from tests.test_cloud_server import World, in_world
from tests.vocabularies import data, smollm2


def partials() -> list[dict[str, object]]:
    path = data("partials", "kvret_dev_240.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_240_recognized_turns_replay_through_the_relay_with_the_right_final_ids() -> None:
    turns = partials()

    async def test(world: World) -> None:
        async with world.agent() as agent:
            for turn in turns:
                async with agent.conversation(max_tokens=1) as talk:
                    for _, text in turn["partials"]:  # type: ignore[attr-defined]
                        await talk.revise(text)
                        await asyncio.sleep(0)
                    final = str(turn["final"])
                    async for _ in talk.finish(final):
                        pass
                    told = talk.stream.turns[0].user_ids
                    assert list(told) == agent.tokenizer.encode(final)

    in_world(test)


def loaded(precision: str) -> Brain:
    return load_brain(DecoderSettings(model=str(smollm2()), precision=precision))  # type: ignore[arg-type]


def driver_turns(count: int) -> list[str]:
    dialogues = json.loads(data("kvret", "kvret_dev_public.json").read_text())
    said = [
        turn["data"]["utterance"]
        for dialogue in dialogues
        for turn in dialogue["dialogue"]
        if turn["turn"] == "driver" and turn["data"]["utterance"]
    ]
    return said[:: max(1, len(said) // count)][:count]


def reply(engine: Engine, sequence: Sequence, tokens: int, stops: frozenset[int]) -> list[int]:
    begin = len(sequence.ids)
    engine.generate(sequence, Generation(Sampling(), tokens, stops, lambda _t, _w: None), 0.0)
    while sequence.generation is not None:
        engine.step()
    return sequence.ids[begin:]


def relay(brain: Brain, sequence: Sequence, text: str) -> None:
    """Prefill a turn as it is typed, a step per few keys."""
    engine, opening = brain.engine, brain.template.opening("")
    encoder = StreamingEncoder(brain.tokenizer)
    told: list[int] = []
    for n, update in enumerate(type_text(text, Random(text))):
        revision = encoder.revise(update.text)
        told = [*told[: revision.keep], *revision.ids]
        engine.splice(sequence, 0, [*opening, *told, *revision.tail])
        if n % 3 == 0:
            engine.step()
    engine.splice(
        sequence, 0, [*opening, *brain.tokenizer.encode(text), *brain.template.reply_opening]
    )


@pytest.mark.parametrize(
    ("precision", "turns"),
    [
        ("fast", 8),
        pytest.param("fast", 100, marks=pytest.mark.slow),
        pytest.param("bf16", 10, marks=pytest.mark.slow),
        pytest.param("exact", 10, marks=pytest.mark.slow),
    ],
)
def test_a_relayed_turn_gets_the_same_logits_to_the_last_bit_as_the_turn_sent_whole(
    precision: str, turns: int
) -> None:
    brain = loaded(precision)
    engine = brain.engine
    for text in driver_turns(turns):
        seen: list[list[torch.Tensor]] = []
        for way in ("relayed", "whole", "again"):
            tap = tapped(engine)
            sequence = engine.add(way)  # nothing is shared between the three
            if way == "whole":
                prompt = brain.tokenizer.encode(text)
                whole = [*brain.template.opening(""), *prompt, *brain.template.reply_opening]
                engine.splice(sequence, 0, whole)
            else:
                relay(brain, sequence, text)
            if way == "again":
                engine.step()
                evict(engine._pool, sequence)
                sequence.namespace = "evicted"
            reply(engine, sequence, 8, brain.checkpoint.stop_ids)
            seen.append(list(tap.seen.values()))
            engine.remove(sequence)
        assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True)), text
        assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[2], strict=True)), text


@pytest.mark.slow
def test_exact_mode_meets_the_independent_oracle() -> None:
    path = data("smollm2-reference", "kvret_dev_40.json")
    brain = loaded("exact")
    engine, stops = brain.engine, brain.checkpoint.stop_ids
    rows = json.loads(path.read_text())
    prompts = first = whole = 0
    worst = 0.0
    for row in rows:
        user = brain.tokenizer.encode(row["user"])
        prompt = [*brain.template.opening(""), *user, *brain.template.reply_opening]
        prompts += prompt == row["prompt_ids"]
        tap = tapped(engine)
        sequence = engine.add()
        engine.splice(sequence, 0, row["prompt_ids"])
        got = reply(engine, sequence, 32, stops)
        log_probabilities = tap.seen[sequence.number, len(row["prompt_ids"])].log_softmax(-1)
        worst = max(worst, *(abs(float(log_probabilities[i]) - p) for i, p in row["top5"]))
        expected = [token for token in row["greedy_ids"] if token not in stops]
        first += got[:1] == expected[:1]
        whole += got == expected
        engine.remove(sequence)
    print(
        f"prompts {prompts}, first {first}, whole {whole} of {len(rows)}; top-5 within {worst:.4f}"
    )
    assert (prompts, first) == (40, 40)
    assert whole >= 38
    assert worst <= 0.01
