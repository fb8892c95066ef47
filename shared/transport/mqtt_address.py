"""Where an MQTT broker is and how to get in."""

import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from shared.errors import ConfigError
from shared.transport.credentials import Credentials


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


def parse_broker(url: str, credentials: Credentials | None = None) -> Broker:
    """Read `mqtt[s]://[user:password@]host[:port]`, and the files that `credentials` name.

    A password file goes before the URL's password, and that before the environment's.

    Raises:
        ConfigError: it is not such a URL, or the credentials cannot be used; the message shows
            neither user nor password.
    """
    credentials = credentials or Credentials()
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}; the port must be 1..65535") from None
    if parts.scheme not in ("mqtt", "mqtts") or not host:
        raise ConfigError(f"{shown}: expected mqtt://host:port or mqtts://host:port")
    secure = parts.scheme == "mqtts"
    if credentials.wants_tls and not secure:
        raise ConfigError(f"{shown}: credentials with certificates need TLS: write mqtts://")
    username = credentials.username or unquote(parts.username or "")
    if credentials.password_file and not username:
        raise ConfigError("credentials.password_file needs credentials.username")
    own = unquote(parts.password) if parts.password else None
    password = own if own and not credentials.password_file else credentials.password()
    return Broker(
        host,
        port or (8883 if secure else 1883),
        username or None,
        password if username else None,
        credentials.tls_context() if secure else None,
    )


def without_secrets(url: str) -> str:
    """Return a URL as messages may show it."""
    return re.sub(r"//.*@", "//***@", url)
