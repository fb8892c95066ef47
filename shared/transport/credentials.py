"""How a client gets into an MQTT broker. Secrets come from files or the environment, never from
settings themselves, so that no listing of processes or settings shows them.
"""

import os
import ssl
from pathlib import Path

import msgspec

from shared.errors import ConfigError

PASSWORD = "DELTARELAY_MQTT_PASSWORD"
"""Variable of the environment that holds the password where no file does."""


class Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whom to trust and who we are, at a broker. Paths are those of PEM files."""

    ca: str = ""
    """The authorities whose brokers are trusted; empty: those of this system."""
    certificate: str = ""
    """This client's certificate, followed by those between it and its authority."""
    key: str = ""
    """The private key of `certificate`, not encrypted."""
    username: str = ""
    password_file: str = ""
    """A file with the password on its first line; empty: DELTARELAY_MQTT_PASSWORD has it."""

    @property
    def wants_tls(self) -> bool:
        """Some of it means something over TLS only."""
        return bool(self.ca or self.certificate or self.key)

    def password(self) -> str | None:
        """Return the password; None: there is none.

        Raises:
            ConfigError: the file cannot be read or has no first line.
        """
        if not self.password_file:
            return os.environ.get(PASSWORD)
        try:
            lines = Path(self.password_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "no text"
            raise ConfigError(f"credentials.password_file = {self.password_file}: {why}") from None
        if not lines or not lines[0]:
            raise ConfigError(
                f"credentials.password_file = {self.password_file}: its first line is empty; "
                "write the password there"
            )
        return lines[0]

    def tls_context(self) -> ssl.SSLContext:
        """Return a context for TLS 1.2 or newer that checks the broker's certificate and name.

        Raises:
            ConfigError: a file cannot be read or is not what it should be.
        """
        if bool(self.certificate) != bool(self.key):
            missing = "key" if self.certificate else "certificate"
            raise ConfigError(f"credentials.{missing}: a certificate and its key go together")
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:  # SSLError is one
            raise ConfigError(f"credentials.ca = {self.ca}: {_why(error)}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate:
            try:  # a password, lest OpenSSL ask the terminal for that of an encrypted key
                context.load_cert_chain(self.certificate, self.key, password="")
            except OSError as error:
                where = f"credentials.certificate = {self.certificate}, key = {self.key}"
                raise ConfigError(f"{where}: {_why(error)}") from None
        return context


def _why(error: OSError) -> str:
    """Say what is wrong with a file of certificates or keys."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    return "not in PEM form, or an encrypted key: give an unencrypted one (chmod 600)"
