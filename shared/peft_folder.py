"""The PEFT folder an adapter is kept in: adapter_config.json, adapter_model.safetensors. No torch.

The tensors say which projections are adapted, the configuration says by how much, and both must
agree. Whatever would be served differently from what was trained is refused, never ignored.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from shared.adapter import MODULES, Adapter, Floats, LoraPair, module_of
from shared.errors import ModelError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PARTS = {module: part for part, module in MODULES.items()}
_KEY = re.compile(
    r"base_model\.model\.(?:model\.)?layers\.([0-9]{1,6})\.([\w.]+)\.lora_([AB])\.weight"
)
"""PEFT's name of a tensor; without the second `model.` it is of a model without a head."""
_NOTHING: tuple[Any, ...] = (False, None, [], {})
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # ways to begin training that leave the base model's weights as they are
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "use_dora": _NOTHING,
    "use_qalora": _NOTHING,
    "fan_in_fan_out": _NOTHING,
    "lora_bias": _NOTHING,
    "modules_to_save": _NOTHING,
    "layer_replication": _NOTHING,
    "trainable_token_indices": _NOTHING,
    "target_parameters": _NOTHING,
    "alora_invocation_tokens": _NOTHING,
}
"""Settings (peft, LoraConfig) and the values with which the tensors mean B (A x)."""
_MIN_ALPHA, _MAX_ALPHA = 1e-6, 1e6
_ATOM = r"(?:[\w-]|\\?\.|\\[dw]|\[(?:\w(?:-\w)?)+\])"
_PATTERN = re.compile(rf"\^?(?:{_ATOM}[*+]?)+\$?", re.ASCII)
_MAX_PATTERN, _MAX_REPEATS, _MAX_REPEATING = 256, 2, 16
"""Characters of a pattern, repetitions in one, patterns with any: what matches in no time."""


class _Config(msgspec.Struct, frozen=True):
    """What counts of adapter_config.json (peft, LoraConfig)."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank_of(self, module: str) -> int:
        return int(_matched(self.rank_pattern, module, self.r))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
        rank, alpha = self.rank_of(module), _matched(self.alpha_pattern, module, self.lora_alpha)
        return float(np.float32(alpha / (math.sqrt(rank) if self.use_rslora else rank)))


def read_adapter(folder: Path) -> Adapter:
    """Read a PEFT folder; values stored as float16 or bfloat16 become float32.

    Raises:
        ModelError: it is missing, damaged, or not plain LoRA of a Llama's projections; the message
            says which file and key, what was found and what is expected.
    """
    config = _read_config(folder / CONFIG)
    path = folder / TENSORS
    found: dict[str, dict[str, Floats]] = {}
    for key, values in _read_tensors(path).items():
        name, side = _place(key, config, path)
        sides = found.setdefault(name, {})
        if side in sides:
            raise ModelError(f"{path}: {key} is there twice, under two names of one module")
        sides[side] = values
    if not found:
        raise ModelError(f"{path}: it holds no tensor; was the adapter saved after training?")
    _check_targets(config, found, path)
    return Adapter({n: _pair(n, sides, config, path) for n, sides in found.items()}, str(path))


def write_adapter(folder: Path, adapter: Adapter, base_model: str = "") -> None:
    """Write a PEFT folder; read again it has the same digest.

    Args:
        base_model: name of the model it was trained on, for people.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {module_of(name): pair.rank for name, pair in adapter.pairs.items()}
    # exact: a float32 times a rank below 2^29 is a float64
    alphas = {module_of(name): pair.scale * pair.rank for name, pair in adapter.pairs.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {module: a for module, a in alphas.items() if a != alpha},
        "target_modules": sorted({module.rsplit(".", 1)[1] for module in ranks}),
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {_key(name, "A"): pair.a for name, pair in adapter.pairs.items()}
    tensors |= {_key(name, "B"): pair.b for name, pair in adapter.pairs.items()}
    save_file({key: np.ascontiguousarray(v) for key, v in tensors.items()}, folder / TENSORS)
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config)))


# --- inside


def _read_config(path: Path) -> _Config:
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(raw, _Config)
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}; expected a PEFT folder with {CONFIG} and {TENSORS}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not a configuration of LoRA: {error}") from None
    for key, good in _EXPECTED.items():
        value = raw.get(key, good[0])
        if value not in good:
            raise ModelError(
                f"{path}: {key} = {value!r}; supported is {good[0]!r}: to the base model's "
                "projections B (A x) is added, and nothing else is changed"
            )
    _check_numbers(config, path)
    return config


def _check_numbers(config: _Config, path: Path) -> None:
    alphas = [config.lora_alpha, *(config.alpha_pattern or {}).values()]
    for alpha in alphas:
        if not _MIN_ALPHA <= abs(alpha) <= _MAX_ALPHA:
            raise ModelError(
                f"{path}: an alpha is {alpha}; expected are {_MIN_ALPHA} to {_MAX_ALPHA}, with "
                "either sign: anything else makes no or no usable adapter"
            )
    _check_patterns([*(config.rank_pattern or {}), *(config.alpha_pattern or {})], path)
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if rank < 1:
            raise ModelError(f"{path}: a rank is {rank}; expected at least 1")


