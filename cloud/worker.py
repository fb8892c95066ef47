"""The thread that owns the engine: commands in, results out, nothing else touches a sequence.

Commands are closures over the engine. They run between two steps, in order, so that a burst of
revisions costs one step and a step never sees half a change.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from cloud.engine.engine import Drawn, Engine, StepResult
from cloud.load import LoadGauge
from shared.errors import CapacityError
from shared.frames import Load

log = logging.getLogger(__name__)

READ_LOAD = 0.1
"""Seconds between two looks at what waits for the engine."""

Command = Callable[[Engine], None]
Answer = TypeVar("Answer")


class Worker:
    """Runs an engine in a thread of its own.

    Args:
        on_failed: called in the event loop if a step raises; the engine does not go on.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Command] = deque()
        self._chores: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.num_steps = 0
        self.last_step = 0.0
        """When the engine last finished a step, in `time.monotonic`."""
        self.load = Load.GREEN
        self._gauge = LoadGauge()
        self._read_at = 0.0

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Run `command` on the engine before its next step."""
        self._commands.append(command)
        self._wake.set()

    def submit_chore(self, chore: Command) -> None:
        """Run `chore` when its turn comes, one between two steps: it may take a millisecond."""
        self._chores.append(chore)
        self._wake.set()

    async def ask(self, question: Callable[[Engine], Answer], patience: float) -> Answer:
        """Return what `question` finds between two steps.

        Raises:
            CapacityError: the engine did not come to it within `patience` seconds, or has stopped.
        """
        answer: asyncio.Future[Answer] = self._loop.create_future()

        def put(found: Answer) -> None:
            if not answer.done():
                answer.set_result(found)

        def command(engine: Engine) -> None:
            self._loop.call_soon_threadsafe(put, question(engine))

        self.submit(command)
        try:
            return await asyncio.wait_for(answer, patience)
        except TimeoutError:
            age = time.monotonic() - self.last_step
            last = f"its last step ended {age:.1f} s ago" if self.num_steps else "it has run none"
            state = "stands still" if self._thread.is_alive() else "has stopped"
            raise CapacityError(
                f"the engine {state}: no answer within {patience:g} s, {last}; see the log"
            ) from None

    @property
    def is_alive(self) -> bool:
        """The engine's thread runs."""
        return self._thread.is_alive()

    async def close(self) -> None:
        """Stop after the step under way."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                while self._commands:
                    self._commands.popleft()(self._engine)
                if self._chores:
                    self._chores.popleft()(self._engine)
                result = self._engine.step()
                self._read_load(now=result is None)
                if result is not None:
                    self._report(result)
                elif not self._commands and not self._chores and not self._stopping:
                    self._wake.wait()
        except BaseException as error:  # a bug or no memory: say so, do not hang in silence
            log.exception("the engine stopped")
            self._loop.call_soon_threadsafe(self._on_failed, error)

    def _read_load(self, *, now: bool) -> None:
        at = time.monotonic()
        if now or at >= self._read_at + READ_LOAD:
            self._read_at = at
            self.load = self._gauge.read(self._engine.backlog)

    def _report(self, result: StepResult) -> None:
        self.num_steps += 1
        self.last_step = time.monotonic()
        if result.drawn:
            self._loop.call_soon_threadsafe(_deliver, result.drawn)


def _deliver(drawn: Sequence[Drawn]) -> None:
    """Hand tokens to those who wait for them, in the event loop."""
    for token in drawn:
        token.generation.deliver(token.token, token.stop)
