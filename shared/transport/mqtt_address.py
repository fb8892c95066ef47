"""Where an MQTT broker is and how to get in."""

import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Broker:
    """Where a broker is and how to get in. Never print `password`."""

    host: str
    port: int = 1883
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    @property
    def name(self) -> str:
        """The address, without secrets."""
        return f"{'mqtts' if self.tls else 'mqtt'}://{self.host}:{self.port}"


def parse_broker(url: str) -> Broker:
    """Read `mqtt[s]://[user:password@]host[:port]`.

    Raises:
        ConfigError: it is not such a URL; the message shows it without user and password.
    """
    shown = re.sub(r"//.*@", "//***@", url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}; the port must be 1..65535") from None
    if parts.scheme not in ("mqtt", "mqtts") or not host:
        raise ConfigError(f"{shown}: expected mqtt://host:port or mqtts://host:port")
    secure = parts.scheme == "mqtts"
    return Broker(
        host,
        port or (8883 if secure else 1883),
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        ssl.create_default_context() if secure else None,
    )
