"""Settings of the decoder service."""

from typing import Literal

import msgspec

Precision = Literal["fast", "bf16", "fp32", "exact"]
"""Of weights. fast: as they are stored · bf16, fp32: rounded or widened · exact: fp32, and keys and
values too."""


class DecoderSettings(msgspec.Struct, frozen=True):
    """Settings of `deltarelay cloud`."""

    model: str = "smollm2-135m-instruct"
    """A known model's name, or the path of a GGUF file or Hugging Face folder."""
    listen: list[str] = []
    """Where vehicles connect: shm:///path, mqtt://host:port; default: this user's socket."""
    http: str = ""
    """Where the OpenAI-compatible API listens: host:port; empty: nowhere."""
    adapter_updates: bool = False
    """Let HTTP clients load and unload adapters: they name folders of this host."""
    name: str = ""
    """This decoder's name in its fleet; default: the host's name."""
    fleet: str = "fleet"
    context: int = 2048
    """Tokens of one conversation, at most the model's."""
    max_tokens: int = 1024
    precision: Precision = "fast"
    quantize: Literal["", "int8", "int4"] = ""
    """Round weights that are stored as floats to such codes, at load."""
    kv: Literal["bf16", "int8"] = "bf16"
    """How keys and values are kept; int8 takes half the memory."""
    cache_mb: int = 1024
    """Memory for keys and values."""
    memory_limit_mb: int = 0
    """Memory for weights, keys and values together; 0: cache_mb alone counts."""
    adapters: dict[str, str] = {}
    """LoRA adapters to serve from the start: name → PEFT folder."""
    max_adapters: int = 8
    """Adapters in memory at a time."""
    max_lora_rank: int = 64
    device: str = "cpu"
    threads: int = 0
    """Threads of a step; 0: one per core."""
    ahead_tokens: int = 2
    """Reply tokens drawn while a turn may have ended; 0: none before it has."""
    ahead_after: float = 0.2
    """Seconds without a new word after which a turn may have ended."""
    seed: int | None = None
    allow_uids: list[int] = []
    """Users besides our own who may connect over shared memory."""
    keep_seconds: float = 3600.0
    """How long the conversation of a device that went away is kept."""
