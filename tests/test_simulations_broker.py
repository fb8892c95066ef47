"""Both brokers, for real: what our link asks of MQTT 5, restart, and no orphan left behind."""

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from shared.errors import InputError, LinkError
from simulations.broker import (
    MAX_PACKET,
    Broker,
    answers_connect,
    open_broker,
    set_nodelay_on_listeners,
)

Received = tuple[str, bytes, bool]
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.mqtt


@pytest.fixture(params=["mosquitto", "embedded"])
def broker(request: pytest.FixtureRequest) -> Generator[Broker, None, None]:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(open_broker(prefer=request.param))
        except LinkError as error:
            if "no MQTT broker" in str(error):
                pytest.skip(f"the {request.param} broker is not installed")
            raise
        assert opened.name == request.param
        yield opened


def wait(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


class Peer:
    """A paho client with what it received in a queue."""

    def __init__(self, client_id: str) -> None:
        self.client = Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=MQTTv5, reconnect_on_failure=False
        )
        self.received: queue.Queue[Received] = queue.Queue()
        self.granted: queue.Queue[int] = queue.Queue()
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe

    def _on_message(self, _client: Client, _data: object, message: Any) -> None:
        self.received.put((message.topic, message.payload, message.retain))

    def _on_subscribe(self, _client: Client, _data: object, _mid: int, codes: Any, _p: Any) -> None:
        self.granted.put(codes[0].value)

    def subscribe(self, topics: str) -> None:
        self.client.subscribe(topics, qos=1)
        assert self.granted.get(timeout=5) == 1

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish with QoS 1 and wait for the broker's acknowledgement."""
        self.client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(5)

    def next(self) -> Received:
        return self.received.get(timeout=5)


@contextmanager
def connect(
    broker: Broker, client_id: str, *, will: str | None = None, keeps: bool = False
) -> Generator[Peer, None, None]:
    peer = Peer(client_id)
    if will:
        peer.client.will_set(will, b"gone", qos=1, retain=True)
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call] # paho's is untyped
    properties.SessionExpiryInterval = 60 if keeps else 0
    peer.client.connect(broker.host, broker.port, clean_start=not keeps, properties=properties)
    peer.client.loop_start()
    try:
        assert wait(peer.client.is_connected)
        yield peer
    finally:
        peer.client.disconnect()
        peer.client.loop_stop()


def test_it_delivers_with_wildcards_in_order_and_acknowledges(broker: Broker) -> None:
    with connect(broker, "up") as device, connect(broker, "down") as decoder:
        decoder.subscribe("dr/v1/fleet/+/up")
        for index in range(50):
            device.publish("dr/v1/fleet/car/up", b"%d" % index)
        device.publish("dr/v1/fleet/car/down", b"not for us")
        device.publish("dr/v1/fleet/van/up", bytes(MAX_PACKET // 2))
        got = [decoder.next() for _ in range(51)]
    assert [payload for _, payload, _ in got[:50]] == [b"%d" % index for index in range(50)]
    assert got[50][0] == "dr/v1/fleet/van/up"
    assert len(got[50][1]) == MAX_PACKET // 2


def test_it_retains_the_last_state_and_forgets_it_when_emptied(broker: Broker) -> None:
    with connect(broker, "a") as first, connect(broker, "b") as second:
        first.publish("state/a", b"old", retain=True)
        first.publish("state/a", b"new", retain=True)
        second.subscribe("state/+")
        assert second.next() == ("state/a", b"new", True)
        first.publish("state/a", b"", retain=True)
        assert second.next() == ("state/a", b"", False)
    with connect(broker, "c") as third:
        third.subscribe("#")
        third.publish("probe", b"only this")
        assert third.next() == ("probe", b"only this", False)


def test_the_will_of_a_lost_client_is_published_and_retained(broker: Broker) -> None:
    with connect(broker, "witness") as witness:
        witness.subscribe("state/#")
        with connect(broker, "polite", will="state/polite"):
            pass
        with connect(broker, "lost", will="state/lost") as lost:
            end = lost.client.socket()
            assert isinstance(end, socket.socket)
            end.shutdown(socket.SHUT_RDWR)
            assert witness.next() == ("state/lost", b"gone", False)
    with connect(broker, "late") as late:
        late.subscribe("state/#")
        assert late.next() == ("state/lost", b"gone", True)


def test_it_keeps_what_comes_while_a_session_is_offline(broker: Broker) -> None:
    with connect(broker, "sleeper", keeps=True) as sleeper:
        sleeper.subscribe("to/sleeper")
    with connect(broker, "sender") as sender:
        infos = [sender.client.publish("to/sleeper", b"%d" % index, 1) for index in range(1500)]
        infos[-1].wait_for_publish(10)
    with connect(broker, "sleeper", keeps=True) as sleeper:
        got = [sleeper.next()[1] for _ in infos]
    assert got == [b"%d" % index for index in range(1500)]


def test_it_starts_again_empty_on_the_same_port(broker: Broker) -> None:
    with connect(broker, "before") as before:
        before.publish("state/a", b"old", retain=True)
    port, pid = broker.port, broker.pid
    broker.stop()
    broker.stop()
    assert broker.pid is None
    assert not answers_connect(port)
    broker.start()
    broker.start()
    assert (broker.port, broker.pid is None) == (port, False)
    assert broker.pid != pid
    with connect(broker, "after") as after:
        after.subscribe("#")
        after.publish("probe", b"only this")
        assert after.next() == ("probe", b"only this", False)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux inherits TCP_NODELAY")
def test_what_a_listener_accepts_sends_small_messages_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert set_nodelay_on_listeners()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_it_is_reaped_and_its_folder_removed(broker: Broker) -> None:
    with open_broker(prefer=broker.name) as other:
        assert other.port != broker.port
        pid = other.pid
        assert pid is not None
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        folder = next(Path(part.decode()).parent for part in command if b"broker.toml" in part)
        assert folder.is_dir()
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


def test_it_dies_with_a_parent_that_is_killed(broker: Broker, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from simulations.broker import open_broker\n"
        "with open_broker(prefer=sys.argv[1]) as broker:\n"
        "    print(broker.pid, broker.port, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, broker.name],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to remove its folder
    ) as parent:
        assert parent.stdout is not None
        _, port = map(int, parent.stdout.readline().split())
        assert answers_connect(port)
        parent.kill()
    assert wait(lambda: not answers_connect(port, timeout=0.1))


def test_a_taken_port_is_refused_by_number(broker: Broker) -> None:
    with pytest.raises(LinkError, match=f"port {broker.port} of 127.0.0.1 is taken"):
        open_broker(broker.port, prefer=broker.name).__enter__()


def test_a_broker_that_dies_is_reported_with_the_end_of_its_log(broker: Broker) -> None:
    command = Path(f"/proc/{broker.pid}/cmdline").read_bytes().split(b"\0")
    config = next(Path(part.decode()) for part in command if b"broker.toml" in part)
    broker.stop()
    config.write_text("nonsense\n", "utf-8")
    with pytest.raises(LinkError, match=r"ended with [13]: (?s:.*)(nonsense|broker config)"):
        broker.start()
    assert broker.pid is None


def test_a_broker_that_crashed_starts_again(broker: Broker) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)
    assert wait(lambda: broker.pid is None)
    broker.start()
    assert answers_connect(broker.port)


def test_an_impossible_port_is_refused() -> None:
    with pytest.raises(InputError, match=r"port 70000 is outside 1\.\.65535"):
        open_broker(70_000).__enter__()


def test_without_any_broker_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_options: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(LinkError, match=r"apt install mosquitto.*pip install iotcore"):
        open_broker().__enter__()
