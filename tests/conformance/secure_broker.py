"""mosquitto with the files of `deploy/mosquitto`, and certificates made for the occasion."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.transport.credentials import Credentials
from simulations.broker import free_port

DEPLOY = Path(__file__).parents[2] / "deploy" / "mosquitto"
INSTALLED = "/etc/mosquitto/deltarelay"
"""Where the configuration expects its files."""
PASSWORDS = {"car": "car's word", "evil": "evil's word", "decoder-1": "decoder's word"}


class Authority:
    """Issues certificates into a folder, as NAME.pem and NAME.key."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self._openssl("req", "-x509", *self._new_key(name), "-days", "2", "-out", f"{name}.pem")

    def issue(self, name: str, *, days: int = 2, host: str = "127.0.0.1") -> None:
        """Issue a certificate for a device, a decoder or a broker of this name."""
        self._openssl("req", *self._new_key(name), "-out", f"{name}.csr")
        (self._folder / "extensions").write_text(f"subjectAltName=IP:{host}")
        signed_by = ("-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key", "-CAcreateserial")
        made = ("-days", str(days), "-extfile", "extensions", "-out", f"{name}.pem")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signed_by, *made)

    def _new_key(self, name: str) -> tuple[str, ...]:
        kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        return (*kind, "-subj", f"/CN={name}", "-keyout", f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        run = ["openssl", *arguments]
        subprocess.run(run, cwd=self._folder, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class SecureBroker:
    """A broker that runs: its folder, and its ports for certificates and for passwords."""

    folder: Path
    certificate_port: int
    password_port: int

    @property
    def url(self) -> str:
        """Where certificates are wanted."""
        return f"mqtts://127.0.0.1:{self.certificate_port}"

    @property
    def password_url(self) -> str:
        """Where passwords are wanted."""
        return f"mqtts://127.0.0.1:{self.password_port}"

    def credentials(self, name: str = "", *, ca: str = "ca") -> Credentials:
        """Return those of a device with a certificate; without a name, none of its own."""
        mine = (str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")) if name else ()
        return Credentials(str(self.folder / f"{ca}.pem"), *mine)

    def with_password(self, name: str, password: str | None = None) -> Credentials:
        """Return those of a device with a password."""
        file = self.folder / f"{name}.password"
        file.write_text((PASSWORDS[name] if password is None else password) + "\n")
        ca = str(self.folder / "ca.pem")
        return Credentials(ca, username=name, password_file=str(file))


@contextmanager
def secure_broker(folder: Path, *, roles: bool = False) -> Generator[SecureBroker, None, None]:
    """Run mosquitto as `deploy/mosquitto` says, with its files in `folder`.

    Args:
        roles: with the plugin that its configuration proposes, so that subscriptions are refused.
    """
    mosquitto = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
    for tool in (mosquitto, shutil.which("openssl"), shutil.which("mosquitto_passwd")):
        if tool is None:
            pytest.skip("mosquitto, mosquitto_passwd or openssl is not installed")
    assert mosquitto is not None
    authority = Authority(folder)
    for name in ("broker", "car", "evil", "decoder-1"):
        authority.issue(name)
    authority.issue("expired", days=-1)
    Authority(folder, "another-ca").issue("foreign")
    broker = SecureBroker(folder, free_port(), free_port())
    _install(broker, roles=roles)
    log = folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [mosquitto, "-c", str(folder / "mosquitto.conf")], stdout=output, stderr=output
        )
    try:
        until = time.monotonic() + 10
        while "running" not in (text := log.read_text()):
            assert child.poll() is None, text
            assert time.monotonic() < until, text
            time.sleep(0.01)
        yield broker
    finally:
        child.terminate()
        child.wait()


def _install(broker: SecureBroker, *, roles: bool) -> None:
    folder = broker.folder
    shutil.copy(DEPLOY / "acl", folder)
    (folder / "passwords").touch()
    for name, password in PASSWORDS.items():
        add = ["mosquitto_passwd", "-b", "passwords", name, password]
        subprocess.run(add, cwd=folder, check=True, capture_output=True)
    config = (DEPLOY / "mosquitto.conf").read_text().replace(INSTALLED, str(folder))
    for port, own in ((8883, broker.certificate_port), (8884, broker.password_port)):
        assert f"listener {port}\n" in config
        config = config.replace(f"listener {port}\n", f"listener {own} 127.0.0.1\n")
    if roles:
        (folder / "dynamic-security.json").write_text(json.dumps(_roles()))
        config = config.replace("#plugin", "plugin")
    config = f"log_type information\nlog_dest stderr\n{config}"
    if os.geteuid() == 0:  # else it changes user, and cannot read the folder
        config = f"user root\n{config}"
    (folder / "mosquitto.conf").write_text(config)


def _roles() -> dict[str, Any]:
    """Return the example's roles: the decoder's as it is, the device's for each of ours."""
    example: dict[str, Any] = json.loads((DEPLOY / "dynamic-security.json").read_text())
    for kind in ("clients", "roles"):
        device, decoder = example[kind]
        own = (json.dumps(device).replace("car-7", name) for name in ("car", "evil"))
        example[kind] = [decoder, *map(json.loads, own)]
    return example
