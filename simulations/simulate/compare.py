"""Whether a decoder holds the conversations that a vehicle has, turn by turn."""

import asyncio
from collections.abc import Mapping, Sequence
from secrets import token_hex

from shared import frames
from shared.errors import LinkError
from shared.frames import Held, HelloBody, WelcomeBody
from shared.session.conversation_log import Turn
from shared.tokenlog import crc_of, history_crc
from shared.transport import Transport
from shared.transport.shm import connect_shm

ANSWER_WITHIN = 5.0


async def differing_talks(
    socket: str, device: str, talks: Mapping[str, Sequence[Turn]]
) -> list[str]:
    """Return the conversations of which the decoder holds something else, or nothing.

    It is asked as the device itself, which must be away. Of all turns before the current one it
    tells the CRC of user and reply ids. The last turn may still be the current one, because the
    word that the vehicle has its reply got lost: it is said again, and the decoder takes it only
    if it holds the same ids.

    Args:
        socket: where the decoder listens on this host.
        talks: finished turns by conversation id.

    Raises:
        LinkError: the decoder does not answer.
    """
    asker = _Asker(await connect_shm(socket), device, talks)
    try:
        welcome = await asker.greet()
        for held in welcome.held:
            asker.confirm_last(welcome.epoch, held)
        held_at_last = (await asker.greet()).held
    finally:
        asker.close()
    by_name = {asker.numbers[held.stream]: held for held in held_at_last}
    return [name for name, turns in talks.items() if not _same(by_name.get(name), turns)]


def _same(held: Held | None, turns: Sequence[Turn]) -> bool:
    crc = 0
    for turn in turns:
        crc = history_crc(*turn.kept, crc)
    return held is not None and (held.turn, held.history, held.ended) == (len(turns), crc, False)


class _Asker:
    """Greets as a device that knows certain conversations."""

    def __init__(
        self, transport: Transport, device: str, talks: Mapping[str, Sequence[Turn]]
    ) -> None:
        self._transport, self._device, self._talks = transport, device, talks
        self._welcomes: asyncio.Queue[WelcomeBody] = asyncio.Queue()
        self._boot, self._greetings = token_hex(8), 0
        self.numbers = dict(enumerate(talks, 1))
        """Conversations by stream number."""
        transport.start(self._arrived, lambda _: None)

    async def greet(self) -> WelcomeBody:
        self._greetings += 1
        body = HelloBody(
            self._device, self._boot, conversations=self.numbers, clock_us=self._greetings
        )
        self._send(frames.Hello(frames.CONNECTION, 0, body))
        try:
            return await asyncio.wait_for(self._welcomes.get(), ANSWER_WITHIN)
        except TimeoutError:
            raise LinkError(
                f"{self._transport.name}: no WELCOME for {self._device} in {ANSWER_WITHIN:g} s"
            ) from None

    def confirm_last(self, epoch: int, held: Held) -> None:
        turns = self._talks[self.numbers[held.stream]]
        if held.turn == len(turns) - 1 and held.ended:
            reply = turns[-1].reply_ids
            self._send(
                frames.ReplyAck(
                    held.stream,
                    epoch,
                    turn=held.turn,
                    index=len(reply),
                    crc=crc_of(reply),
                    again=False,
                )
            )

    def close(self) -> None:
        self._transport.close()

    def _send(self, frame: frames.Frame) -> None:
        self._transport.send(frames.encode(frame, frames.MINOR), provisional=frame.provisional)

    def _arrived(self, data: bytes) -> None:
        frame = frames.decode(data)
        if isinstance(frame, frames.Welcome):
            self._welcomes.put_nowait(frame.body)
