"""Puts a decoder together: settings → model, cache, engine, worker."""

import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from cloud.engine.blocks import BlockPool
from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.engine import BatchRunner, Engine
from cloud.engine.reference.model import build_model
from cloud.engine.reference.runner import ReferenceRunner
from cloud.engine.sampler import Sampler
from cloud.engine.scheduler import Scheduler
from cloud.engine.sequence import Generation
from cloud.grammar import Grammar
from cloud.template import ChatTemplate
from cloud.voice import Voice
from cloud.worker import Worker
from shared.errors import ConfigError
from shared.frames import Sampling
from shared.models import model_path
from shared.nn.checkpoint import Checkpoint, load_checkpoint
from shared.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


MIN_CONTEXT = 64
STEP_TOKENS, IDLE_STEP_TOKENS = 64, 512
"""Most tokens of a step while replies are under way, and otherwise."""

Precision = Literal["fast", "bf16", "fp32", "exact"]
"""Of weights. fast: as they are stored · bf16, fp32: rounded or widened · exact: fp32, and keys and
values too."""


class DecoderSettings(msgspec.Struct, frozen=True):
    """Settings of `deltarelay cloud`."""

    model: str = "smollm2-135m-instruct"
    """A known model's name, or the path of a GGUF file or Hugging Face folder."""
    listen: list[str] = []
    """Where vehicles connect: shm:///path, mqtt://host:port; default: this user's socket."""
    name: str = ""
    """This decoder's name in its fleet; default: the host's name."""
    fleet: str = "fleet"
    context: int = 2048
    """Tokens of one conversation, at most the model's."""
    max_tokens: int = 1024
    cache_mb: int = 1024
    """Memory for keys and values."""
    precision: Precision = "fast"
    device: str = "cpu"
    threads: int = 0
    """Threads of a step; 0: one per core."""
    seed: int | None = None
    allow_uids: list[int] = []
    """Users besides our own who may connect over shared memory."""
    keep_seconds: float = 3600.0
    """How long the conversation of a device that went away is kept."""


@dataclass(frozen=True, slots=True)
class Brain:
    """A loaded model, ready to be driven by a worker."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate
    engine: Engine
    context: int
    num_blocks: int


def load_brain(settings: DecoderSettings) -> Brain:
    """Load the model and make the engine.

    Raises:
        ModelError: the model cannot be used.
        ConfigError: a setting does not fit it.
    """
    torch.set_num_threads(1)  # only tokens are drawn with torch; a step has threads of its own
    sys.setswitchinterval(0.0005)  # the event loop must not wait 5 ms for the engine's thread
    checkpoint = load_checkpoint(model_path(settings.model))
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    context = min(settings.context, checkpoint.config.context)
    if context < MIN_CONTEXT:
        raise ConfigError(f"context = {context}: at least {MIN_CONTEXT} tokens are needed")
    device = _device(settings.device)
    digest = checkpoint.digest  # read the file now, not when the first vehicle says hello
    log.info("%s %s", checkpoint.name, digest[:12])
    dtype = torch.float32 if settings.precision == "exact" else torch.bfloat16
    per_block = KVCache.bytes_per_block(checkpoint.config, dtype)
    num_blocks = settings.cache_mb * 1024 * 1024 // per_block
    if num_blocks * BLOCK < context:
        raise ConfigError(
            f"cache_mb = {settings.cache_mb} holds {num_blocks * BLOCK} tokens, one conversation "
            f"takes up to context = {context}: raise cache_mb or lower context"
        )
    cache = KVCache(checkpoint.config, num_blocks, dtype, device)
    pool = BlockPool(num_blocks, BLOCK)
    engine = Engine(
        _runner(checkpoint, settings, cache, context),
        pool,
        Scheduler(pool, step_tokens=STEP_TOKENS, idle_step_tokens=IDLE_STEP_TOKENS),
        Sampler(settings.seed),
        time.monotonic,
    )
    _warm_up(engine)
    template = ChatTemplate(checkpoint.template, tokenizer, checkpoint.name)
    return Brain(checkpoint, tokenizer, template, engine, context, num_blocks)


def _warm_up(engine: Engine) -> None:
    """Run a few steps of the usual shapes, so that no driver waits for kernels to load."""
    sequence = engine.add()
    for count in (40, 4, 1):
        engine.splice(sequence, len(sequence.ids), [0] * count)
        generation = Generation(Sampling(), 1, frozenset(), lambda _token, _why: None)
        engine.generate(sequence, generation, 0.0)
        engine.step()
    engine.remove(sequence)


def make_voice(brain: Brain, worker: Worker, max_tokens: int) -> Voice:
    """Return what the conversations of this model share."""
    return Voice(
        brain.template,
        brain.tokenizer,
        Grammar(
            brain.tokenizer, min(brain.checkpoint.stop_ids, default=brain.tokenizer.header.eos)
        ),
        brain.checkpoint.stop_ids,
        brain.context,
        max_tokens,
        worker,
        time.monotonic,
    )


def default_name() -> str:
    """Return this host's name, fit for a topic."""
    host = socket.gethostname().split(".")[0]
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in host)[:48] or "decoder"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"device = {name!r}: {first}; use 'cpu' or 'cuda'") from None
    return device


def _runner(
    checkpoint: Checkpoint, settings: DecoderSettings, cache: KVCache, context: int
) -> BatchRunner:
    device = cache.keys.device
    if device.type != "cpu":
        if settings.precision == "exact":
            raise ConfigError("precision = 'exact' runs on the CPU; set device = 'cpu'")
        dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
        return ReferenceRunner(build_model(checkpoint, dtype, device, context), cache)
    from cloud.engine.cpu.model import pack_model
    from cloud.engine.cpu.runner import CpuRunner
    from cloud.engine.cpu.team import Team
    from cloud.engine.cpu.tiles import Form

    forms = {"fast": None, "bf16": Form.BF16, "fp32": Form.F32, "exact": Form.F32}
    model = pack_model(checkpoint, context, forms[settings.precision])
    team = Team(settings.threads or len(os.sched_getaffinity(0)))
    return CpuRunner(model, cache, team, IDLE_STEP_TOKENS)
