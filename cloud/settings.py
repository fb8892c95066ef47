"""Settings of the decoder service."""

from typing import Annotated, Literal

import msgspec

from shared.transport.credentials import Credentials

Precision = Literal["fast", "bf16", "fp32", "exact"]
"""Of weights. fast: as they are stored · bf16, fp32: rounded or widened · exact: fp32, and keys and
values too."""


NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on tokens; 0: no such bound."""

    rate: NotNegative = 0.0
    """Tokens a second in the long run; above 0, `burst` is wanted too."""
    burst: NotNegative = 0.0
    """Tokens at once, after a pause."""
    per_minute: NotNegative = 0.0
    """Tokens within any minute."""


class DeviceLimitSettings(LimitSettings, frozen=True):
    """Bounds on one device; a driver who talks without a pause needs some 50 tokens a second."""

    rate: NotNegative = 1000.0
    burst: NotNegative = 60_000.0
    per_minute: NotNegative = 90_000.0


class TenantSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody who shares the decoder with others."""

    devices: list[str] = []
    """Names of its devices; `*` and `?` stand for any characters: ["taxi-*"]."""
    keys: list[str] = []
    """API keys with which its programs come over HTTP, each as "sha256:" and the 64 hexadecimal
    digits of its SHA-256; better made by `deltarelay cloud keys add`."""
    weight: Positive = 1.0
    """What one of its devices weighs against one of another tenant when there is not enough for
    both."""
    limit: LimitSettings = LimitSettings()
    """On all its devices and programs together."""


class AdmissionSettings(msgspec.Struct, frozen=True):
    """Who may ask for how much.

    Tokens count that are sent to be prefilled, and reply tokens that are drawn.
    """

    device: DeviceLimitSettings = DeviceLimitSettings()
    """On each device, whatever its tenant."""
    max_active: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Replies of one device under way at once."""
    max_devices: Annotated[int, msgspec.Meta(ge=1)] = 16_384
    """Devices remembered; the one unheard of for longest is forgotten first."""
    tenants: dict[str, TenantSettings] = {}
    """By name. A device belongs to the one it is registered for, else to the first that has it,
    else to the tenant `default`."""
    require_devices: bool = False
    """Only devices may connect that `deltarelay cloud devices add` has registered."""


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
    drain_seconds: NotNegative = 10.0
    """How long SIGTERM lets replies under way end, and devices go to another decoder."""
    snapshots: str = ""
    """Folder where conversations are kept for a decoder that starts again; empty: nowhere."""
    snapshot_mb: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """All files there together; the conversation that was written longest ago goes first."""
    snapshot_hours: Positive = 24.0
    """After which a conversation in which nothing happens is deleted there."""
    snapshot_every: Positive = 2.0
    """Seconds between two looks for conversations that have changed."""
    snapshot_mb_per_second: Positive = 100.0
    """Keys and values that are written, so that neither disk nor cores miss the time."""
    admission: AdmissionSettings = AdmissionSettings()
    credentials: Credentials = Credentials()
    """How to get into the MQTT brokers of `listen`."""
    state: str = ""
    """Folder of the registry of keys and devices; default: $XDG_STATE_HOME/deltarelay/cloud."""
