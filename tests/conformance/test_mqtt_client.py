"""The MQTT client against a broker that misbehaves: windows, refusals, silence, nonsense."""

import asyncio
import gc
import shutil
import socket
import ssl
import struct
import subprocess
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.errors import CapacityError, ConfigError, DeltarelayError, LinkError
from shared.transport import MAX_PENDING, mqtt_client
from shared.transport.mqtt_address import Broker, parse_broker
from shared.transport.mqtt_client import MqttClient
from shared.transport.mqtt_window import MAX_WINDOW
from tests.conformance.ends import open_fds, run, until
from tests.conformance.fake_broker import FakeBroker, fake_broker


class Client:
    """A client with what it saw."""

    def __init__(self, broker: Broker) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.lost: list[DeltarelayError | None] = []
        self.client = MqttClient(
            broker,
            "dr-f-car",
            will_topic="dr/v1/f/car/state",
            on_message=lambda topic, payload: self.messages.append((topic, payload)),
            on_lost=self.lost.append,
        )

    def publish(self, *numbers: int, provisional: bool = False) -> None:
        for n in numbers:
            self.client.publish("dr/v1/f/d/car/up", b"%d" % n, provisional=provisional)


@asynccontextmanager
async def connected(broker: FakeBroker) -> AsyncGenerator[Client, None]:
    """Connect a client to `broker`."""
    client = Client(broker.address)
    await client.client.connect()
    try:
        yield client
    finally:
        client.client.close()


def payloads(broker: FakeBroker, qos: int = 1) -> list[bytes]:
    return [payload for got, payload in broker.published if got == qos]


# --- the window


@pytest.mark.parametrize(("maximum", "window"), [(None, 8), (100, 8), (4, 2), (2, 1), (1, 1)])
def test_no_more_is_under_way_than_half_of_what_the_broker_allows(
    maximum: int | None, window: int
) -> None:
    async def test() -> None:
        async with fake_broker() as broker:
            broker.acknowledge = False
            if maximum is not None:
                broker.allow(maximum)
            async with connected(broker) as client:
                client.publish(*range(40))
                await until(lambda: len(broker.published) >= window)
                await asyncio.sleep(0.03)
                assert len(broker.unacknowledged) == window <= MAX_WINDOW
                while len(broker.published) < 40:
                    broker.puback()
                    done = len(broker.published)
                    await until(lambda done=done: len(broker.published) > done)  # type: ignore[misc]
                assert payloads(broker) == [b"%d" % n for n in range(40)]
                assert broker.most_unacknowledged == window

    run(test)


def test_provisional_messages_do_not_open_the_window() -> None:
    async def test() -> None:
        async with fake_broker() as broker:
            broker.acknowledge = False
            broker.allow(4)
            async with connected(broker) as client:
                for n in range(0, 20, 2):
                    client.publish(n)
                    client.publish(n + 1, provisional=True)
                await asyncio.sleep(0.05)
                assert payloads(broker) == [b"0", b"2"]
                assert payloads(broker, 0) == [b"1", b"3"], "none while others wait"
                assert broker.most_unacknowledged == 2

    run(test)


def test_what_the_socket_does_not_take_at_once_follows_when_it_does() -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            broker.reads.clear()
            client.publish(0)  # is still read
            await until(lambda: bool(broker.published))
            frames = [bytes([n]) * 262_144 for n in range(14)]
            for frame in frames:
                client.client.publish("dr/v1/f/d/car/up", frame)
            await asyncio.sleep(0.02)
            broker.reads.set()
            await until(lambda: len(broker.published) == 15)
            assert payloads(broker)[1:] == frames
            assert client.lost == []

    run(test)


def test_a_provisional_message_is_dropped_while_the_socket_is_full() -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            for _ in range(400):  # 25 MB at once
                client.client.publish("dr/v1/f/d/car/up", bytes(65_536), provisional=True)
            queued = sum(p["to_process"] for p in client.client._paho._out_packet)
            assert queued < 200_000
            client.publish(1)
            await until(lambda: b"1" in payloads(broker))
            assert client.lost == []

    run(test)


