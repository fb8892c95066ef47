"""Counters that a decoder serves over HTTP in Prometheus' text format."""

import re
from collections import defaultdict
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from shared.errors import LinkError

TIMEOUT = 10.0
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?")


def fetch_counters(url: str, *names: str) -> list[float]:
    """Return counters by name, each summed over its labels. Blocks for up to `TIMEOUT` seconds.

    Raises:
        LinkError: nobody answers at `url`, or not with these counters.
    """
    direct = build_opener(ProxyHandler({}))  # a proxy of the environment does not know our loopback
    try:
        with direct.open(url, timeout=TIMEOUT) as page:
            found = parse_counters(page.read().decode())
    except (URLError, OSError, ValueError) as error:
        raise LinkError(f"no counters at {url}: {error}; is the decoder alive?") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise LinkError(f"{url} does not serve {', '.join(missing)}: is it a decoder's /metrics?")
    return [found[name] for name in names]


def parse_counters(page: str) -> dict[str, float]:
    """Return the samples of a page, by name and summed over labels.

    The format is "Exposition formats: text-based format" of Prometheus' documentation.

    Raises:
        ValueError: a line is no sample.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for line in filter(None, map(str.strip, page.splitlines())):
        if line.startswith("#"):
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"{line[:80]!r} is no sample of the text format")
        sums[sample[1]] += float(sample[2])
    return dict(sums)
