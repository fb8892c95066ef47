"""Where an agent gets its connections: by address, to one decoder or to one of several."""

from functools import partial
from typing import Protocol

from shared.errors import ConfigError
from shared.transport import Transport
from shared.transport.credentials import Credentials
from shared.transport.mqtt_address import parse_broker, without_secrets
from shared.transport.mqtt_door import MqttDoor
from shared.transport.shm import connect_shm


class Door(Protocol):
    """Opens one connection after another."""

    async def open(self) -> Transport:
        """Connect.

        Raises:
            LinkError: nobody answers.
        """
        ...

    def avoid(self) -> None:
        """Whoever is behind the last connection does not answer: prefer somebody else."""
        ...


class ShmDoor:
    """Leads to the decoder at a Unix socket of this host."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def open(self) -> Transport:
        """Connect."""
        return await connect_shm(self._path)

    def avoid(self) -> None:
        """There is nobody else."""


def door_to(
    url: str,
    *,
    fleet: str,
    device: str,
    decoder: str | None = None,
    credentials: Credentials | None = None,
) -> Door:
    """Return the door to `shm:///path` or `mqtt[s]://[user:password@]host[:port]`.

    Raises:
        ConfigError: the address is of another form, a name does not fit a topic, or the credentials
            cannot be used.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "shm" and rest.startswith("/"):
        return ShmDoor(rest)
    if scheme in ("mqtt", "mqtts"):
        broker = partial(parse_broker, url, credentials)
        return MqttDoor(broker, fleet=fleet, device=device, decoder=decoder)
    raise ConfigError(f"{without_secrets(url)}: expected shm:///absolute/path or mqtt://host:port")
