"""What tests of simulations have in common."""

from pathlib import Path

import pytest

from shared.errors import LinkError
from simulations.broker import open_broker
from tests.brains import write_model

SMALL = ["context=512", "cache_mb=8", "threads=1", 'precision="exact"']
"""Settings of a decoder that serves the small model."""


def small_model(folder: Path) -> str:
    """Write the small model; return where it is. Skip the test where there is no broker."""
    skip_without_broker()
    return str(write_model(folder / "model"))


def skip_without_broker() -> None:
    """Skip the test where there is no broker."""
    try:
        with open_broker():
            pass
    except LinkError as error:
        pytest.skip(str(error))
