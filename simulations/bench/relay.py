"""From the end of a turn to the first token, relayed and whole, over shared memory."""

import asyncio
import statistics
import time
from typing import Any

from edge.agent import Agent, connect
from edge.talk import Talk
from shared.child import open_decoder
from shared.commands import progress
from shared.tokenizer import Tokenizer, decode
from simulations.bench.append import NUM_APPENDS, append_growth
from simulations.bench.show import spread
from simulations.dialogues import load_dialogues

SIZES = (32, 128, 512)
"""Tokens of a turn."""
CHUNK, GAP = 8, 0.06
"""Tokens that arrive together while a turn is spoken, and the seconds between."""
SILENCE = 0.25
"""Seconds between the last words and the end of the turn."""
CONTEXT = 256
"""Tokens cached before the steps that are measured in the engine alone."""


async def bench_relay(model: str, runs: int) -> dict[str, Any]:
    """Return engine step times, and times to first token by size of the turn."""
    progress("measuring the engine's own steps")
    result = await asyncio.to_thread(_engine_steps, model, runs)
    progress(f"{NUM_APPENDS} appends of one token (a minute or two)")
    result["append_growth"] = await asyncio.to_thread(append_growth, model)
    async with (
        open_decoder(model, changes=["max_tokens=4", "ahead_tokens=0"]) as decoder,
        connect(decoder.address) as agent,
    ):
        result["turns"] = await _turns(agent, runs)
    return result


async def _turns(agent: Agent, runs: int) -> dict[str, dict[str, dict[str, float]]]:
    relayed: dict[int, list[float]] = {size: [] for size in SIZES}
    whole: dict[int, list[float]] = {size: [] for size in SIZES}
    for run in range(runs):  # in turn, so that the machine's moods hit all of them
        progress(f"turns of {', '.join(map(str, SIZES))} tokens: {run + 1} of {runs}")
        for size in SIZES:
            for times, relay in ((relayed, True), (whole, False)):
                text = text_of(agent.tokenizer, size, 2 * run + relay)
                times[size].append(await _turn(agent, text, relay=relay))
    return {
        str(size): {"relayed": spread(relayed[size], 1e3), "whole": spread(whole[size], 1e3)}
        for size in SIZES
    }


def _engine_steps(model: str, runs: int) -> dict[str, Any]:
    """Measure a decode step and an append of 8 tokens with one logit, both at a context of 256.

    Decode steps follow each other, as they do in a reply. An append comes after the silence that
    precedes the end of a turn, in which a processor sleeps and its caches go to others.
    """
    from random import Random

    from cloud.decoder import load_brain
    from cloud.engine.sequence import Generation
    from cloud.settings import DecoderSettings
    from shared.frames import Sampling

    engine = load_brain(DecoderSettings(model=model)).engine
    draw = Random(0)
    sequence = engine.add()

    def ids(count: int) -> list[int]:
        return [draw.randrange(100, 40_000) for _ in range(count)]

    def step(keep: int, fresh: int) -> float:
        engine.splice(sequence, keep, ids(fresh))
        generation = Generation(Sampling(), 1, frozenset(), lambda _token, _why: None)
        engine.generate(sequence, generation, 0.0)
        result = engine.step()
        assert result is not None
        return result.seconds

    step(0, CONTEXT)
    decodes: list[float] = []
    appends: list[float] = []
    for _ in range(2 * runs):
        decodes += [step(CONTEXT, 1) for _ in range(3)]
        time.sleep(SILENCE)
        appends.append(step(CONTEXT, CHUNK))
    return {
        "decode_step_ms": round(statistics.median(decodes) * 1e3, 3),
        "append8_ms": round(statistics.median(appends) * 1e3, 3),
    }


def text_of(tokenizer: Tokenizer, size: int, number: int = 0) -> str:
    """Return about `size` tokens of what drivers say; no two numbers share a beginning.

    The decoder shares prefixes: a text that it has had before would cost it nothing.
    """
    said = " ".join(turn.text for d in load_dialogues() if d.language == "en" for turn in d.turns)
    words = said.split()
    ids = tokenizer.encode(f"{number}: " + " ".join(words[number:] + words[:number]))
    while len(ids) < size:
        ids += ids
    return decode(tokenizer, ids[:size]).strip()


async def _turn(agent: Agent, text: str, *, relay: bool) -> float:
    """Hold one turn in a fresh conversation; return seconds from its end to the first token."""
    async with agent.conversation(max_tokens=4) as talk:
        await asyncio.sleep(0.3)  # the template's opening is prefilled
        if relay:
            await _speak(talk, agent.tokenizer, text)
        async for _ in talk.finish(text):
            pass
        reply = talk.reply
        assert reply is not None
        assert reply.first_at is not None
        return reply.first_at - reply.asked_at


async def _speak(talk: Talk, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for end in range(CHUNK, len(ids), CHUNK):
        await talk.revise(decode(tokenizer, ids[:end]))
        await asyncio.sleep(GAP)
    await talk.revise(text)
    await asyncio.sleep(SILENCE)
