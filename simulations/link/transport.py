"""A bad link around any transport, on the level of frames: what the session has to bear."""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from shared.errors import CapacityError, DeltarelayError
from shared.transport import MAX_PENDING, OnClosed, OnFrame, Transport
from simulations.link.direction import Direction


class EmulatedTransport:
    """One end of a connection whose frames pass `up` when sent and `down` when received.

    Frames of both classes are lost, repeated, held up and overtaken alike. So reliable frames get
    what the contract of transports rules out, and a session sees it only where a broker would drop
    or repeat them. An end of the connection is told behind the frames that came before it; what is
    under way at a `close` here is lost.
    """

    def __init__(self, inner: Transport, *, up: Direction, down: Direction) -> None:
        self._inner = inner
        self._up = _Way(up, inner.send)
        self._down = _Way(down, self._deliver)
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._is_open = True

    @property
    def name(self) -> str:
        """The inner transport's address."""
        return self._inner.name

    @property
    def peer(self) -> str:
        """Who the inner transport says is at the other end."""
        return self._inner.peer

    def start(self, on_frame: OnFrame, on_closed: OnClosed) -> None:
        """Begin to deliver frames."""
        self._on_frame, self._on_closed = on_frame, on_closed
        self._inner.start(self._arrived, self._inner_ended)

    def send(self, frame: bytes, *, provisional: bool = False) -> None:
        """Put a frame on the link."""
        if not self._is_open or (provisional and self._up.num_bytes > MAX_PENDING // 2):
            return
        self._up.put(frame, provisional=provisional)
        self._check(self._up)

    def close(self) -> None:
        """End the connection; what is under way is lost."""
        self._is_open = False
        self._up.clear()
        self._down.clear()
        self._inner.close()
        self._tell(None)

    def _arrived(self, frame: bytes) -> None:
        if self._is_open:
            self._down.put(frame)
            self._check(self._down)

    def _deliver(self, frame: bytes, *, provisional: bool) -> None:
        del provisional
        if self._on_frame is not None:
            self._on_frame(frame)

    def _inner_ended(self, reason: DeltarelayError | None) -> None:
        if self._is_open:
            self._is_open = False
            self._up.clear()
            self._down.when_empty(lambda: self._tell(reason))

    def _check(self, way: "_Way") -> None:
        """Give up when too much is under way."""
        if way.num_bytes > MAX_PENDING:
            waiting = f"{self.name}: {way.num_bytes} bytes wait on the emulated link"
            on_closed, self._on_closed = self._on_closed, None
            self.close()
            if on_closed is not None:
                on_closed(CapacityError(waiting))

    def _tell(self, reason: DeltarelayError | None) -> None:
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, None
        if on_closed is not None:
            on_closed(reason)


class _Way:
    """Frames under way in one direction, and the timer of the next to come out."""

    def __init__(self, direction: Direction, out: Callable[..., None]) -> None:
        self._direction, self._out = direction, out
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, bytes, bool]] = []
        self._numbers = count()
        self._alarm: asyncio.TimerHandle | None = None
        self._after: Callable[[], None] | None = None
        self.num_bytes = 0
        """Bytes under way."""

    def put(self, frame: bytes, *, provisional: bool = False) -> None:
        now = self._loop.time()
        for at in self._direction.send(len(frame), now):
            if at <= now and not self._waiting:
                self._out(frame, provisional=provisional)
                continue
            self.num_bytes += len(frame)
            heappush(self._waiting, (at, next(self._numbers), bytes(frame), provisional))
        self._set_alarm()

    def when_empty(self, action: Callable[[], None]) -> None:
        """Do this behind the last frame under way."""
        self._after = action
        self._finish()

    def clear(self) -> None:
        """Lose what is under way."""
        self._waiting.clear()
        self.num_bytes = 0
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._waiting:
            self._alarm = self._loop.call_at(self._waiting[0][0], self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, frame, provisional = heappop(self._waiting)
            self.num_bytes -= len(frame)
            self._out(frame, provisional=provisional)
        self._set_alarm()
        self._finish()

    def _finish(self) -> None:
        if self._after is not None and not self._waiting:
            action, self._after = self._after, None
            action()
