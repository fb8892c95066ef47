"""`deltarelay doctor`: looks at this machine and says what to do."""

import asyncio
import importlib.util
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from shared.commands import parser, print_json, start_logging
from shared.digest import sha256_file
from shared.errors import DeltarelayError
from shared.models import known_models, model_path
from shared.paths import default_socket
from shared.transport.segment import SIZE, create_memory

State = Literal["ok", "warning", "problem"]
_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]!![/yellow]", "problem": "[red]no[/red]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a look found, and what to do about it."""

    what: str
    state: State
    text: str
    advice: str = ""


def doctor(arguments: Sequence[str]) -> int:
    """Print findings; exit status 1 if something will not work."""
    ask = parser("doctor", "Look at this machine and say what to do.", reports=True)
    ask.add_argument("--broker", default="127.0.0.1:1883", help="host:port of an MQTT broker")
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    looks: list[Callable[[], Finding]] = [
        look_at_processor,
        look_at_memory,
        look_at_shared_memory,
        look_at_socket_folder,
        lambda: look_at_broker(options.broker),
        look_at_models,
        *(lambda e=extra, m=module: look_at_extra(e, m) for extra, module in _EXTRAS.items()),
    ]
    findings = [look() for look in looks]
    if options.json:
        rows = [
            {"what": f.what, "state": f.state, "text": f.text, "advice": f.advice} for f in findings
        ]
        print_json({"findings": rows})
    else:
        _print(findings)
    return int(any(finding.state == "problem" for finding in findings))


_EXTRAS = {
    "edge": "tokenizers",
    "cloud": "torch",
    "speech": "moonshine_voice",
    "simulations": "iotcore",
}


def look_at_processor() -> Finding:
    """Which vector instructions there are: they decide how fast a decoder is."""
    flags = set(_first_line("/proc/cpuinfo", "flags").split())
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    found = [flag for flag in known if flag in flags]
    text = f"{os.cpu_count()} cores, {', '.join(found) or 'no AVX2'}"
    if "avx2" in flags or os.uname().machine != "x86_64":
        return Finding("processor", "ok", text)
    return Finding(
        "processor", "warning", text, "a decoder will be slow here; an edge agent is fine"
    )


def look_at_memory() -> Finding:
    """A decoder of the default model takes about 2.5 GB with its cache."""
    available = int(_first_line("/proc/meminfo", "MemAvailable").split()[0]) / 1e6
    text = f"{available:.1f} GB available"
    if available >= 3:
        return Finding("memory", "ok", text)
    advice = "run the decoder with --set cache_mb=256, or on another machine"
    return Finding("memory", "warning" if available >= 1.5 else "problem", text, advice)


def look_at_shared_memory() -> Finding:
    """Whether a segment can be made."""
    free = shutil.disk_usage("/dev/shm").free
    try:
        os.close(create_memory(sealed=False))
    except DeltarelayError as error:
        return Finding("shared memory", "problem", str(error), "free space in /dev/shm")
    return Finding("shared memory", "ok", f"{free // SIZE} connections fit into /dev/shm")


def look_at_socket_folder() -> Finding:
    """Whether a decoder listens at the default place, or could."""
    path = default_socket()
    if path.parent.stat().st_mode & 0o077:
        advice = f"chmod 700 {path.parent}"
        return Finding("socket", "warning", f"{path.parent} is open to other users", advice)
    if not path.exists():
        return Finding("socket", "ok", f"no decoder at {path}", "start one: deltarelay cloud")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return Finding("socket", "warning", f"{path} is stale", "the next decoder replaces it")
    return Finding("socket", "ok", f"a decoder listens at {path}")


def look_at_broker(address: str) -> Finding:
    """Whether an MQTT 5 broker answers."""
    host, _, port = address.rpartition(":")
    program = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")
    have = f"mosquitto is installed ({program})" if program else "mosquitto is not installed"
    try:
        asyncio.run(_greet_broker(host or "127.0.0.1", int(port)))
    except (DeltarelayError, ValueError):
        text = f"no broker at {address}; {have}"
        advice = "only needed between hosts: apt install mosquitto; the demo brings its own"
        return Finding("broker", "warning", text, advice)
    return Finding("broker", "ok", f"an MQTT 5 broker answers at {address}")


async def _greet_broker(host: str, port: int) -> None:
    from shared.transport.mqtt_address import Broker
    from shared.transport.mqtt_client import MqttClient

    client = MqttClient(
        Broker(host, port),
        f"dr-doctor-{os.getpid()}",
        will_topic=f"dr/v1/doctor/{os.getpid()}/state",
        on_message=lambda _topic, _payload: None,
        on_lost=lambda _reason: None,
    )
    await client.connect()
    client.close()


def look_at_models() -> Finding:
    """Whether the default model is there, and what was published."""
    model = known_models()[0]
    try:
        path = Path(model_path(model.name))
    except DeltarelayError as error:
        advice = f"deltarelay models pull {model.name}"
        return Finding("model", "problem", str(error), advice)
    if sha256_file(path) != model.sha256:
        advice = f"rm {path} && deltarelay models pull {model.name}"
        return Finding("model", "problem", f"{path} is damaged", advice)
    return Finding("model", "ok", f"{model.name}, sha256 {model.sha256[:12]}…")


def look_at_extra(extra: str, module: str) -> Finding:
    """Whether an extra is installed."""
    if importlib.util.find_spec(module) is not None:
        return Finding(f"extra {extra}", "ok", "installed")
    advice = f"pip install 'deltarelay[{extra}]'"
    return Finding(f"extra {extra}", "warning", f"{module} is not installed", advice)


def _first_line(path: str, key: str) -> str:
    with open(path) as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith(key)), "")


def _print(findings: Sequence[Finding]) -> None:
    console = Console()
    for finding in findings:
        console.print(f"{_MARKS[finding.state]}  [bold]{finding.what}[/bold]: {finding.text}")
        if finding.advice:
            console.print(f"      → {finding.advice}")
