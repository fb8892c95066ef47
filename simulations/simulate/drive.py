"""The link of a drive through a tunnel: recorded where the recording is, else generated."""

from dataclasses import dataclass
from pathlib import Path

from simulations.link import Opportunities, read_mahimahi

RECORDING = Path(__file__).parents[3] / "shared/data/mahimahi/ATT-LTE-driving.up"
OFFSET = 740.0
"""Second of the recording at which the drive begins."""
TUNNEL = 60.0
"""Seconds without an opportunity from which a gap of the recording is the tunnel."""
SHARE = (0.26, 0.70)
"""Where the tunnel begins and ends in a generated drive, as shares of its seconds."""
OPPORTUNITIES = 80
"""A second, in a generated drive: about those of the recording."""
AFTERWARDS = 600.0
"""Seconds of a generated drive behind its end, where the link stays good."""


@dataclass(frozen=True, slots=True)
class Drive:
    """The link of all vehicles, and its tunnel in seconds since the beginning."""

    trace: Opportunities
    offset: float
    tunnel: tuple[float, float]
    source: str


def choose_drive(seconds: float, recording: Path = RECORDING) -> Drive:
    """Return the recorded drive, or a generated one where it is not there or does not fit."""
    why = f"{recording.name} is not there"
    if recording.exists():
        trace = read_mahimahi(recording)
        gaps = [(a - OFFSET, b - OFFSET) for a, b in trace.gaps(TUNNEL) if a > OFFSET]
        if gaps and gaps[0][1] < 0.8 * seconds:
            return Drive(trace, OFFSET, gaps[0], f"{recording.name} from {OFFSET:g} s on")
        why = f"the tunnel of {recording.name} does not fit into {seconds:g} s"
    begin, end = (share * seconds for share in SHARE)
    every = 1000 // OPPORTUNITIES
    length = int(1000 * (seconds + AFTERWARDS))
    times = [at for at in range(0, length, every) if not begin <= at / 1000 < end]
    trace = Opportunities(times)
    return Drive(trace, 0.0, trace.gaps(0.5 * (end - begin))[0], f"generated, because {why}")