def _check_patterns(patterns: list[str], path: Path) -> None:
    """Refuse what is no plain pattern of names: matching any other can take for ever."""
    repeating = 0
    for pattern in patterns:
        repeats = pattern.count("*") + pattern.count("+")
        repeating += repeats > 0
        plain = len(pattern) <= _MAX_PATTERN and repeats <= _MAX_REPEATS
        if not plain or not _PATTERN.fullmatch(pattern):
            raise ModelError(
                f"{path}: pattern {pattern[:_MAX_PATTERN]!r} of modules; supported are up to "
                f"{_MAX_PATTERN} characters, dots, \\d, \\w, sets, and at most {_MAX_REPEATS} of * "
                "and +: write a pattern for each module instead of groups"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(f"{path}: pattern {pattern!r} of modules: {error}") from None
    if repeating > _MAX_REPEATING:
        raise ModelError(
            f"{path}: {repeating} patterns have * or +, at most {_MAX_REPEATING} may: "
            "write the names of the modules"
        )


def _read_tensors(path: Path) -> dict[str, Floats]:
    try:
        tensors = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]  # it is compiled
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}; save the adapter with safe_serialization=True"
        ) from None
    except SafetensorError as error:
        raise ModelError(f"{path}: damaged or truncated, copy it again: {error}") from None
    return {key: _floats(key, entry, path) for key, entry in tensors}


def _floats(key: str, entry: Mapping[str, Any], path: Path) -> Floats:
    """Return a stored tensor as float32."""
    kind, data = entry["dtype"], entry["data"]
    match kind:
        case "BF16":  # the upper half of a float32
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        case "F16" | "F32":
            values = np.frombuffer(data, "<f2" if kind == "F16" else "<f4").astype(np.float32)
        case _:
            raise ModelError(f"{path}: {key} is {kind}; supported are F32, F16, BF16")
    if not np.isfinite(values).all():
        raise ModelError(
            f"{path}: {key} holds values that are not finite; the training diverged or the file is "
            "damaged"
        )
    return values.reshape(entry["shape"])


def _place(key: str, config: _Config, path: Path) -> tuple[str, str]:
    """Return the weight a tensor adapts, and its side: A or B."""
    match = _KEY.fullmatch(key)
    if match is None or match[2] not in _PARTS:
        raise ModelError(
            f"{path}: tensor {key!r}; expected base_model.model.model.layers.N.MODULE.lora_A.weight"
            f" or lora_B, MODULE one of {', '.join(_PARTS)}"
        )
    name = f"layers.{int(match[1])}.{_PARTS[match[2]]}"
    targets = config.target_modules
    if isinstance(targets, list) and not any(_is_target(t, name) for t in targets):
        raise ModelError(
            f"{path}: tensor {key!r} is of none of the target_modules {targets} in {CONFIG}; "
            "the two files are of different adapters"
        )
    return name, match[3]


def _check_targets(config: _Config, names: Mapping[str, object], path: Path) -> None:
    targets = config.target_modules if isinstance(config.target_modules, list) else []
    for target in targets:
        if not any(_is_target(target, name) for name in names):
            raise ModelError(
                f"{path}: {CONFIG} has {target!r} in target_modules, no tensor is of it; expected "
                f"modules of a Llama, {', '.join(_PARTS)}, each with its tensors"
            )


def _pair(name: str, sides: Mapping[str, Floats], config: _Config, path: Path) -> LoraPair:
    for side, other in ("AB", "BA"):
        if side not in sides:
            raise ModelError(f"{path}: {_key(name, side)} is missing, {_key(name, other)} is there")
    a, b, rank = sides["A"], sides["B"], config.rank_of(module_of(name))
    for side, shape, place in (("A", a.shape, 0), ("B", b.shape, 1)):
        if len(shape) != 2 or shape[place] != rank:
            expected = f"({rank}, in)" if side == "A" else f"(out, {rank})"
            raise ModelError(
                f"{path}: {_key(name, side)} has shape {tuple(shape)}; {CONFIG} says rank {rank}, "
                f"expected {expected}"
            )
    return LoraPair(a, b, config.scale_of(module_of(name)))


def _key(name: str, side: str) -> str:
    return f"base_model.model.{module_of(name)}.lora_{side}.weight"


def _is_target(target: str, name: str) -> bool:
    """The rule of peft's tuners_utils.py: a module's whole name, or its end behind a dot."""
    return f".{module_of(name)}".endswith(f".{target}")


def _matched(patterns: Mapping[str, float] | None, module: str, otherwise: float) -> float:
    """The rule of peft's get_pattern_key: a pattern matches a name, or its end behind a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
