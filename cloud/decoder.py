"""Puts a decoder together: settings → model, cache, engine, worker."""

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from cloud.adapters import AdapterLoader, AdapterRunner, Adapters
from cloud.ahead import AheadSettings
from cloud.engine.blocks import BlockPool
from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.engine import BatchRunner, Engine
from cloud.engine.reference.model import build_model
from cloud.engine.reference.runner import ReferenceRunner
from cloud.engine.sampler import Sampler
from cloud.engine.scheduler import Scheduler
from cloud.engine.sequence import Generation, LoadedAdapter
from cloud.engine.steptime import StepTime
from cloud.grammar import Grammar
from cloud.metrics import Metrics
from cloud.settings import DecoderSettings
from cloud.template import ChatTemplate
from cloud.voice import Voice
from cloud.worker import Worker
from shared.errors import ConfigError
from shared.frames import Sampling
from shared.models import model_path
from shared.nn.checkpoint import Checkpoint, load_checkpoint
from shared.nn.llama import LlamaConfig
from shared.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


MIN_CONTEXT = 64
STEP_TOKENS, IDLE_STEP_TOKENS = 64, 512
"""Most tokens of a step while replies are under way, and otherwise."""
MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Brain:
    """A loaded model, ready to be driven by a worker."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate
    engine: Engine
    cache: KVCache
    context: int
    loader: AdapterLoader
    adapters: Mapping[str, LoadedAdapter]
    """What there is from the start, by name."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.cache.num_blocks


class _ModelRunner(BatchRunner, AdapterRunner, Protocol):
    """What runs a model."""


def load_brain(settings: DecoderSettings) -> Brain:
    """Load the model and make the engine.

    Raises:
        ModelError: the model or an adapter cannot be used.
        ConfigError: a setting does not fit it.
        CapacityError: the adapters are more or of a higher rank than the settings allow.
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
    runner, cache = _runner(checkpoint, settings, device, context)
    pool = BlockPool(cache.num_blocks, BLOCK)
    times = StepTime()
    scheduler = Scheduler(pool, times, step_tokens=STEP_TOKENS, idle_step_tokens=IDLE_STEP_TOKENS)
    engine = Engine(runner, pool, scheduler, Sampler(settings.seed), time.monotonic, times)
    _warm_up(engine)
    template = ChatTemplate(checkpoint.template, tokenizer, checkpoint.name)
    loader = AdapterLoader(checkpoint.config, runner, settings.max_lora_rank)
    adapters = loader.load_all(settings.adapters, settings.max_adapters)
    return Brain(checkpoint, tokenizer, template, engine, cache, context, loader, adapters)


def _warm_up(engine: Engine) -> None:
    """Run a few steps of the usual shapes, so that no driver waits for kernels to load."""
    sequence = engine.add()
    for count in (40, 4, 1):
        engine.splice(sequence, len(sequence.ids), [0] * count)
        generation = Generation(Sampling(), 1, frozenset(), lambda _token, _why: None)
        engine.generate(sequence, generation, 0.0)
        engine.step()
    engine.remove(sequence)


def make_voice(brain: Brain, worker: Worker, settings: DecoderSettings) -> Voice:
    """Return what the conversations of this model share."""
    return Voice(
        brain.template,
        brain.tokenizer,
        Grammar(
            brain.tokenizer, min(brain.checkpoint.stop_ids, default=brain.tokenizer.header.eos)
        ),
        brain.checkpoint.stop_ids,
        brain.context,
        settings.max_tokens,
        worker,
        Adapters(brain.loader, worker, settings.max_adapters, brain.adapters),
        time.monotonic,
        Metrics(settings.model, time.monotonic),
        AheadSettings(settings.ahead_tokens, settings.ahead_after),
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
    checkpoint: Checkpoint, settings: DecoderSettings, device: torch.device, context: int
) -> tuple[_ModelRunner, KVCache]:
    """Return what runs batches, and its cache."""
    if device.type != "cpu":
        return _reference_runner(checkpoint, settings, device, context)
    from cloud.engine.cpu.model import pack_model
    from cloud.engine.cpu.runner import CpuRunner
    from cloud.engine.cpu.team import Team
    from cloud.engine.cpu.tiles import Form

    forms = {"fast": None, "bf16": Form.BF16, "fp32": Form.F32, "exact": Form.F32}
    model = pack_model(checkpoint, context, forms[settings.precision], settings.quantize)
    dtype = torch.float32 if settings.precision == "exact" else _KV[settings.kv]
    num_blocks = _num_blocks(settings, checkpoint.config, dtype, context, model.weights.data.nbytes)
    cache = KVCache(checkpoint.config, num_blocks, dtype, device)
    team = Team(settings.threads or len(os.sched_getaffinity(0)))
    return CpuRunner(model, cache, team, IDLE_STEP_TOKENS, settings.max_lora_rank), cache


def _reference_runner(
    checkpoint: Checkpoint, settings: DecoderSettings, device: torch.device, context: int
) -> tuple[_ModelRunner, KVCache]:
    if settings.precision == "exact" or settings.kv == "int8" or settings.quantize:
        raise ConfigError(
            f"device = {settings.device!r} has neither precision = 'exact' nor kv = 'int8' nor "
            "quantize; leave them out, or set device = 'cpu'"
        )
    weights = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    model = build_model(checkpoint, weights, device, context)
    num_blocks = _num_blocks(settings, checkpoint.config, torch.bfloat16, context, 0)
    cache = KVCache(checkpoint.config, num_blocks, torch.bfloat16, device)
    return ReferenceRunner(model, cache), cache


_KV = {"bf16": torch.bfloat16, "int8": torch.int8}


def _num_blocks(
    settings: DecoderSettings,
    config: LlamaConfig,
    dtype: torch.dtype,
    context: int,
    weight_bytes: int,
) -> int:
    """Return how many blocks of keys and values there is room for.

    Raises:
        ConfigError: not even one conversation fits.
    """
    room, source = settings.cache_mb * MB, f"cache_mb = {settings.cache_mb}"
    if settings.memory_limit_mb and settings.memory_limit_mb * MB - weight_bytes < room:
        room = settings.memory_limit_mb * MB - weight_bytes
        source = (
            f"memory_limit_mb = {settings.memory_limit_mb}, of which the weights take "
            f"{weight_bytes / MB:.0f},"
        )
    num_blocks = max(0, room) // KVCache.bytes_per_block(config, dtype)
    if num_blocks * BLOCK < context:
        raise ConfigError(
            f"{source} holds {num_blocks * BLOCK} tokens of keys and values, one conversation "
            f"takes up to context = {context}: raise it, lower context, or set kv = 'int8'"
        )
    return num_blocks
