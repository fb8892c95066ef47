"""One MQTT 5 connection on the event loop: paho's packets, our sending window, our socket settings.

paho is used without its thread, its queue and its reconnecting: after a break its backlog would
burst past every window, ignore the server's receive maximum and overtake what the relay has to say
first. Here a connection is used once; the owner makes the next one, and the session replays what
counts.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from shared.errors import CapacityError, DeltarelayError, LinkError
from shared.transport import MAX_PENDING
from shared.transport.mqtt_address import Broker
from shared.transport.mqtt_trouble import alert_in, closed_early, may_not_publish, no_tls, refused
from shared.transport.mqtt_window import MAX_WINDOW, Message, SendWindow

KEEPALIVE = 15
"""Seconds; a silent broker is noticed after one and a half of them."""
CONNECT_TIMEOUT = 5.0
_RECEIVE_MAXIMUM = 64
_BROKE = "the connection broke"
_SUCCESS = MQTTErrorCode.MQTT_ERR_SUCCESS


class MqttClient:
    """One connection; its callbacks run in the event loop.

    Args:
        on_message: takes a topic and what came under it.
        on_lost: takes why the connection is over; None: `close` was called.
        on_refused: takes a topic under which the broker lets us publish nothing, and an error that
            says so.
    """

    def __init__(
        self,
        broker: Broker,
        client_id: str,
        *,
        will_topic: str,
        on_message: Callable[[str, bytes], None],
        on_lost: Callable[[DeltarelayError | None], None],
        on_refused: Callable[[str, LinkError], None] = lambda _topic, _why: None,
    ) -> None:
        self.broker = broker
        self._on_message, self._on_lost = on_message, on_lost
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self.window = SendWindow()
        self._inbox: list[tuple[str, bytes]] = []
        self._answers: dict[int, asyncio.Future[list[ReasonCode]]] = {}
        self._connack: asyncio.Future[None] = self._loop.create_future()
        self._socket: socket.socket | None = None
        self._housekeeping: asyncio.TimerHandle | None = None
        self._open = False
        self._why = _BROKE
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
        client.on_log = self._logged
        client.on_socket_close = lambda *_: self._forget_socket()

    async def connect(self) -> None:
        """Open the connection.

        Raises:
            LinkError: the broker is absent, silent, or refuses.
        """
        name = self.broker.name
        try:
            sock = await self._open_socket()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket, self._open = sock, True
            self._loop.add_reader(sock, self._readable)
            self._flush_socket()
            await asyncio.wait_for(self._connack, CONNECT_TIMEOUT)
        except ssl.SSLError as error:
            self._drop()
            raise LinkError(f"{name}: {no_tls(error)}") from None
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
        if code != _SUCCESS or mid is None:
            raise LinkError(f"{self.broker.name}: subscribe failed ({code.name})")
        answer = self._answers[mid] = self._loop.create_future()
        self._flush_socket()
        try:
            reasons = await asyncio.wait_for(answer, CONNECT_TIMEOUT)
        except TimeoutError:
            raise LinkError(f"{self.broker.name}: no answer to SUBSCRIBE") from None
        if len(reasons) != len(topics):
            answered = f"SUBACK for {len(reasons)} of {len(topics)} topics"
            raise LinkError(f"{self.broker.name}: {answered}")
        for topic, reason in zip(topics, reasons, strict=True):
            if reason.is_failure:
                raise LinkError(f"{self.broker.name}: subscribing {topic} was refused: {reason}")

    def publish(self, topic: str, payload: bytes, *, provisional: bool = False) -> None:
        """Send at QoS 1 within the window and in order, or at once at QoS 0 if `provisional`."""
        if not self._open:
            return
        if provisional:
            if self.window.is_idle and not self._paho.want_write():
                self._paho.publish(topic, payload, qos=0)
                self._flush_socket()
            return
        self.window.add(Message(topic, payload))
        if self.window.num_bytes > MAX_PENDING:
            waiting = f"{self.broker.name}: {self.window.num_bytes} bytes wait for the broker"
            self._lose(CapacityError(waiting))
            return
        self._send_waiting()

    def publish_state(self, topic: str, payload: bytes) -> None:
        """Publish a retained message in order with the others; empty clears it."""
        if self._open:
            self.window.add(Message(topic, payload, retain=True))
            self._send_waiting()

    def close(self) -> None:
        """Disconnect; the broker publishes the will. What waits for the window is lost."""
        if self._open:
            with contextlib.suppress(OSError, ValueError):
                self._paho.disconnect(ReasonCode(PacketTypes.DISCONNECT, identifier=4))
        self._lose(None)

    # --- inside: all on the event loop

    async def _open_socket(self) -> socket.socket:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call] # paho's
        properties.ReceiveMaximum = _RECEIVE_MAXIMUM
        opening = asyncio.ensure_future(
            asyncio.to_thread(
                self._paho.connect,
                self.broker.host,
                self.broker.port,
                KEEPALIVE,
                clean_start=True,
                properties=properties,
            )
        )
        try:
            code = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the thread goes on: close what it opens
            opening.add_done_callback(self._opened_late)
            raise
        sock = self._paho.socket()
        if code != _SUCCESS or not isinstance(sock, socket.socket):
            raise self._closed(f"connect failed ({code.name})")
        return sock

    def _closed(self, why: str) -> LinkError:
        if not self._connack.done():
            why = closed_early(why, tls=self.broker.tls is not None)
        return LinkError(f"{self.broker.name}: {why}")

    def _opened_late(self, opening: asyncio.Future[Any]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._drop()

    def _send_waiting(self) -> None:
        while self._open and (message := self.window.take()) is not None:
            topic, payload, retain = message
            sent = self._paho.publish(topic, payload, qos=1, retain=retain)
            self.window.sent(sent.mid, topic)
        self._flush_socket()

    def _flush_socket(self) -> None:
        if not self._open:
            return
        if self._paho.want_write():
            self._paho.loop_write()
        if self._socket is None:  # paho has closed it
            self._lose(self._closed(self._why))
        elif self._paho.want_write():
            self._loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket)
            self._flush_socket()

    def _readable(self) -> None:
        try:
            more = True
            while more and self._socket is not None:
                self._paho.loop_read()
                sock = self._socket
                more = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        except Exception as error:  # whatever paho raises over a broker's malformed bytes
            self._lose(LinkError(f"{self.broker.name}: malformed MQTT ({error!r})"))
            return
        inbox, self._inbox = self._inbox, []
        for topic, payload in inbox:
            if self._open:
                self._on_message(topic, payload)
        self._send_waiting()

    def _tick(self) -> None:
        if self._open:
            self._paho.loop_misc()
            self._flush_socket()
            self._housekeeping = self._loop.call_later(1.0, self._tick)

    def _drop(self) -> None:
        self._open = False
        if self._housekeeping is not None:
            self._housekeeping.cancel()
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
        if not self._open:
            return
        self._drop()
        waiting: list[asyncio.Future[Any]] = [self._connack, *self._answers.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(reason or LinkError(f"{self.broker.name}: closed here"))
        self._on_lost(reason)

    def _connected(self, _c: Any, _u: Any, _f: Any, reason: ReasonCode, props: Any) -> None:
        if self._connack.done():
            return
        if reason.is_failure:
            error = LinkError(f"{self.broker.name}: {refused(reason)}")
            self._connack.set_exception(error)
            return
        self._paho.on_log = None
        allowed = getattr(props, "ReceiveMaximum", 65535)
        self.window.allow(allowed)
        self._connack.set_result(None)

    def _message(self, _client: Any, _userdata: Any, message: MQTTMessage) -> None:
        self._inbox.append((message.topic, bytes(message.payload)))

    def _published(self, _c: Any, _u: Any, mid: int, reason: ReasonCode, _props: Any) -> None:
        topic = self.window.acknowledged(mid)  # QoS 0 is reported, too
        if topic is not None and reason.is_failure:
            error = LinkError(f"{self.broker.name}: {may_not_publish(topic, reason)}")
            self._loop.call_soon(self._on_refused, topic, error)

    def _subscribed(self, _c: Any, _u: Any, mid: int, reasons: list[ReasonCode], _p: Any) -> None:
        answer = self._answers.pop(mid, None)
        if answer is not None and not answer.done():
            answer.set_result(reasons)

    def _disconnected(self, _c: Any, _u: Any, _f: Any, reason: ReasonCode, _p: Any) -> None:
        if self._connack.done() or self._why == _BROKE:
            self._why = f"closed ({reason})"

    def _logged(self, _client: Any, _userdata: Any, _level: int, text: str) -> None:
        """Until the broker has answered: only here paho says what a TLS alert was."""
        self._why = alert_in(text) or self._why
