"""Which sampling parameters are accepted, on the relay as over HTTP."""

import math
from collections.abc import Collection

from shared.errors import InputError
from shared.frames import Sampling

MAX_TEMPERATURE = 10.0
LEAST_TOP_P = 1e-6
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_SEED = 2**63 - 1
MAX_STOPS, MAX_STOP = 16, 256
"""Stop strings, and characters of one: each token of a reply is compared with all of them."""

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (LEAST_TOP_P, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "seed": (-MAX_SEED, MAX_SEED),
}


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Refuse parameters that mean nothing.

    Raises:
        InputError: one is out of its bounds; the message names it.
    """
    for name, (low, high) in _BOUNDS.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # NaN is outside of everything
            limit = f"{low:g}..{high:g}" if math.isfinite(high) else f"at least {low:g}"
            raise InputError(f"{name} = {value}: must be {limit}")
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InputError(
            f"logit_bias has {len(sampling.logit_bias)} entries; at most {MAX_BIASES} are taken"
        )
    for token, bias in sampling.logit_bias.items():
        if not abs(bias) <= MAX_BIAS:
            raise InputError(f"logit_bias[{token}] = {bias}: must be -{MAX_BIAS:g}..{MAX_BIAS:g}")
    check_vocabulary(sampling.logit_bias, vocabulary, "logit_bias")


def check_stops(stops: Collection[str]) -> None:
    """Refuse more, or longer, stop strings than every token of a reply can be compared with.

    Raises:
        InputError: there are too many, or one is too long.
    """
    longest = max(map(len, stops), default=0)
    if len(stops) > MAX_STOPS or longest > MAX_STOP:
        raise InputError(
            f"stop: {len(stops)} strings of up to {longest} characters; at most {MAX_STOPS} of "
            f"{MAX_STOP} are taken"
        )


def check_vocabulary(ids: Collection[int], vocabulary: int, what: str) -> None:
    """Refuse token ids that do not exist.

    Raises:
        InputError: an id is out of the vocabulary.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        bad = next(i for i in ids if not 0 <= i < vocabulary)
        raise InputError(f"{what}: token id {bad}; the vocabulary has 0..{vocabulary - 1}")