def test_too_much_waiting_for_the_broker_ends_the_connection() -> None:
    async def test() -> None:
        async with fake_broker() as broker:
            broker.acknowledge = False
            async with connected(broker) as client:
                for _ in range(MAX_PENDING // 65_536 + 20):
                    client.client.publish("dr/v1/f/d/car/up", bytes(65_536))
                (why,) = client.lost
                assert isinstance(why, CapacityError)
                client.publish(1)
                client.client.publish_state("dr/v1/f/car/state", b"x")

    run(test)


# --- connecting


def test_a_broker_that_is_absent_is_named() -> None:
    async def test() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            with pytest.raises(LinkError, match=f"mqtt://127.0.0.1:{port}: Connection refused"):
                await Client(Broker("127.0.0.1", port)).client.connect()
        with pytest.raises(LinkError, match=r"no\.such\.host\.invalid:1883: "):
            await Client(Broker("no.such.host.invalid")).client.connect()

    run(test)


def test_a_server_that_hangs_up_at_once_is_no_broker() -> None:
    async def test() -> None:
        async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(LinkError, match="closed"):
                await Client(Broker("127.0.0.1", port)).client.connect()

    run(test)


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_client, "CONNECT_TIMEOUT", 0.1)

    async def test() -> None:
        async with fake_broker() as broker:
            broker.connack = b""
            with pytest.raises(LinkError, match="no answer; is a broker running there"):
                await Client(broker.address).client.connect()

    run(test)


def test_a_broker_that_refuses_says_why() -> None:
    async def test() -> None:
        async with fake_broker() as broker:
            broker.connack = bytes((0x20, 3, 0, 0x87, 0))
            with pytest.raises(LinkError, match="refused: Not authorized"):
                await Client(broker.address).client.connect()

    run(test)


@pytest.mark.parametrize(
    "nonsense", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x20\x03\x00", b"\xf0\xff"]
)
def test_a_server_of_another_protocol_is_no_broker(
    monkeypatch: pytest.MonkeyPatch, nonsense: bytes
) -> None:
    monkeypatch.setattr(mqtt_client, "CONNECT_TIMEOUT", 0.1)

    async def test() -> None:
        async with fake_broker() as broker:
            broker.connack = nonsense
            with pytest.raises(LinkError):
                await Client(broker.address).client.connect()

    run(test)


def test_a_refused_subscription_is_named() -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            await client.client.subscribe(["dr/v1/f/car/down", "dr/v1/f/+/state"])
            broker.suback = 0x87
            with pytest.raises(LinkError, match=r"subscribing dr/v1/f/x was refused: Not auth"):
                await client.client.subscribe(["dr/v1/f/x"])
            with pytest.raises(LinkError, match="SUBACK for 1 of 2 topics"):
                await client.client.subscribe(["dr/v1/f/x", "another"])

    run(test)


def test_a_subscription_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            monkeypatch.setattr(mqtt_client, "CONNECT_TIMEOUT", 0.1)
            broker.suback = -1
            with pytest.raises(LinkError, match="no answer to SUBSCRIBE"):
                await client.client.subscribe(["dr/v1/f/x"])
            broker.hang_up_on_subscribe = True
            monkeypatch.setattr(mqtt_client, "CONNECT_TIMEOUT", 20.0)
            with pytest.raises(LinkError, match="closed"):
                await client.client.subscribe(["dr/v1/f/x"])
            with pytest.raises(LinkError, match="subscribe failed"):
                await client.client.subscribe(["dr/v1/f/x"])

    run(test, seconds=10)


def test_connecting_can_be_given_up_at_any_moment() -> None:
    async def test() -> None:
        async with fake_broker() as broker:
            broker.connack = b""
            before = open_fds()
            for seconds in (0.0, 0.001, 0.003, 0.01, 0.05):
                client = Client(broker.address)
                connecting = asyncio.ensure_future(client.client.connect())
                await asyncio.sleep(seconds)
                connecting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await connecting
                assert client.lost == []
            await asyncio.sleep(0.1)
            if broker._writer is not None:
                broker._writer.close()
            await asyncio.sleep(0.05)
            assert open_fds() <= before

    run(test)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of localhost with its key in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    made = tmp_path / "localhost.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    where = ["-keyout", str(made), "-out", str(tmp_path / "c.pem")]
    subprocess.run(
        [openssl, "req", "-x509", "-days", "2", *new_key, *subject, *where],
        check=True,
        capture_output=True,
    )
    made.write_text(made.read_text() + (tmp_path / "c.pem").read_text())
    return made


