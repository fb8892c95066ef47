"""The transports under test. A broker that is not installed is skipped by name."""

from collections.abc import Generator
from pathlib import Path

import pytest

from shared.errors import LinkError
from shared.transport.mqtt_address import Broker
from simulations.broker import open_broker
from tests.conformance.ends import Wire

BROKERS = [pytest.param(name, marks=pytest.mark.mqtt) for name in ("mosquitto", "embedded")]


def running(name: str) -> Generator[Broker, None, None]:
    try:
        opened = open_broker(prefer="mosquitto" if name == "mosquitto" else "embedded")
        with opened as broker:
            if broker.name != name:
                pytest.skip(f"the {name} broker is not installed")
            yield Broker(broker.host, broker.port)
    except LinkError as error:
        if "no MQTT broker" in str(error):
            pytest.skip(f"the {name} broker is not installed")
        raise


@pytest.fixture(scope="session")
def mosquitto() -> Generator[Broker, None, None]:
    yield from running("mosquitto")


@pytest.fixture(scope="session")
def embedded() -> Generator[Broker, None, None]:
    yield from running("embedded")


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Broker:
    found: Broker = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["loopback", "shm", "sealed", "emulated", *BROKERS])
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Wire:
    name = request.param
    broker = request.getfixturevalue(name) if name in ("mosquitto", "embedded") else None
    return Wire(name, tmp_path, broker)
