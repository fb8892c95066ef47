"""Reads over the shoulder of one MQTT client: its window, from the bytes. Pure.

The packets are those of MQTT 5 (OASIS standard, sections 2.1, 3.2 to 3.4); 3.1.1 has the same in
what is read here.
"""

CONNACK, PUBLISH, PUBACK = 2, 3, 4


class MqttWatch:
    """Follows one connection of a client; `see` its bytes in both directions, as they pass it."""

    def __init__(self) -> None:
        self._rest = {"up": bytearray(), "down": bytearray()}
        self._unacknowledged: set[int] = set()
        self.max_unacknowledged = 0
        """Most QoS 1 publishes that the client had under way at once."""
        self.was_accepted = False
        """The broker let it in."""

    def see(self, way: str, data: bytes) -> None:
        """Take the bytes that passed next; `way`: "up" to the broker or "down" from it."""
        rest = self._rest[way]
        rest += data
        while (packet := _take_packet(rest)) is not None:
            if way == "up":
                self._sent(*packet)
            else:
                self._received(*packet)

    def _sent(self, kind: int, flags: int, body: bytes) -> None:
        if kind == PUBLISH and flags >> 1 & 3 == 1:
            at = 2 + int.from_bytes(body[:2], "big")
            self._unacknowledged.add(int.from_bytes(body[at : at + 2], "big"))
            self.max_unacknowledged = max(self.max_unacknowledged, len(self._unacknowledged))

    def _received(self, kind: int, _flags: int, body: bytes) -> None:
        if kind == PUBACK:
            self._unacknowledged.discard(int.from_bytes(body[:2], "big"))
        elif kind == CONNACK:
            self.was_accepted = body[1] == 0


def _take_packet(rest: bytearray) -> tuple[int, int, bytes] | None:
    """Take kind, flags and body of the first packet, if it is there as a whole."""
    length, at = 0, 1
    while True:
        if at >= len(rest):
            return None
        length |= (rest[at] & 0x7F) << 7 * (at - 1)
        at += 1
        if rest[at - 1] < 0x80:
            break
    if len(rest) < at + length:
        return None
    packet = rest[0] >> 4, rest[0] & 0x0F, bytes(rest[at : at + length])
    del rest[: at + length]
    return packet
