"""One MQTT 5 connection on the event loop: paho's packets, our sending window, our sockets' settings.

paho is used without its thread, its queue and its reconnecting: after a break its backlog would burst past
every window, ignore the server's receive maximum and overtake what the relay has to say first. Here a
connection is used once; the owner makes the next one, and the session replays what counts.
"""

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from shared.errors import CapacityError, ConfigError, DeltarelayError, LinkError
from shared.transport import MAX_PENDING

KEEPALIVE = 15
"""Seconds; a silent broker is noticed after one and a half of them."""
CONNECT_TIMEOUT = 5.0
MAX_WINDOW = 8
"""QoS 1 messages under way at once, and at most half of what the broker allows."""
_RECEIVE_MAXIMUM = 64


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
        ConfigError: it is not such a URL.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"{url}: the port must be 1..65535") from None
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname:
        raise ConfigError(f"{url}: expected mqtt://host:port or mqtts://host:port")
    secure = parts.scheme == "mqtts"
    return Broker(
        parts.hostname,
        port or (8883 if secure else 1883),
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        ssl.create_default_context() if secure else None,
    )


class MqttClient:
    """One connection to a broker; `on_message(topic, payload)` and `on_lost(why)` run in the event loop."""

    def __init__(
        self,
        broker: Broker,
        client_id: str,
        *,
        will_topic: str,
        on_message: Callable[[str, bytes], None],
        on_lost: Callable[[DeltarelayError | None], None],
    ) -> None:
        self.broker = broker
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._window = 1
        self._under_way = 0
        self._pending: deque[tuple[str, bytes, bool]] = deque()
        self._pending_bytes = 0
        self._inbox: list[tuple[str, bytes]] = []
        self._answers: dict[int, asyncio.Future[list[ReasonCode]]] = {}
        self._connack: asyncio.Future[None] = self._loop.create_future()
        self._socket: socket.socket | None = None
        self._housekeeping: asyncio.TimerHandle | None = None
        self._open = False
        self._paho = client = Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion.MQTTv5,
            reconnect_on_failure=False,
        )
        client.will_set(will_topic, b"", qos=1, retain=True)
        client.max_inflight_messages_set(2 * MAX_WINDOW)
        if broker.username is not None:
            client.username_pw_set(broker.username, broker.password)
        if broker.tls is not None:
            client.tls_set_context(broker.tls)
        client.on_connect = self._connected
        client.on_message = self._message
        client.on_publish = self._published
        client.on_subscribe = self._subscribed
        client.on_disconnect = self._disconnected
        client.on_socket_close = lambda *_: self._forget_socket()

    async def connect(self) -> None:
        """Open the connection.

        Raises:
            LinkError: the broker is absent, silent, or refuses.
        """
        properties = Properties(PacketTypes.CONNECT)
        properties.ReceiveMaximum = _RECEIVE_MAXIMUM
        name = self.broker.name
        try:
            code = await asyncio.to_thread(
                self._paho.connect,
                self.broker.host,
                self.broker.port,
                KEEPALIVE,
                clean_start=True,
                properties=properties,
            )
            sock = self._paho.socket()
            if code != MQTTErrorCode.MQTT_ERR_SUCCESS or not isinstance(sock, socket.socket):
                raise LinkError(f"{name}: connect failed ({code})")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket, self._open = sock, True
            self._loop.add_reader(sock, self._readable)
            self._flush_socket()
            await asyncio.wait_for(self._connack, CONNECT_TIMEOUT)
        except (OSError, TimeoutError) as error:
            self._drop()
            why = getattr(error, "strerror", None) or str(error) or "no answer"
            raise LinkError(
                f"{name}: {why}; is a broker running there? (`deltarelay doctor` looks)"
            ) from None
        except BaseException:
            self._drop()
            raise
        self._tick()

    async def subscribe(self, topics: list[str]) -> None:
        """Subscribe at QoS 1.

        Raises:
            LinkError: the broker refuses one of them, or does not answer.
        """
        code, mid = self._paho.subscribe([(topic, 1) for topic in topics])
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or mid is None:
            raise LinkError(f"{self.broker.name}: subscribe failed ({code})")
        answer = self._answers[mid] = self._loop.create_future()
        self._flush_socket()
        try:
            reasons = await asyncio.wait_for(answer, CONNECT_TIMEOUT)
        except TimeoutError:
            raise LinkError(f"{self.broker.name}: no answer to SUBSCRIBE") from None
        for topic, reason in zip(topics, reasons, strict=True):
            if reason.is_failure:
                raise LinkError(f"{self.broker.name}: subscribing {topic} was refused: {reason}")

    def publish(self, topic: str, payload: bytes, *, provisional: bool = False) -> None:
        """Send at QoS 1 within the window and in order, or at once at QoS 0 if `provisional`."""
        if not self._open:
            return
        if provisional:
            if not self._pending:
                self._paho.publish(topic, payload, qos=0)
                self._flush_socket()
            return
        self._pending.append((topic, payload, False))
        self._pending_bytes += len(payload)
        if self._pending_bytes > MAX_PENDING:
            self._lose(
                CapacityError(
                    f"{self.broker.name}: {self._pending_bytes} bytes wait for the broker"
                )
            )
            return
        self._send_pending()

    def publish_state(self, topic: str, payload: bytes) -> None:
        """Publish a retained message in order with the others; empty clears it."""
        if self._open:
            self._pending.append((topic, payload, True))
            self._send_pending()

    def close(self) -> None:
        """Disconnect. What waits for the window is lost, and replayed by the session."""
        if self._open:
            with contextlib.suppress(OSError, ValueError):
                self._paho.disconnect()
                self._flush_socket()
        self._lose(None)

    # --- inside: all on the event loop

    def _send_pending(self) -> None:
        while self._open and self._pending and self._under_way < self._window:
            topic, payload, retain = self._pending.popleft()
            self._pending_bytes -= 0 if retain else len(payload)
            self._under_way += 1
            self._paho.publish(topic, payload, qos=1, retain=retain)
        self._flush_socket()

    def _flush_socket(self) -> None:
        if self._socket is None or not self._open:
            return
        if self._paho.want_write():
            self._paho.loop_write()
        if self._paho.want_write() and self._socket is not None:
            self._loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket)
            self._flush_socket()

    def _readable(self) -> None:
        while True:
            code = self._paho.loop_read(64)
            if code != MQTTErrorCode.MQTT_ERR_SUCCESS:
                self._hand_over()
                self._lose(LinkError(f"{self.broker.name}: connection lost ({code.name})"))
                return
            sock = self._socket
            if not isinstance(sock, ssl.SSLSocket) or not sock.pending():
                break
        self._hand_over()
        self._send_pending()

    def _hand_over(self) -> None:
        inbox, self._inbox = self._inbox, []
        for topic, payload in inbox:
            if self._open:
                self._on_message(topic, payload)

    def _tick(self) -> None:
        if self._open:
            code = self._paho.loop_misc()
            if code != MQTTErrorCode.MQTT_ERR_SUCCESS:
                self._lose(LinkError(f"{self.broker.name}: the broker is silent ({code.name})"))
                return
            self._flush_socket()
            self._housekeeping = self._loop.call_later(1.0, self._tick)

    def _drop(self) -> None:
        self._open = False
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        if self._socket is not None:
            self._forget_socket()
        sock = self._paho.socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    def _forget_socket(self) -> None:
        """Stop watching the socket, before paho or we close it."""
        sock, self._socket = self._socket, None
        if sock is not None and sock.fileno() >= 0:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)

    def _lose(self, reason: DeltarelayError | None) -> None:
        if self._open:
            self._drop()
            self._on_lost(reason)

    def _connected(self, _c: Any, _u: Any, _f: Any, reason: ReasonCode, props: Any) -> None:
        if self._connack.done():
            return
        if reason.is_failure:
            self._connack.set_exception(LinkError(f"{self.broker.name}: refused: {reason}"))
            return
        allowed = getattr(props, "ReceiveMaximum", 65535)
        self._window = max(1, min(MAX_WINDOW, allowed // 2))
        self._connack.set_result(None)

    def _message(self, _client: Any, _userdata: Any, message: MQTTMessage) -> None:
        self._inbox.append((message.topic, message.payload))

    def _published(self, _c: Any, _u: Any, _mid: int, _reason: Any, _props: Any) -> None:
        self._under_way = max(0, self._under_way - 1)

    def _subscribed(self, _c: Any, _u: Any, mid: int, reasons: list[ReasonCode], _p: Any) -> None:
        answer = self._answers.pop(mid, None)
        if answer is not None and not answer.done():
            answer.set_result(reasons)

    def _disconnected(self, _c: Any, _u: Any, _f: Any, reason: ReasonCode, _p: Any) -> None:
        if not self._connack.done():
            self._connack.set_exception(LinkError(f"{self.broker.name}: closed ({reason})"))