def test_frames_pass_through_tls_and_a_stranger_is_not_trusted(certificate: Path) -> None:
    async def test() -> None:
        served, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        served.load_cert_chain(certificate)
        trusting.load_verify_locations(certificate)
        async with fake_broker(served) as broker:
            client = Client(Broker("127.0.0.1", broker.port, tls=trusting))
            await client.client.connect()
            frames = [bytes([n]) * 100_000 for n in range(20)]
            for frame in frames:
                client.client.publish("dr/v1/f/d/car/up", frame)
                broker.deliver("dr/v1/f/car/down", frame[:100])
            await until(lambda: len(client.messages) == len(broker.published) == len(frames))
            assert payloads(broker) == frames
            client.client.close()
            stranger = Client(Broker("127.0.0.1", broker.port, tls=ssl.create_default_context()))
            with pytest.raises(LinkError, match="is not trusted: self-signed certificate"):
                await stranger.client.connect()

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # paho leaves such a socket to the collector
        run(test)
        gc.collect()


# --- losing the connection


def test_a_lost_connection_is_told_once_after_what_had_arrived() -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            for n in range(5):
                broker.deliver("dr/v1/f/car/down", b"%d" % n)
            broker.hang_up()
            await until(lambda: bool(client.lost))
            assert client.messages == [("dr/v1/f/car/down", b"%d" % n) for n in range(5)]
            assert isinstance(client.lost[0], LinkError)
            client.publish(1)
            client.client.close()
            assert len(client.lost) == 1

    run(test)


def test_a_broker_that_takes_its_leave_says_why() -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            broker.send(bytes((0xE0, 2, 0x8E, 0)))
            await until(lambda: bool(client.lost))
            assert "Session taken over" in str(client.lost[0])

    run(test)


@pytest.mark.parametrize(
    "nonsense", [b"\x30\x02\xff\xff", b"\x00\x00", b"\x30\x04\x00\x01\xff\x00"]
)
def test_malformed_packets_end_the_connection(nonsense: bytes) -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            broker.send(nonsense)
            await until(lambda: bool(client.lost))
            assert isinstance(client.lost[0], LinkError)

    run(test)


def test_a_reset_while_writing_is_noticed_at_once() -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            assert broker._writer is not None
            end = broker._writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            broker._writer.transport.abort()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for n in range(50):  # without a turn of the loop: only writing can tell
                client.publish(n, provisional=True)
            assert [type(why) for why in client.lost] == [LinkError]

    run(test)


def test_a_silent_broker_is_noticed_by_its_missing_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_client, "KEEPALIVE", 1)

    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            broker._take = lambda *_: None  # type: ignore[method-assign] # as a frozen one
            await until(lambda: bool(client.lost))
            assert isinstance(client.lost[0], LinkError)

    run(test)


def test_leaving_publishes_the_will_even_on_purpose() -> None:
    async def test() -> None:
        async with fake_broker() as broker:
            async with connected(broker) as client:
                client.client.publish_state("dr/v1/f/car/state", b"here")
                await until(lambda: broker.retained == [b"here"])
            await until(lambda: bool(broker.reasons))
            assert broker.reasons == [0x04], "disconnect with will message"
            assert client.lost == [None]

    run(test)


def test_nagle_is_off() -> None:
    async def test() -> None:
        async with fake_broker() as broker, connected(broker) as client:
            sock = client.client._socket
            assert sock is not None
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

    run(test)


# --- addresses


@pytest.mark.parametrize(
    ("url", "name", "user", "password"),
    [
        ("mqtt://broker", "mqtt://broker:1883", None, None),
        ("mqtts://broker", "mqtts://broker:8883", None, None),
        ("mqtt://u%40x:p%2Fw@h:99", "mqtt://h:99", "u@x", "p/w"),
        ("mqtt://[::1]:5", "mqtt://::1:5", None, None),
    ],
)
def test_an_address_is_read(url: str, name: str, user: str | None, password: str | None) -> None:
    broker = parse_broker(url)
    assert (broker.name, broker.username, broker.password) == (name, user, password)
    assert password is None or password not in repr(broker)


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "mqtt://",
        "mqtt://:1883",
        "h:1883",
        "mqtt://h:99999",
        "mqtt://[::1",
        "",
        "mqtt://h:x",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_broker(url)


def test_a_refused_address_does_not_show_the_password() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker("mqtt://me:se@cret@host:99999")
    assert "cret" not in str(caught.value)
    assert "***@host:99999" in str(caught.value)


def test_credentials_and_encryption_are_passed_on() -> None:
    async def test() -> None:
        secure = Client(parse_broker("mqtts://me:secret@localhost"))
        assert secure.client._paho._ssl
        assert secure.client._paho._username == b"me"

    run(test)
