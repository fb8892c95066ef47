"""A real MQTT 5 broker on loopback for demos, benches and tests: mosquitto, else the embedded one.

The broker is a child process: reaped by the context manager, killed by the kernel if we die first.
`python -m simulations.broker` is that child; nothing else runs it.
"""

import ctypes
import importlib.util
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from typing import Literal, NoReturn

from shared.errors import InputError, LinkError

Kind = Literal["mosquitto", "embedded"]

HOST = "127.0.0.1"
START_SECONDS = 10.0
"""How long a broker may take until it answers CONNECT."""
STOP_SECONDS = 3.0
"""How long a broker may take to end after SIGTERM, before SIGKILL."""
POLL_SECONDS = 0.01
PORTS = range(15_000, 32_000)
"""Below Linux's ephemeral ports: while the broker is down, a client that retries cannot be given
this very port as its own end and so connect to itself, and nobody takes it by accident."""
MAX_PACKET = 1 << 20
"""Bytes; four times our longest frame."""

# mosquitto's own default of 1,000 queued messages drops silently within a burst. As root it would
# change user, which clears the request to die with the parent: hence `user`.
_MOSQUITTO_CONF = """\
listener {port} {host}
allow_anonymous true
set_tcp_nodelay true
persistence false
max_inflight_messages 100
max_queued_messages 20000
max_queued_bytes 67108864
max_packet_size {max_packet}
sys_interval 0
log_type error
log_type warning
{user}
"""

# rumqttd keeps what one filter received in a ring of segments and never answers v5 on a [v4]
# listener. No Receive Maximum is announced; `max_inflight_count` is what it sends unacknowledged.
_EMBEDDED_TOML = """\
id = 0
[router]
id = 0
max_connections = 10000
max_outgoing_packet_count = 200
max_segment_size = 8388608
max_segment_count = 4
[v5.1]
name = "v5"
listen = "{host}:{port}"
next_connection_delay_ms = 1
[v5.1.connections]
connection_timeout_ms = 5000
max_payload_size = {max_packet}
max_inflight_count = 100
"""


