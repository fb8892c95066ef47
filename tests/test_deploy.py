"""The files in `deploy/` are what they say: settings that load, units that systemd accepts."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cloud.access.admission import Admission
from cloud.settings import DecoderSettings
from edge.__main__ import EdgeSettings
from shared.config import load_settings
from shared.transport.mqtt_topics import check_name

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())


def test_the_example_settings_load_and_name_no_secret() -> None:
    decoder = load_settings(DecoderSettings, DEPLOY / "cloud.toml")
    vehicle = load_settings(EdgeSettings, DEPLOY / "edge.toml")
    assert decoder.admission.require_devices
    Admission(decoder.admission)
    assert vehicle.to in decoder.listen
    assert vehicle.fleet == decoder.fleet
    assert f"user {decoder.name}\n" in (DEPLOY / "mosquitto" / "acl").read_text()
    check_name("device", vehicle.device)
    for settings in (decoder, vehicle):
        assert settings.credentials.certificate
        assert not settings.credentials.key
        assert not settings.credentials.password_file


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    copies = []
    for unit in UNITS:
        text = re.sub("(?m)^ExecStart=[^ ]+", "ExecStart=/bin/true", unit.read_text())
        copies.append(tmp_path / unit.name)
        copies[-1].write_text(re.sub("(?m)^(User|SocketUser)=.*", r"\1=root", text))
    done = subprocess.run(
        [analyze, "verify", *map(str, copies)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize("unit", [u for u in UNITS if u.suffix == ".service"], ids=lambda u: u.name)
def test_services_run_as_nobody_special_and_get_secrets_as_credentials(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    for wanted in (
        "User=deltarelay",
        "NoNewPrivileges=true",
        "ProtectSystem=strict",
        "StateDirectory=deltarelay",
        "Restart=on-failure",
        "CapabilityBoundingSet=",
    ):
        assert wanted in lines
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    (secret,) = [line for line in lines if line.startswith("LoadCredential=")]
    assert "--set credentials.key=%d/key" in start
    assert secret.startswith("LoadCredential=key:/etc/deltarelay/")


def test_images_run_as_a_user_of_their_own() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    parts = re.split(r"(?m)^FROM ", text)[1:]
    stages = {re.findall(r"AS (\w+)", part)[0]: part for part in parts}
    assert set(stages) == {"base", "edge", "decoder"}
    assert stages["base"].startswith("python:3.11-slim-bookworm AS base")
    for name in ("edge", "decoder"):
        assert stages[name].index("pip install") < stages[name].index("USER deltarelay")
        assert "USER root" not in stages[name]
    copied = {words for line in re.findall(r"(?m)^COPY (.*) \S+$", text) for words in line.split()}
    missing = [name for name in copied if not (DEPLOY.parent / name).exists()]
    assert missing == []
