"""Real processes at INFO: neither what a driver says nor any secret is logged or printed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import pytest

from cloud.access.registry import Registry
from shared.child import START_TIMEOUT
from shared.transport.credentials import PASSWORD
from simulations.broker import free_port
from tests.brains import write_model
from tests.conformance.secure_broker import PASSWORDS, SecureBroker, secure_broker

pytestmark = pytest.mark.mqtt
WORD = "Xanthippe"
"""What the driver says."""
NOT_A_KEY = "dr_a-key-that-nobody-has"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecureBroker, None, None]:
    with secure_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@contextmanager
def decoder(broker: SecureBroker, folder: Path, http: int) -> Generator[Path, None, None]:
    """Run a decoder that logs into the file it yields, until it is told to end."""
    model = write_model(Path(mkdtemp(prefix="deltarelay-test-")) / "model")
    url = broker.password_url.replace("://", f"://decoder-1:{PASSWORDS['decoder-1']}@")
    command = [sys.executable, "-m", "cloud", "--model", str(model), "--log-level", "info"]
    command += ["--listen", url.replace(" ", "%20"), "--http", f"127.0.0.1:{http}"]
    for change in (
        *("context=512", "cache_mb=8", "threads=1", "name=decoder-1", f"state={folder}"),
        f"credentials.ca={broker.folder}/ca.pem",
        "admission.require_devices=true",
    ):
        command += ["--set", change]
    log = folder / "decoder.log"
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until = time.monotonic() + START_TIMEOUT
        while "serves" not in log.read_text():
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield log
    finally:
        child.terminate()
        child.wait()


def edge(broker: SecureBroker, device: str, password: str) -> subprocess.CompletedProcess[str]:
    """Run an agent whose driver says the word, twice."""
    command = [sys.executable, "-m", "edge", "--to", broker.password_url, "--log-level", "info"]
    for change in (
        *(f"device={device}", "credentials.username=car", "max_tokens=4", 'decoder="decoder-1"'),
        f"credentials.ca={broker.folder}/ca.pem",
    ):
        command += ["--set", change]
    said = f"Call {WORD}\n\n{WORD} once more\n\n"
    environment = {**os.environ, PASSWORD: password}
    return subprocess.run(
        command, input=said, env=environment, capture_output=True, text=True, check=False
    )


def talk_over_http(port: int, key: str) -> list[int]:
    """Have a chat about the word, also with a wrong key and wrong fields; return its ids."""
    address = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=address, timeout=30) as client:
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": WORD}], "max_tokens": 4}
        for text, more, status in (
            (key, {}, 200),
            (NOT_A_KEY, {}, 401),
            (key, {"temperature": 99}, 400),
            (key, {"no_such_field": WORD}, 400),
        ):
            headers = {"authorization": f"Bearer {text}"}
            model = client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()
            body = {"model": model["data"][0]["id"], **chat, **more}
            answer = client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text
            assert text not in answer.text
        bearer = {"authorization": f"Bearer {key}"}
        ids = client.post("/tokenize", json={"prompt": WORD}, headers=bearer).json()["tokens"]
    assert len(ids) >= 2
    return list(ids)


def test_words_ids_and_secrets_are_neither_logged_nor_printed(
    tmp_path: Path, broker: SecureBroker
) -> None:
    with Registry(tmp_path) as registry:
        key, text = registry.add_key("web", "default", None)
        registry.add_device("car")
    http = free_port()
    with decoder(broker, tmp_path, http) as log:
        good = edge(broker, "car", PASSWORDS["car"])
        bad = edge(broker, "car", "a wrong password")
        ids = talk_over_http(http, text)
        with Registry(tmp_path) as registry:
            registry.revoke_key(key.id)
            registry.revoke_device("car")
        time.sleep(0.6)
        revoked = edge(broker, "car", PASSWORDS["car"])
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("first token after") == 2
    assert bad.returncode == 69
    assert "check user name and password" in bad.stderr
    assert revoked.returncode == 77
    assert "device car was revoked" in revoked.stderr
    heard = log.read_text() + "".join(one.stdout + one.stderr for one in (good, bad, revoked))
    assert "device car, epoch 1" in heard, "it was logged at INFO"
    secrets = [text, NOT_A_KEY, "a wrong password", *PASSWORDS.values()]
    secrets += [secret.replace(" ", "%20") for secret in secrets]
    for secret in (*secrets, WORD, json.dumps(ids)[1:-1], ",".join(map(str, ids))):
        assert secret not in heard
