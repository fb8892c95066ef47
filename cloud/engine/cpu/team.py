"""Threads that run one compiled program together (`phases` says how they share its work)."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cloud.engine.cpu.phases import Counters, Crew, counters_for

_Job = tuple[Callable[..., None], Counters, Sequence[Any]]


class Team:
    """The calling thread and `size` - 1 helpers.

    A program is a compiled function (crew, *arguments) that calls `enter` first and `leave` last.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: list[queue.SimpleQueue[_Job | None]] = []
        for member in range(1, size):
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._jobs.append(jobs)
            name = f"engine-{member}"
            threading.Thread(target=_help, args=(jobs,), name=name, daemon=True).start()

    def run(self, program: Callable[..., None], num_phases: int, *arguments: Any) -> None:
        """Run a program on all threads; it returns when its work is done."""
        counters = counters_for(num_phases)
        for member, jobs in enumerate(self._jobs, 1):
            jobs.put((program, counters, (self._crew(member, counters), *arguments)))
        program(self._crew(0, counters), *arguments)

    def _crew(self, member: int, counters: Counters) -> Crew:
        return Crew(member, self.size, counters.ctypes.data)

    def close(self) -> None:
        """End the helpers."""
        for jobs in self._jobs:
            jobs.put(None)


def _help(jobs: "queue.SimpleQueue[Any]") -> None:
    while (job := jobs.get()) is not None:
        program, counters, arguments = job  # counters: alive until a late one has looked at them
        program(*arguments)
        del program, counters, arguments, job  # what they hold is free before the next one comes