class Broker:
    """A broker on `host:port`; `name` says which one. Made by `open_broker` only."""

    def __init__(self, host: str, port: int, name: Kind, *, program: str, folder: Path) -> None:
        self.host, self.port, self.name = host, port, name
        config = folder / "broker.toml"  # rumqttd reads the kind of file from its name
        self._command = [program, str(config)]
        self._log, self._ready = folder / "broker.log", folder / "ready"
        self._child: subprocess.Popen[bytes] | None = None
        template = _MOSQUITTO_CONF if name == "mosquitto" else _EMBEDDED_TOML
        user = "user root" if os.geteuid() == 0 else ""
        config.write_text(
            template.format(host=host, port=port, max_packet=MAX_PACKET, user=user), "utf-8"
        )

    @property
    def pid(self) -> int | None:
        """Process id of the running broker; None while it is stopped or if it died."""
        return self._child.pid if self._child and self._child.poll() is None else None

    def start(self) -> None:
        """Start, or start again on the same port, and wait until the broker answers CONNECT.

        Nothing is kept from before: no session, no retained message. On Linux the broker also
        ends with the thread that called this, so call it from one that lives long enough.

        Raises:
            LinkError: the port is taken, the broker died (with the end of its log) or stays mute.
        """
        if self.pid is not None:
            return
        if not _is_free(self.port):
            raise LinkError(f"port {self.port} of {self.host} is taken: free it or pass port=None")
        self._ready.unlink(missing_ok=True)
        paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-P", "-m", "simulations.broker", str(os.getpid())]
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [*command, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                start_new_session=True,  # Ctrl-C in a terminal is ours to handle, not the broker's
            )
        try:
            self._wait_ready(self._child, time.monotonic() + START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the broker and reap it; its port is free afterwards. Twice is once."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def log_tail(self, characters: int = 800) -> str:
        """The end of what the broker wrote, or a remark that it wrote nothing."""
        text = self._log.read_text("utf-8", "replace").strip() if self._log.exists() else ""
        return text[-characters:] or "(its log is empty)"

    def _wait_ready(self, child: subprocess.Popen[bytes], deadline: float) -> None:
        place = f"{self.name} broker on {self.host}:{self.port}"
        while time.monotonic() < deadline:
            if child.poll() is not None:
                raise LinkError(f"{place} ended with {child.returncode}: {self.log_tail()}")
            if (self.name == "mosquitto" or self._ready.exists()) and answers_connect(self.port):
                return
            time.sleep(POLL_SECONDS)
        raise LinkError(f"{place} is mute after {START_SECONDS:g} s: {self.log_tail()}")


@contextmanager
def open_broker(
    port: int | None = None, *, prefer: Literal["auto", "mosquitto", "embedded"] = "auto"
) -> Generator[Broker, None, None]:
    """Open a broker on loopback, MQTT 5, anyone may connect, nothing on disk.

    Args:
        port: where it listens; None picks a free one.
        prefer: "auto" takes mosquitto where it is installed, else the embedded broker.

    Raises:
        InputError: the port is none.
        LinkError: no such broker is installed, the port is taken, or the broker did not come up.
    """
    if port is not None and not 1 <= port <= 65_535:
        raise InputError(f"port {port} is outside 1..65535")
    name, program = _find_program(prefer)
    with TemporaryDirectory(prefix="deltarelay-broker-") as folder:
        chosen = free_port() if port is None else port
        broker = Broker(HOST, chosen, name, program=program, folder=Path(folder))
        try:
            broker.start()
            yield broker
        finally:
            broker.stop()


def answers_connect(port: int, *, timeout: float = 0.5) -> bool:
    """Whether a broker on loopback accepts an MQTT 5 CONNECT within `timeout` seconds."""
    client = b"deltarelay-probe"
    body = b"\0\4MQTT\5\2\0\x0a\0" + len(client).to_bytes(2, "big") + client
    try:
        with socket.create_connection((HOST, port), timeout) as link:
            link.settimeout(timeout)
            link.sendall(bytes([0x10, len(body)]) + body)
            reply = link.recv(256)
            link.sendall(b"\xe0\0")  # DISCONNECT
    except OSError:
        return False
    return len(reply) > 3 and reply[0] == 0x20 and reply[3] == 0


def _find_program(prefer: Literal["auto", "mosquitto", "embedded"]) -> tuple[Kind, str]:
    mosquitto = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
    if prefer != "embedded" and mosquitto:
        return "mosquitto", mosquitto
    if prefer != "mosquitto" and importlib.util.find_spec("iotcore"):
        return "embedded", "iotcore"
    raise LinkError(
        f"no MQTT broker for prefer={prefer!r}: install mosquitto (apt install mosquitto) "
        "or the embedded one (pip install iotcore==0.4.0)"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port nobody listens on; system randomness, so that parallel runs rarely meet."""
    for port in SystemRandom().sample(PORTS, 50):
        if _is_free(port):
            return port
    raise LinkError(f"no free port among 50 tried in {PORTS.start}..{PORTS.stop - 1}")


def _run_child(parent: int, program: str, config: str) -> NoReturn:
    """Ask the kernel to die with `parent`, then become the broker.

    Not in `preexec_fn`: that is unsafe in a process with threads (torch, paho).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent died before its broker started")
    if program != "iotcore":
        os.execv(program, [program, "-c", config])
    _run_embedded(config)


def _run_embedded(config: str) -> NoReturn:
    from iotcore.iotcore import IotCoreBroker

    logging.basicConfig()
    # Its tracing reports every packet as an error.
    logging.getLogger("rumqttd").setLevel(logging.CRITICAL)
    broker = IotCoreBroker(config_path=config)
    broker.check_ports()
    broker.start()
    while sys.platform == "linux" and not set_nodelay_on_listeners():
        time.sleep(0.002)
    (Path(config).parent / "ready").touch()
    while True:
        time.sleep(3600)


def set_nodelay_on_listeners() -> bool:
    """Set TCP_NODELAY on this process's listeners; Linux lets accepted sockets inherit it.

    rumqttd never sets it: with traffic both ways 10 % of the messages then wait 16 to 44 ms for a
    delayed ACK (measured; 1 ms with it).

    Returns:
        Whether there was a listener.
    """
    found = False
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # the descriptor of the listing itself
            continue
        with end:
            if end.family == socket.AF_INET and end.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found = True
    return found


if __name__ == "__main__":
    _run_child(int(sys.argv[1]), sys.argv[2], sys.argv[3])
