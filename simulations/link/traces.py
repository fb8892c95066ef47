"""Recorded links, as curves: Mahimahi's packet opportunities and the Irish 5G drives.

    Mahimahi   a line per opportunity: the millisecond at which 1500 bytes can leave
    Irish 5G   G-NetTrack's CSV, a row a second: rates in kbit/s, round trips in ms

Both begin again at their end.
"""

import csv
import zipfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from math import ceil, inf
from pathlib import Path

from shared.errors import InputError

PACKET = 1500
"""Bytes that one opportunity carries (mm-link(1))."""
MAX_SECONDS = 7 * 24 * 3600
"""Longest recording that is read."""
SLIP = 2.0
"""Seconds that a row may be older than the one before: one of the 83 drives has such rows."""


class Opportunities:
    """A Mahimahi trace: 1500 bytes may leave at each of `times`.

    Small packets share an opportunity, long ones take several, what is not used is gone.

    Args:
        times: in milliseconds, sorted; the last one is also the length of the trace, above 0.
    """

    def __init__(self, times: Sequence[int]) -> None:
        assert times
        assert times[-1] > 0
        self._times = tuple(times)

    @property
    def seconds(self) -> float:
        """Length of the trace."""
        return self._times[-1] / 1e3

    def gaps(self, at_least: float) -> list[tuple[float, float]]:
        """Return begin and end, in seconds, of the outages of `at_least` seconds."""
        pairs = pairwise(self._times)
        return [(a / 1e3, b / 1e3) for a, b in pairs if (b - a) / 1e3 >= at_least]

    def before(self, at: float) -> float:
        """Bytes that could have left before `at`, in seconds."""
        loops = ceil(at * 1e3 / self._times[-1]) - 1  # the end of a loop is not before it
        rest = at * 1e3 - loops * self._times[-1]
        return PACKET * (loops * len(self._times) + bisect_left(self._times, rest))

    def time_of(self, count: float) -> float:
        """When `count` bytes can have left, in seconds."""
        loops, index = divmod(ceil(count / PACKET) - 1, len(self._times))
        return (loops * self._times[-1] + self._times[index]) / 1e3


class RateSteps:
    """A rate that changes in steps.

    Args:
        times: when each step begins, in seconds, rising from 0; the last is the end of the trace.
        rates: in bytes a second, one less than `times`; not all 0.
    """

    def __init__(self, times: Sequence[float], rates: Sequence[float]) -> None:
        assert len(times) == len(rates) + 1
        assert any(rates)
        self._times, self._rates = tuple(times), tuple(rates)
        spans = (end - begin for begin, end in pairwise(times))
        sizes = (span * rate for span, rate in zip(spans, rates, strict=True))
        self._bytes = tuple(accumulate(sizes, initial=0.0))
        """Bytes that could have left when each step begins."""

    @property
    def seconds(self) -> float:
        """Length of the trace."""
        return self._times[-1]

    def before(self, at: float) -> float:
        """Bytes that could have left before `at`, in seconds."""
        loops, rest = divmod(at, self._times[-1])
        step = max(0, bisect_left(self._times, rest) - 1)
        here = self._bytes[step] + (rest - self._times[step]) * self._rates[step]
        return loops * self._bytes[-1] + here

    def time_of(self, count: float) -> float:
        """When `count` bytes can have left, in seconds."""
        loops = ceil(count / self._bytes[-1]) - 1
        rest = min(count - loops * self._bytes[-1], self._bytes[-1])
        step = max(1, bisect_left(self._bytes, rest)) - 1
        inside = (rest - self._bytes[step]) / self._rates[step]
        return loops * self._times[-1] + self._times[step] + inside


@dataclass(frozen=True, slots=True)
class Drive:
    """A drive of the Irish 5G set.

    The rates are what an application got, so they are low where it asked for little: `up` carries
    hardly more than the acknowledgements of a download.
    """

    down: RateSteps
    up: RateSteps
    round_trip: float | None
    """Median of the average round trips that were measured, in seconds; None: none was."""


def read_mahimahi(path: Path) -> Opportunities:
    """Read a Mahimahi trace.

    Raises:
        InputError: it cannot be read, or is no such trace; file, line and bound are named.
    """
    times: list[int] = []
    for number, line in enumerate(_lines(path), 1):
        place = f"{path}, line {number}: {line.strip()[:40]!r}"
        if not (line.strip().isascii() and line.strip().isdigit()):
            raise InputError(f"{place} is no time in whole milliseconds, from 0 on")
        times.append(int(line))
        if times[-1] > MAX_SECONDS * 1000:
            raise InputError(f"{place} is beyond {MAX_SECONDS} s, the longest trace that is read")
        if len(times) > 1 and times[-1] < times[-2]:
            raise InputError(f"{place} comes after {times[-2]}: times must not go back; sort them")
    if not times or not times[-1]:
        raise InputError(f"{path}: a trace has one time above 0 at least, in milliseconds")
    return Opportunities(times)


def read_irish5g(path: Path | zipfile.Path) -> Drive:
    """Read a drive, from a CSV file or from a member of the archive.

    Of rows with the same second, or a slightly earlier one, the last counts; a rate stays until
    the next row.

    Raises:
        InputError: it cannot be read, or is no such file; file, line, column and bound are named.
    """
    rows = csv.DictReader(_lines(path))
    columns = ("Timestamp", "DL_bitrate", "UL_bitrate", "PINGAVG")
    missing = [name for name in columns if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError(f"{path}, line 1: no column {', '.join(missing)}; is it of G-NetTrack?")
    steps: dict[float, tuple[float, float]] = {}
    pings: list[float] = []
    first: datetime | None = None
    last = 0.0
    for row in rows:
        place = f"{path}, line {rows.line_num}"
        moment = _timestamp(row["Timestamp"], place)
        first = first or moment
        at = (moment - first).total_seconds()
        if not last - SLIP <= at <= MAX_SECONDS:
            raise InputError(
                f"{place}: Timestamp {row['Timestamp']!r} is {at:g} s after the first row: times "
                f"go back by {SLIP:g} s at most; a drive has {MAX_SECONDS} s at most"
            )
        last = max(last, at)
        steps[last] = _number(row, "DL_bitrate", place), _number(row, "UL_bitrate", place)
        if row["PINGAVG"] != "-":
            pings.append(_number(row, "PINGAVG", place))
    down, up = (_steps(steps, column, path) for column in (0, 1))
    middle = sorted(pings)[len(pings) // 2] / 1e3 if pings else None
    return Drive(down, up, middle)


def _lines(path: Path | zipfile.Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the trace {path}: {error}") from error


def _timestamp(text: str, place: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y.%m.%d_%H.%M.%S")
    except (ValueError, TypeError):
        raise InputError(
            f"{place}: Timestamp {text!r} is not of the form 2020.02.14_09.38.22"
        ) from None


def _number(row: dict[str, str], column: str, place: str) -> float:
    try:
        number = float(row[column])
    except (ValueError, TypeError):
        number = -1.0
    if not 0 <= number < inf:
        raise InputError(f"{place}: {column} {row[column]!r} is no number from 0 on")
    return number


def _steps(
    steps: dict[float, tuple[float, float]], column: int, path: Path | zipfile.Path
) -> RateSteps:
    """Return one direction; kbit/s become bytes a second, and the last row lasts a second."""
    rates = [pair[column] * 125.0 for pair in steps.values()]
    if not any(rates):
        name = ("DL_bitrate", "UL_bitrate")[column]
        raise InputError(f"{path}: {name} is never above 0: no packet would ever leave")
    return RateSteps([*steps, [*steps][-1] + 1.0], rates)
