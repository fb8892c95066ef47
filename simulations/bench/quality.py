"""What precisions cost in quality: agreement with greedy replies of an independent fp32
implementation, and perplexity of in-car dialogues relative to fp32.

Both need `../shared/data` beside the checkout. Every precision is loaded in a process of its own.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import fmean
from typing import Any, ParamSpec, TypeVar

import msgspec

from cloud.decoder import load_brain
from cloud.engine.engine import Engine
from cloud.engine.sequence import Generation
from cloud.settings import DecoderSettings
from cloud.template import ChatTemplate
from shared.commands import progress
from shared.errors import InputError
from shared.frames import Sampling
from shared.models import model_path
from shared.nn.checkpoint import load_checkpoint
from shared.tokenizer import Tokenizer, load_tokenizer
from shared.tokenlog import common_prefix
from simulations.bench.kvret import (
    DIALOGUES,
    REPLIES,
    Dialogue,
    OracleReply,
    load_dialogues,
    load_replies,
)
from simulations.bench.likelihood import (
    ScoredText,
    engine_log_likelihood,
    reference_log_likelihood,
)

P = ParamSpec("P")
T = TypeVar("T")
NUM_DIALOGUES = 40
"""Dialogues whose perplexity is taken: the first ones in which driver and assistant take turns."""
MODES: dict[str, dict[str, Any]] = {
    "fast": {},
    "bf16": {"precision": "bf16"},
    "kv_int8": {"kv": "int8"},
    "exact": {"precision": "exact"},
}
"""Name → what is set differently from a decoder's defaults."""


class Agreement(msgspec.Struct, frozen=True):
    """How far greedy replies are those of the oracle."""

    first_token: int
    """Replies that begin with its first token."""
    common_prefix: float
    """Mean share of its reply before the first difference."""


async def bench_quality(model: str) -> dict[str, Any]:
    """Return perplexity relative to fp32, and agreement with the oracle, by mode.

    Raises:
        InputError: the data is not there, or of another model.
    """
    replies, dialogues = load_replies(REPLIES), load_dialogues(DIALOGUES, NUM_DIALOGUES)
    found: dict[str, tuple[Agreement, float]] = {}
    for mode, changes in MODES.items():
        progress(f"{mode}: {len(replies)} replies, perplexity of {len(dialogues)} dialogues")
        settings = DecoderSettings(model=model, **changes)
        found[mode] = await _in_fresh_process(measure_mode, settings, replies, dialogues)
    progress("the perplexity in fp32, by plain torch")
    reference, num_tokens = await _in_fresh_process(measure_reference, model, dialogues)
    result: dict[str, Any] = {
        mode: {
            "ppl_ratio": round(math.exp((reference - log_likelihood) / num_tokens), 5),
            "first_token": agreement.first_token,
            "common_prefix": round(agreement.common_prefix, 3),
        }
        for mode, (agreement, log_likelihood) in found.items()
    }
    perplexity = round(math.exp(-reference / num_tokens), 3)
    return result | {"fp32": {"ppl": perplexity, "tokens": num_tokens, "replies": len(replies)}}


async def _in_fresh_process(work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return await asyncio.wrap_future(pool.submit(work, *arguments, **keywords))


# --- in processes of their own


def measure_reference(model: str, dialogues: Sequence[Dialogue]) -> tuple[float, int]:
    """Return the dialogues' log-likelihood in fp32, and of how many tokens it is."""
    checkpoint = load_checkpoint(model_path(model))
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    template = ChatTemplate(checkpoint.template, tokenizer, checkpoint.name)
    texts = [render(template, tokenizer, dialogue) for dialogue in dialogues]
    num_tokens = sum(len(text.places) for text in texts)
    return reference_log_likelihood(checkpoint, texts), num_tokens


def measure_mode(
    settings: DecoderSettings, replies: Sequence[OracleReply], dialogues: Sequence[Dialogue]
) -> tuple[Agreement, float]:
    """Return agreement with the oracle's replies, and the dialogues' log-likelihood.

    Raises:
        InputError: the oracle's prompts are not those of this model.
    """
    brain = load_brain(settings)
    for reply in replies:
        user = brain.tokenizer.encode(reply.user)
        prompt = [*brain.template.opening(""), *user, *brain.template.reply_opening]
        if prompt != reply.prompt_ids:
            raise InputError(
                f"{settings.model} makes other tokens of the prompt {reply.user[:40]!r} than "
                f"{REPLIES} has: replies can be compared with --model smollm2-135m-instruct only"
            )
    texts = [render(brain.template, brain.tokenizer, dialogue) for dialogue in dialogues]
    return agree(brain.engine, replies), engine_log_likelihood(brain.engine, texts)


def agree(engine: Engine, replies: Sequence[OracleReply]) -> Agreement:
    """Have the engine reply to all prompts at once, greedily, and compare."""
    sequences = [engine.add() for _ in replies]
    for sequence, reply in zip(sequences, replies, strict=True):
        engine.splice(sequence, 0, reply.prompt_ids)
        most = len(reply.greedy_ids)
        greedy = Generation(Sampling(), most, frozenset(), lambda _token, _why: None)
        engine.generate(sequence, greedy, 0.0)
    while engine.step() is not None:
        pass
    shared = [
        common_prefix(sequence.ids[len(reply.prompt_ids) :], reply.greedy_ids)
        for sequence, reply in zip(sequences, replies, strict=True)
    ]
    for sequence in sequences:
        engine.remove(sequence)
    return Agreement(
        sum(length > 0 for length in shared),
        fmean(n / len(reply.greedy_ids) for n, reply in zip(shared, replies, strict=True)),
    )


def render(template: ChatTemplate, tokenizer: Tokenizer, dialogue: Dialogue) -> ScoredText:
    """Put a dialogue into the model's chat template; what driver and assistant say is scored."""
    ids = template.opening("")
    places: list[int] = []
    for turn in dialogue:
        for said, following in zip(
            turn, (template.reply_opening, template.user_opening), strict=True
        ):
            spoken = tokenizer.encode(said)
            places += range(max(len(ids), 1), len(ids) + len(spoken))
            ids += [*spoken, *following]
    return ScoredText(ids, places)
