"""What decides the bits of a decoder's keys and values, besides namespace and ids."""

import torch

from cloud.decoder import Brain
from cloud.engine.cache import BLOCK
from cloud.settings import DecoderSettings
from cloud.snapshot.store import Layout
from shared.digest import sha256


def layout_of(brain: Brain, settings: DecoderSettings) -> Layout:
    """Return the layout of a decoder's segments.

    Positions (RoPE) are part of the model's configuration; how long the context is changes no
    value. On the CPU the program counts with every source it was compiled from; elsewhere torch
    does.
    """
    kind = torch.device(settings.device).type
    if kind == "cpu":
        from cloud.engine.cpu import COMPILED

        program = COMPILED.name
    else:
        program = f"{torch.__version__} {torch.cuda.get_device_name(settings.device)}"
    checkpoint = brain.checkpoint
    facts = (
        checkpoint.digest,
        repr(checkpoint.config),
        brain.tokenizer.digest,
        settings.precision,
        settings.quantize,
        settings.kv,
        kind,
        program,
        str(BLOCK),
    )
    return Layout(bytes.fromhex(sha256("\n".join(facts).encode())), brain.cache.block_bytes)
